"""The world of a run, its groups of ranks, and their collectives and messages. Errors name the group and the content.

World.alone()       one process, nothing to join
World.join(...)     one of several: under `train-cli run`, torchrun, SLURM or Kubernetes, described by the environment
World.fake(3, 64)   rank 3 of 64 without devices or peers: assembles a run on meta; takes steps with a device of fake tensors

`World.make_groups` makes communicators from the topology's table of groups. All ranks process its lines in the same order, and
join the groups that name them. After start-up nothing runs on the default group, and only this module calls `new_group`. A fake
world (`Simulation`) has the same groups, with torch's backend "fake" and transports that exchange nothing.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them
from torch.distributed.rendezvous import rendezvous as open_rendezvous

from sley_core.comm.device import Device
from sley_core.comm.exchanges import COLLECTIVE_HINT, ExchangeLog, Members, Progress, begin_turn, first_line, run_guarded
from sley_core.comm.transport import (
    GroupWork,
    SingleRankTransport,
    Transport,
    Work,
    connect_transports,
    find_common_transports,
    gather_values,
    make_transport,
    uses_messages,
)
from sley_core.errors import RunError
from sley_core.topology import AXES, DEFAULT_CHANNEL, TIE_PREFIX, GroupEntry, Topology

ReduceOp = Literal["sum", "max", "min"]

ExchangeKind = ReduceOp | Literal["all_gather", "all_to_all", "send", "receive"]
"""The kind of an exchange; for an all-reduce, its operation."""

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""`dist.all_gather_single`, which was called `all_gather_into_tensor` before torch 2.13."""


