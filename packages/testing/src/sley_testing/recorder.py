"""Records the collectives that this rank issues, where torch dispatches them: below every way to spell them.

So `async_op`, `from torch.distributed import ...`, single and batched sends and receives, barriers, objects, functional
collectives, and what is issued in a backward are all seen. Calls from other Python threads are not. Patching the
functions of `torch.distributed` would miss the imported names, patching ProcessGroup the functional collectives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.comm.guard import guarded
from sley_core.comm.progress import Members
from sley_core.topology import DEFAULT_LANE, GroupEntry
from sley_testing.sequence import Collective

_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_base": "all_gather_single",
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_any_source": "recv_any",
    "isend": "send",
    "irecv": "recv",
}
"""torch's dispatched names, where they are not those of `torch.distributed`."""


def _unseen() -> dict[tuple[type, str], tuple[str, int]]:
    """Returns the verbs that read the memory of peers, which torch does not dispatch: the name of each, and which argument
    this rank gives. Empty without sley-cma.
    """
    if find_spec("sley_cma") is None:
        return {}
    transport, rows = import_module("sley_cma.transport").Cma, import_module("sley_cma.rows").Shared
    return {
        (transport, "all_gather"): ("gather", 1),
        (rows, "all_gather"): ("gather", 1),
        (transport, "reduce_scatter"): ("reduce", 0),
        (transport, "all_to_all"): ("swap", 1),
        (transport, "all_reduce"): ("all_reduce", 0),
    }


_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_NUM_SITES = 3


@contextmanager
def collectives() -> Iterator[list[Collective]]:
    """Yields the list to which the collectives of the block are added, in the order in which this rank issues them."""
    recorder = _Recorder()
    with recorder, _wrapped(recorder.saw):
        yield recorder.calls


@contextmanager
def _wrapped(saw: Callable[[str, Members, Sequence[Tensor]], None]) -> Iterator[None]:
    """Wraps the transport that torch does not see, of all groups: `saw` is told what this rank gives, before each exchange."""

    def members_of(one: Any) -> Members:
        members: Members = (one.offers.connection if hasattr(one, "offers") else one).members
        return members

    def wrap(verb: Callable[..., Any], operation: str, given: int) -> Callable[..., Any]:
        def told(self: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = args[given]
            saw(operation, members_of(self), [tensors] if isinstance(tensors, Tensor) else tensors)
            return verb(self, *args, **kwargs)

        return told

    unseen = _unseen()
    verbs = [(kind, name, getattr(kind, name)) for kind, name in unseen]
    for kind, name, verb in verbs:
        setattr(kind, name, wrap(verb, *unseen[kind, name]))
    try:
        yield
    finally:
        for kind, name, verb in verbs:
            setattr(kind, name, verb)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim", "prims"):
            schema = func._schema
            given = {argument.name: argument.default_value for argument in schema.arguments}
            given |= dict(zip(given, args, strict=False)) | (kwargs or {})
            group = given.get("process_group", given.get("group_name"))
            if group is not None:
                self.calls.append(_describe(schema.name, _unboxed(group), given))
        return func(*args, **(kwargs or {}))

    def saw(self, operation: str, members: Members, tensors: Sequence[Tensor]) -> None:
        """Notes an exchange by cross-memory attach."""
        numel, dtype = sum(one.numel() for one in tensors), str(tensors[0].dtype).removeprefix("torch.")
        label = f"{members} {operation}"
        self.calls.append(Collective(operation, label, members.ranks, numel, dtype, is_async=True, peer=None, site=_site()))


def _describe(name: str, group: dist.ProcessGroup, given: Mapping[str, Any]) -> Collective:
    """Returns the record of a collective from the arguments of torch's operation."""
    plain = name.partition("::")[2].strip("_")
    op = _NAMES.get(plain, plain)
    ranks = tuple(dist.get_process_group_ranks(group))
    peers = [given[key] for key in ("root_rank", "src", "dst") if key in given]
    tensors = [] if "barrier" in op else list(_tensors(_contribution(op, given)))
    named = group.group_desc not in ("", "undefined")
    communicator = group.group_desc if named else f"group {group.group_name}"
    return Collective(
        op=op,
        group=_asked_for(communicator),
        ranks=ranks,
        numel=sum(tensor.numel() for tensor in tensors),
        dtype="/".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
        is_async=op != "monitored_barrier" and given.get("async_op", True),
        peer=ranks[peers[0]] if peers else None,
        site=_site(),
        communicator=communicator,
    )


def _asked_for(communicator: str) -> str:
    """Returns the label of the group for which the call is made; `communicator` itself for a call that names none.

    Groups of the same members share a communicator, which has the label of the first of them. The others' names are
    known only to `guarded`, in which every exchange of a group begins.
    """
    frame = sys._getframe().f_back
    while frame and frame.f_code is not guarded.__code__:
        frame = frame.f_back
    if frame is None:
        return communicator
    members: Members = frame.f_locals["turn"].members
    if communicator.startswith((f"{members.axis}[", f"{members.axis}.")):
        return communicator
    return GroupEntry(members.axis, DEFAULT_LANE, members.ranks).label


def _contribution(op: str, given: Mapping[str, Any]) -> Any:
    """Returns the argument whose size is the same on all ranks: the input, the only one, or the output of a scatter."""
    prefix = "output" if op == "scatter" else "input"
    return next((value for key, value in given.items() if key.startswith(prefix)), next(iter(given.values())))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _unboxed(group: Any) -> dist.ProcessGroup:
    if isinstance(group, str):
        # torch has no public way from a name to a group
        group = c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _site() -> tuple[str, ...]:
    """Returns the innermost places in the code, outside torch and the recorder, that led to the call."""
    places: list[str] = []
    frame = sys._getframe().f_back
    while frame and len(places) < _NUM_SITES:
        if not frame.f_code.co_filename.startswith(_HIDDEN):
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(places)
