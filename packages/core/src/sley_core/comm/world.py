"""Joins the processes of a run. A `World` holds this process's rank and device, and the number of processes.

World.alone()       one process, nothing to join
World.join(...)     one of several: under `train-cli run`, torchrun, SLURM or Kubernetes, described by the environment
World.fake(3, 64)   rank 3 of 64 without devices or peers: assembles a run on meta; takes steps with a device of fake tensors
"""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them
from torch.distributed.rendezvous import rendezvous as open_rendezvous

from sley_core.comm.device import Device
from sley_core.comm.group import Groups, Simulation, make_groups
from sley_core.comm.progress import first_line
from sley_core.errors import RunError
from sley_core.topology import GroupEntry, Topology

T = TypeVar("T")


class Rendezvous(Protocol):
    """Connects the ranks of a launcher before they join."""

    store: Store

    def all_or_none(self, timeout_s: float) -> AbstractContextManager[None]:
        """Returns a context manager for each rank's work. At its end, all ranks continue or all raise RunError."""


@dataclass
class World(AbstractContextManager["World"]):
    """Holds one rank's view of the world. As a context manager, it leaves the default group that it joined.

    rank: this rank, from 0. size: the number of ranks. owns_default_group: whether this object made torch's default group.
    simulation: replaces peers and values in a fake world; None in a real one. created: the results of `groups`, until `close`.
    rendezvous: the launcher's rendezvous, or None.
    """

    rank: int
    size: int
    device: Device
    owns_default_group: bool = False
    simulation: Simulation | None = None
    created: list[Groups] = field(default_factory=list, repr=False)
    rendezvous: Rendezvous | None = None

    @classmethod
    def alone(cls, device: str | Device = "auto") -> "World":
        """Returns the world of one process. device: a name for `Device.pick`, or a device."""
        return cls(0, 1, _pick_device(device))

    @classmethod
    def join(
        cls,
        device: str | Device = "auto",
        *,
        timeout_s: float = 600.0,
        environ: Mapping[str, str] | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> "World":
        """Joins the world that the launcher's environment describes, and returns it. Without a launcher, returns
        `alone(device)`.

        Blocks until all ranks have joined. An existing default group is used and left open. timeout_s: the limit of start-up
        and of each collective on the default group. environ: the environment; `os.environ` by default. rendezvous: the
        launcher's rendezvous, whose store is used. Raises RunError `rendezvous-failed` if peers are missing, or if the
        environment does not define a valid rank and size.
        """
        environ = os.environ if environ is None else environ
        local_rank = _environment_integer(environ, "LOCAL_RANK", "0")
        local_size = _environment_integer(environ, "LOCAL_WORLD_SIZE", "1")
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), _pick_device(device, local_rank, local_size))
        if "RANK" not in environ and _environment_integer(environ, "WORLD_SIZE", "1") == 1:
            return cls.alone(device)
        rank, size = _environment_integer(environ, "RANK"), _environment_integer(environ, "WORLD_SIZE")
        if rank >= size:
            raise RunError(
                "rendezvous-failed",
                f"the environment has RANK = {rank} and WORLD_SIZE = {size}, but RANK must be from 0 to WORLD_SIZE - 1",
            )
        rank_device = _pick_device(device, local_rank, local_size)
        timeout = timedelta(seconds=timeout_s)
        try:
            store = open_store(environ, rank, size, timeout) if rendezvous is None else rendezvous.store
            store.set_timeout(timeout)
            dist.init_process_group(
                rank_device.backend,
                store=unused_part(store, environ, "world"),
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=rank_device.torch_device if rank_device.backend == "nccl" else None,
            )
        except (RuntimeError, ValueError) as error:
            raise RunError("rendezvous-failed", f"this rank could not join the process group: {first_line(error)}") from error
        return cls(rank, size, rank_device, owns_default_group=True, rendezvous=rendezvous)

    @classmethod
    def fake(cls, rank: int, size: int, device: Device | None = None, simulation: Simulation | None = None) -> "World":
        """Returns rank `rank` of a world of `size` ranks that do not exist, with torch's fake backend.

        device: a device whose tensors have no values; meta by default. simulation: replaces peers and values; without it, a run
        can be assembled but cannot take steps.
        """
        # torch installs an exception hook that prefixes a fatal error with `[rank0]:`, once for each such world.
        except_hook = sys.excepthook
        dist.init_process_group("fake", rank=rank, world_size=size)
        sys.excepthook = except_hook
        rank_device = device or Device(torch.device("meta"))
        return cls(rank, size, rank_device, owns_default_group=True, simulation=simulation or Simulation())

    def all_or_none(self, timeout_s: float) -> AbstractContextManager[None]:
        """Returns a context manager for work that may fail. With a rendezvous, all ranks continue or all raise RunError."""
        return self.rendezvous.all_or_none(timeout_s) if self.rendezvous is not None else nullcontext()

    def groups(
        self, topology: Topology, timeout_s: float, extra: Sequence[GroupEntry] = (), *, cross_memory: bool = False
    ) -> Groups:
        """Creates and returns this rank's groups, first the topology's, then `extra`. A collective over the world.

        cross_memory: whether CPU ranks of one host may read each other's memory (cross-memory attach).
        """
        assert topology.world_size == self.size, f"the topology has {topology.world_size} ranks, but the world has {self.size}"
        groups = make_groups(
            topology,
            self.rank,
            backend=self.device.backend if self.simulation is None else "fake",
            timeout=timedelta(seconds=timeout_s),
            extra=extra,
            device=self.device.torch_device,
            cross_memory=cross_memory,
            simulation=self.simulation,
        )
        self.created.append(groups)
        return groups

    def close(self) -> None:
        """Destroys all groups that this object made, including the default group. Waits for their threads to end."""
        for groups in self.created:
            groups.close()
        self.created.clear()
        self._leave()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._leave(has_failed=True)  # does not wait after a failure: peers may wait for this rank

    def _leave(self, *, has_failed: bool = False) -> None:
        if self.owns_default_group and dist.is_initialized():
            if has_failed and dist.get_backend() == "nccl":
                with suppress(RuntimeError):
                    c10d._abort_process_group()  # destroying it would wait for its exchanges
            else:
                dist.destroy_process_group()
            self.owns_default_group = False