@dataclass(frozen=True)
class Group(Members):
    """The ranks with which this rank communicates along one axis. It has one communicator and one transport per channel.

    A group of one rank has no communicator, and every collective on it is the identity. channels, transports: each channel's
    communicator and transport, by the name of the channel. exchange_log: records the exchanges of `CollectiveTransport`s.
    simulation: simulates exchanges in a fake world; None in a real world.

    In the methods below, tensors are contiguous, all members make the same collective calls on a channel in the same order, and
    `label` describes the content in errors.
    """

    channels: dict[str, dist.ProcessGroup]
    transports: dict[str, Transport] = field(default_factory=dict)
    exchange_log: ExchangeLog = field(default_factory=ExchangeLog)
    simulation: "Simulation | None" = field(default=None, compare=False, repr=False)

    @property
    def has_peers(self) -> bool:
        """Returns whether the group has other ranks that are not simulated."""
        return self.size > 1 and self.simulation is None

    def channel(self, name: str = DEFAULT_CHANNEL) -> dist.ProcessGroup:
        """Returns the communicator of the channel `name`. Raises KeyError in a group of one rank, which has no communicator."""
        return self.channels[name]

    def transport(self, channel: str = DEFAULT_CHANNEL) -> Transport:
        """Returns the transport of `channel`. Call this at each use: a transport must not be used after `Groups.close`."""
        return SingleRankTransport() if self.size == 1 else self.transports[channel]

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Starts to reduce `tensor` with `op` over the group, in place, on the default channel. Returns the handle."""
        return self._start(op, partial(dist.all_reduce, tensor, _REDUCE_OPS[op], async_op=True), tensor, tensor, label)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        *,
        label: str,
        channel: str = DEFAULT_CHANNEL,
        splits: tuple[list[int], list[int]] = ([], []),
    ) -> Work:
        """Starts an all-to-all, and returns its handle. Slice i of `tensor` goes to the i-th member, and slice i of `output`
        comes from the i-th member. splits: the slices' sizes along dim 0, of `output` and of `tensor`; by default, all equal.
        """
        start = partial(dist.all_to_all_single, output, tensor, *splits, async_op=True)
        return self._start("all_to_all", start, output, tensor, label, channel)

    def all_gather(self, output: Tensor, tensor: Tensor, *, label: str, channel: str = DEFAULT_CHANNEL) -> Work:
        """Starts to gather the members' `tensor` [n, ...] into `output` [size x n, ...], in group order. Returns the handle."""
        start = partial(all_gather_single, output, tensor, async_op=True)
        return self._start("all_gather", start, output, tensor, label, channel)

    def send(self, tensor: Tensor, channel: str, peer: int, *, label: str) -> Work:
        """Starts to send `tensor` to the member at coordinate `peer` on `channel`, and returns the handle. Calls the
        communicator, in which members are numbered by coordinate, and not `dist.isend`, a fifth of whose time is overhead.
        """

        def start(group: dist.ProcessGroup) -> Any:
            message = tensor.to("cpu", copy=True) if self.needs_host_copy(tensor, channel) else tensor
            return group.send([message], peer, 0)

        return self._start("send", start, tensor, tensor, label, channel, (self.coord, peer))

    def receive(self, tensor: Tensor, channel: str, peer: int, *, label: str) -> Work:
        """Starts to receive `tensor` from the member at coordinate `peer` on `channel`, and returns the handle."""
        is_copied = self.simulation is None and self.needs_host_copy(tensor, channel)
        buffer = torch.empty_like(tensor, device="cpu") if is_copied else tensor
        finish = partial(tensor.copy_, buffer) if is_copied else None
        ends = peer, self.coord
        return self._start("receive", lambda group: group.recv([buffer], peer, 0), tensor, tensor, label, channel, ends, finish)

    def gather_objects(self, value: Any, *, label: str) -> list[Any]:
        """Returns the `value` of each member, in the order of ranks. A blocking collective on the default channel. value: a
        small value that can be written as JSON. In a fake world, the result repeats this rank's value.
        """
        if not self.has_peers:
            return [value] * self.size
        turn = begin_turn("all-gather of objects", self, label)
        values: list[Any] = run_guarded(lambda: gather_values(value, self.channel()), turn)
        return values

    def _start(
        self,
        kind: ExchangeKind,
        start: Callable[..., Any],
        result: Tensor,
        tensor: Tensor,
        label: str,
        channel: str = DEFAULT_CHANNEL,
        ends: tuple[int, int] | None = None,
        finish: Callable[[], object] | None = None,
    ) -> Work:
        """Starts an exchange of `tensor` into `result`, and returns its handle. start: called with `group`, the communicator of
        `channel`; returns a work. ends: the coordinates of a message's sender and receiver; None for a collective. finish:
        called once, after the exchange, by the handle's `wait`.
        """
        if self.size == 1:
            if result is not tensor:
                result.copy_(tensor)
            return Work()
        if self.simulation is not None:
            return GroupWork(None, [([], self.simulation.simulate_exchange(self, kind, result, tensor, channel, label))])
        operation = "all-reduce" if kind in _REDUCE_OPS else kind.replace("_", "-")
        turn = begin_turn(operation, self, label, channel, tensor.nbytes, ends)
        return GroupWork(turn, [([run_guarded(lambda: start(group=self.channel(channel)), turn)], finish)])

    def needs_host_copy(self, tensor: Tensor, channel: str) -> bool:
        """Returns whether a message on `channel` must be copied to the host, since gloo sends and receives only host memory."""
        return tensor.device.type != "cpu" and dist.get_backend(self.channel(channel)) == "gloo"