def _pick_device(device: str | Device, local_rank: int = 0, local_size: int = 1) -> Device:
    return Device.pick(device, local_rank, local_size) if isinstance(device, str) else device


def _environment_integer(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = environ.get(name, default)
    if value is None or not value.isdecimal():
        message = f"the environment variable {name} must be a number, but is {'not set' if value is None else repr(value)}"
        hint = "a launcher sets RANK, WORLD_SIZE and LOCAL_RANK; unset them to run without a launcher"
        raise RunError("rendezvous-failed", message, hint=hint)
    return int(value)


STORE = "SLEY_STORE"
"""The environment variable in which a local launch names its file store. Without it, `env://` is used."""

_STORE_KEYS = (STORE, "MASTER_ADDR", "MASTER_PORT", "RANK")
_num_uses_by_purpose: Counter[tuple[str | None, ...]] = Counter()
_open_stores: dict[tuple[str | None, ...], Store] = {}


def open_store(environ: Mapping[str, str], rank: int, size: int, timeout: timedelta) -> Store:
    """Returns the store that the launcher's environment names. Blocks until the store exists.

    A store is opened once, and stays open until another one is opened. Closing it between two worlds would be unsafe: the last
    rank to close a file store deletes the file, even if another rank has just reopened it, and a TCP store ends with rank 0's,
    even if another rank has just reconnected to it. Raises torch's RuntimeError or ValueError if the store cannot be opened.
    """
    key = (*(environ.get(name) for name in _STORE_KEYS), str(size))
    if key in _open_stores:
        with suppress(RuntimeError, ValueError):
            _open_stores[key].check(["anything"])
            return _open_stores[key]
    store: Store = next(open_rendezvous(environ.get(STORE, "env://"), rank, size, timeout=timeout))[0]
    _open_stores.clear()
    _open_stores[key] = store
    return store


def unused_part(store: Store, environ: Mapping[str, str], purpose: str) -> PrefixStore:
    """Returns an unused part of `store`, the same on all ranks that call this equally often for `purpose`."""
    key = (purpose, *(environ.get(name) for name in _STORE_KEYS))
    _num_uses_by_purpose[key] += 1
    # After a restart the store still has the addresses of ended ranks, which gloo must not use. Several hosts count their
    # restarts separately.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_host(environ) else "0"
    return PrefixStore(f"attempt {attempt}, {purpose} {_num_uses_by_purpose[key]}", store)


def reset_stores() -> None:
    """Resets the counts of `unused_part`, and closes open stores, so that the state is that of a new process."""
    _num_uses_by_purpose.clear()
    _open_stores.clear()


def is_one_host(environ: Mapping[str, str]) -> bool:
    """Returns whether at most one torchrun agent started the ranks. The agent's store then outlives the ranks."""
    return environ.get("GROUP_WORLD_SIZE", "1") == "1"