class Groups(dict[str, Group]):
    """Maps each axis to this rank's group, as in `groups["dp"]`. progress: records this rank's exchanges in all groups."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress

    def close(self) -> None:
        """Drops all communicators, so that their threads end before the interpreter exits. A gloo thread may free a tensor some
        time after its result is complete. If the interpreter is exiting then, the process aborts with status -6. Without
        `close`, one of five successful runs ends in this way.
        """
        for group in self.values():
            group.channels.clear()
            group.transports.clear()


class SilentTransport(SingleRankTransport):
    """The transport of a fake world, which exchanges no data: output tensors keep their contents."""

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        return Work()

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, checksum: int = 0) -> Work:
        return Work()


class Simulation:
    """Replaces the communication of a fake world. This base class exchanges nothing, so output tensors keep their contents."""

    def transports(
        self, members: Members, channels: Mapping[str, dist.ProcessGroup], *, cross_memory: bool
    ) -> dict[str, Transport]:
        """Returns a transport for each name in `channels`. cross_memory: whether to simulate cross-memory attach."""
        return dict.fromkeys(channels, SilentTransport())

    def simulate_exchange(
        self, members: Members, kind: ExchangeKind, result: Tensor, tensor: Tensor, channel: str, label: str
    ) -> Callable[[], None] | None:
        """Simulates an exchange of kind `kind` between `members` on `channel`, which sends `tensor` and fills `result`. They
        may be the same tensor. Returns None, or a function that the rank calls when it waits. label: describes the data.
        """
        return None

    def make_output_describer(
        self, plan: Any, stage: Any, dataset: Any, dtype: torch.dtype
    ) -> Callable[[int, int], Any] | None:
        """Returns None. A simulation that runs steps returns a function `(stage, chunk)`, which describes the output of a chunk
        of another stage. stage: the run's stage, with all layers of the model on meta. dtype: the parameters' dtype.
        """
        return None

    def fill_layers(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        """Does nothing here. A subclass replaces the meta tensors of this rank's sharded layers with tensors of `dtype`, so
        that a step can run.
        """


def _axes_with_cma(topology: Topology, extra: Sequence[GroupEntry]) -> tuple[str, ...]:
    """Returns the axes whose exchanges may use cross-memory attach, including the axes of `extra` that request it."""
    weights = ("wp", "stage", "wdp") if topology.wp > 1 else ("stage",)
    sequences = ("sp",) if topology.sp > 1 else ()
    return (*weights, *sequences, *dict.fromkeys(entry.axis for entry in extra if entry.cross_memory))


def make_communicator(entry: GroupEntry, rank: int, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """Returns a new communicator of `entry.ranks`, or None if `rank` is not among them. All ranks of the world call this in the
    same order. Raises RunError `group-failed` if torch cannot create it.
    """
    try:
        with _unbind_default_group() if backend == "gloo" else nullcontext():
            group = dist.new_group(list(entry.ranks), backend=backend, timeout=timeout, group_desc=entry.label)
    except RuntimeError as error:
        message = f"the process group {entry.label} could not be created on rank {rank}: {first_line(error)}"
        raise RunError("group-failed", message, hint=COLLECTIVE_HINT) from error
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def _unbind_default_group() -> Iterator[None]:
    """Unbinds the default group from its device within the block, so that torch can create a gloo group beside NCCL. If the
    default group is bound to a device, as with NCCL, the ranks outside a new group take part in a split of the default
    communicator. The members of the new group do so only for NCCL, so for gloo the ranks outside would wait forever.
    """
    default: Any = dist.group.WORLD
    device_id, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device_id


class Rendezvous(Protocol):
    """Connects the ranks that a launcher starts, before they join torch's default group. `store` is a store that they share."""

    store: Store

    def all_or_none(self, timeout_s: float) -> AbstractContextManager[None]:
        """Returns a context manager for work that may fail. At the end of its block, all ranks continue or all raise RunError.
        timeout_s: how long a rank waits for the other ranks at the end of the block, in seconds.
        """


@dataclass
class World(AbstractContextManager["World"]):
    """One rank's view of all ranks of a run, which makes the rank's groups. As a context manager, it calls `close` at the end,
    or, after an error, only leaves the default group. rank: this rank, from 0. size: the number of ranks. owns_default_group:
    whether this object made torch's default group. simulation: replaces peers and values in a fake world; None in a real world.
    open_groups: the results of `make_groups`, until `close`. rendezvous: the launcher's rendezvous, or None.
    """

    rank: int
    size: int
    device: Device
    owns_default_group: bool = False
    simulation: Simulation | None = None
    open_groups: list[Groups] = field(default_factory=list, repr=False)
    rendezvous: Rendezvous | None = None

    @classmethod
    def alone(cls, device: str | Device = "auto") -> "World":
        """Returns the world of a process without peers. device: a device, or the name of a device for `Device.pick`."""
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
        `alone(device)`. Blocks until all ranks have joined. An existing default group is used and left open. timeout_s: the
        limit of start-up and of each collective on the default group, in seconds. environ: the environment; `os.environ` by
        default. rendezvous: the launcher's rendezvous, whose store replaces the environment's store. Raises RunError
        `rendezvous-failed` if peers are missing, or if the environment does not define a valid rank and size.
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
                store=make_prefix_store(store, environ, "world"),
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
        """Returns the view of rank `rank` in a world of `size` ranks without processes, over torch's backend `fake`. device: a
        simulated device; meta by default. simulation: replaces peers and values; without it, no run can take steps.
        """
        # For each fake world, torch installs an exception hook that prefixes a fatal error with `[rank0]:`.
        except_hook = sys.excepthook
        dist.init_process_group("fake", rank=rank, world_size=size)
        sys.excepthook = except_hook
        device = device or Device(torch.device("meta"))
        return cls(rank, size, device, owns_default_group=True, simulation=simulation or Simulation())

    def all_or_none(self, timeout_s: float) -> AbstractContextManager[None]:
        """Returns the result of the rendezvous's `all_or_none`; without a rendezvous, a context manager that does nothing."""
        return self.rendezvous.all_or_none(timeout_s) if self.rendezvous is not None else nullcontext()

    def make_groups(
        self, topology: Topology, timeout_s: float, extra: Sequence[GroupEntry] = (), *, cross_memory: bool = False
    ) -> Groups:
        """Creates and returns this rank's groups. A collective: all ranks of the world call this with equal arguments.

        A rank also calls `new_group` for entries that do not name it, at 12 us each, because torch names a group by the number
        of earlier groups. `use_local_synchronization` would not help: torch still counts, and hangs if one member has joined
        more groups than another, as with ties of the stages (1, 2) and (2, 3). Entries with the same members, channel and
        backend share one communicator, since all members start their exchanges in the same order anyway.

        extra: the entries of plugins' groups; a rank that no entry of such an axis names gets a group of one. cross_memory:
        whether ranks that share weights or sequences, or sum gradients, may use cross-memory attach; it has no effect unless
        tensors are on the host and the backend is gloo. timeout_s: the limit of each exchange, in seconds. Raises RunError
        `group-failed` if a communicator cannot be created, for example because a member does not join in time.
        """
        assert topology.world_size == self.size, f"the topology has {topology.world_size} ranks, but the world has {self.size}"
        rank, simulation = self.rank, self.simulation
        backend, device = self.device.backend if simulation is None else "fake", self.device.torch_device
        channels: dict[str, dict[str, dist.ProcessGroup]] = {}
        communicators: dict[tuple[tuple[int, ...], str, str], dist.ProcessGroup | None] = {}
        ranks_by_axis: dict[str, tuple[int, ...]] = {}
        for entry in [*topology.groups(), *extra]:
            is_member = rank in entry.ranks
            if is_member:
                ranks_by_axis[entry.axis] = entry.ranks
            if len(entry.ranks) == 1 or (simulation is not None and not is_member):
                continue
            backend_name = "gloo" if entry.backend == "gloo" and simulation is None else backend
            key = (entry.ranks, entry.channel, backend_name)
            if key not in communicators:
                communicators[key] = make_communicator(entry, rank, backend_name, timedelta(seconds=timeout_s))
            communicator = communicators[key]
            assert (communicator is not None) == is_member, f"rank {rank} of {entry.label}: {communicator}"
            if communicator is not None:
                channels.setdefault(entry.axis, {})[entry.channel] = communicator
        for axis in (*AXES, *(entry.axis for entry in extra if not entry.axis.startswith(TIE_PREFIX))):
            ranks_by_axis.setdefault(axis, (rank,))
        progress = Progress()
        axes_with_memory = _axes_with_cma(topology, extra) if cross_memory else ()
        groups = Groups(progress)
        for axis, ranks in ranks_by_axis.items():
            members, log, axis_channels = Members(axis, ranks, rank, progress=progress), ExchangeLog(), channels.get(axis, {})
            if simulation is None:
                transports = {
                    name: make_transport(members, name, channel, log, device) for name, channel in axis_channels.items()
                }
            else:
                transports = simulation.transports(members, axis_channels, cross_memory=axis in axes_with_memory)
            groups[axis] = Group(axis, ranks, rank, axis_channels, transports, log, simulation, progress=progress)
        if simulation is None and cross_memory and topology.world_size > 1 and uses_messages(backend, device):
            records = find_common_transports(groups["control"], groups["control"].channel())
            # Connecting is a collective: all ranks connect the same axes in the same order.
            for group in (groups[axis] for axis in axes_with_memory):
                if group.size > 1:
                    members = Members(group.axis, group.ranks, rank, progress=progress)
                    group.transports.update(connect_transports(members, group.channels, records, timeout_s))
        self.open_groups.append(groups)
        return groups

    def close(self) -> None:
        """Destroys all groups that this object made, which may include the default group, and waits until their threads end."""
        for groups in self.open_groups:
            groups.close()
        self.open_groups.clear()
        self._leave()

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.close()
        else:
            self._leave(has_failed=True)  # does not wait after a failure: peers may wait for this rank

    def _leave(self, *, has_failed: bool = False) -> None:
        """Destroys the default group if this object made it. has_failed: whether to abort an NCCL group, without a wait."""
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
    """Returns the environment variable `name`, or `default`. Raises RunError `rendezvous-failed` if it is not a number."""
    value = environ.get(name, default)
    if value is None or not value.isdecimal():
        message = f"the environment variable {name} must be a number, but is {'not set' if value is None else repr(value)}"
        hint = "a launcher sets RANK, WORLD_SIZE and LOCAL_RANK; unset them to run without a launcher"
        raise RunError("rendezvous-failed", message, hint=hint)
    return int(value)


STORE_VARIABLE = "SLEY_STORE"
"""The environment variable in which a local launch names its file store. If it is not set, torch's `env://` is used."""

_STORE_KEYS = (STORE_VARIABLE, "MASTER_ADDR", "MASTER_PORT", "RANK")  # variables that identify a store and its user
_num_uses_by_purpose: Counter[tuple[str | None, ...]] = Counter()
_open_stores: dict[tuple[str | None, ...], Store] = {}


def open_store(environ: Mapping[str, str], rank: int, size: int, timeout: timedelta) -> Store:
    """Returns the store that the launcher's environment names. Blocks until the store exists, for at most `timeout`. A store is
    opened once, and stays open until another store is opened. Closing it between two worlds would be unsafe: the last rank to
    close a file store deletes the file, even if another rank has just reopened it, and if rank 0 closes a TCP store, a rank
    that has just reconnected loses the store. Raises torch's RuntimeError or ValueError if opening the store fails.
    """
    key = (*(environ.get(name) for name in _STORE_KEYS), str(size))
    if key in _open_stores:
        with suppress(RuntimeError, ValueError):
            _open_stores[key].check(["anything"])
            return _open_stores[key]
    store: Store = next(open_rendezvous(environ.get(STORE_VARIABLE, "env://"), rank, size, timeout=timeout))[0]
    _open_stores.clear()
    _open_stores[key] = store
    return store


def make_prefix_store(store: Store, environ: Mapping[str, str], purpose: str) -> PrefixStore:
    """Returns a view of `store` in which all keys get a prefix that this process has not used before. Ranks that have called
    this function the same number of times for `purpose` get the same prefix.
    """
    key = (purpose, *(environ.get(name) for name in _STORE_KEYS))
    _num_uses_by_purpose[key] += 1
    # After a restart the store still has the addresses of ended ranks, which gloo must not use. Several hosts count their
    # restarts separately.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_single_host(environ) else "0"
    return PrefixStore(f"attempt {attempt}, {purpose} {_num_uses_by_purpose[key]}", store)


def reset_stores() -> None:
    """Resets the counts of `make_prefix_store`, and drops the open stores, as in a new process."""
    _num_uses_by_purpose.clear()
    _open_stores.clear()


def is_single_host(environ: Mapping[str, str]) -> bool:
    """Returns whether at most one torchrun agent started the ranks. The store of a single agent outlives the ranks."""
    return environ.get("GROUP_WORLD_SIZE", "1") == "1"
