"""Records collectives and checks that ranks issue them in the same order.

If ranks issue the collectives of a group in different orders, they hang, or reduce the wrong tensors without an error.
"""

import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.comm.exchanges import Members, run_guarded
from sley_core.comm.transport import Transport, Work
from sley_core.comm.world import Group
from sley_core.engine.shards import StandIn, UnregisteredParameter
from sley_core.model.layers import Layer, Model
from sley_core.topology import DEFAULT_CHANNEL, GroupEntry
from sley_testing.drawn_copies import fill_with_nan
from sley_testing.happens_before import iterate_tensors
from sley_trainer import assemble
from sley_trainer.assemble import build_meta_model

_POINT_TO_POINT_OPS = ("send", "recv", "recv_any")  # operations of two ranks
_UNEVEN_OPS = ("all_to_all", "all_to_all_single")  # operations in which ranks may have inputs of different sizes
_ROOT_PREPOSITIONS = {"send": "to", "recv": "from"}  # the word before the peer's rank in messages, by operation


@dataclass(frozen=True)
class Collective:
    """Describes one collective call of one rank.

    op: the name in `torch.distributed` (2.13). Every send or receive is `send`, `recv` or `recv_any`. group: the label of
    Sley's group that issued the call, or `communicator` if no group of Sley did. ranks: the global ranks of the members.
    communicator: the description or name of torch's process group, which groups with the same members share. numel, dtype: the
    number of elements and the dtype of this rank's input (for a scatter, of its output); 0 and "" for a barrier. is_async:
    False for calls with `async_op=False` and for `monitored_barrier`. Sends and receives count as asynchronous. peer: the
    global rank of the root, destination or source; None if the operation has none. site: the innermost frames outside torch and
    the kit, as `file:line function`.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    numel: int
    dtype: str
    is_async: bool = True
    peer: int | None = None
    site: tuple[str, ...] = field(default=(), compare=False)
    communicator: str = field(default="", compare=False)

    def __str__(self) -> str:
        size = f" of {self.numel} {self.dtype}" if self.dtype else ""
        return f"{self.op}{size}" + (
            "" if self.peer is None else f" {_ROOT_PREPOSITIONS.get(self.op, 'with root')} {self.peer}"
        )

    @property
    def agreed_properties(self) -> tuple[object, ...]:
        """The properties that must be equal on all members, or at both ends of a send."""
        if self.op in _POINT_TO_POINT_OPS:
            return self.group, self.numel, self.dtype
        return self.group, self.op, None if self.op in _UNEVEN_OPS else self.numel, self.dtype, self.peer


def assert_same_sequence(sequences: Sequence[Sequence[Collective]]) -> None:
    """Asserts that all members of each group issued the same collectives in the same order, and that sends match receives.
    sequences: the recorded calls of ranks 0, 1 and so on; other ranks are not compared. Raises AssertionError for the first
    call that differs, with the calls of the ranks and their lines of code, and for a receive from any source.
    """
    for (group, _), members in _calls_by_communicator(sequences).items():
        for call in (call for calls in members.values() for call in calls):
            is_ordered = call.op != "recv_any"
            assert is_ordered, f"the order of a receive from any source cannot be checked: {group}{_format_site(call)}"
        group_calls = {rank: [c for c in calls if c.op not in _POINT_TO_POINT_OPS] for rank, calls in members.items()}
        _assert_equal_calls(f"the order on {group} is not the same on all ranks", group_calls)
        # The sends and receives of each pair (source, target) of recorded ranks.
        pairs: dict[tuple[int, int], dict[int, list[Collective]]] = {}
        for rank, calls in members.items():
            for call in calls:
                if call.op in _POINT_TO_POINT_OPS and call.peer is not None and call.peer in members:
                    ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
                    pairs.setdefault(ends, {ends[0]: [], ends[1]: []})[rank].append(call)
        for pair in pairs.values():
            _assert_equal_calls(f"a send and its receive on {group} do not match", pair)


def _calls_by_communicator(
    sequences: Sequence[Sequence[Collective]],
) -> dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]]:
    """Returns the calls of each recorded member of each communicator. The communicators are in the order of their first use."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = {}
    for rank, calls in enumerate(sequences):
        for call in calls:
            members: dict[int, list[Collective]] = {member: [] for member in call.ranks if member < len(sequences)}
            groups.setdefault((call.communicator or call.group, call.ranks), members)[rank].append(call)
    return groups


def _assert_equal_calls(description: str, members: Mapping[int, list[Collective]]) -> None:
    """Asserts that all members issued the same collectives in the same order. description: the start of the message."""
    for index in range(max(map(len, members.values()), default=0)):
        current = {rank: calls[index] if index < len(calls) else None for rank, calls in members.items()}
        groups: dict[object, list[int]] = defaultdict(list)
        for rank, call in current.items():
            groups[call and call.agreed_properties].append(rank)
        if len(groups) > 1:
            lines = []
            for ranks in groups.values():
                label = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
                call = current[ranks[0]]
                lines.append(f"  {label}: {call}{_format_site(call)}" if call else f"  {label}: nothing after {index} calls")
            calls = next(iter(members.values()))
            previous = [f"  before it, on all: {calls[index - 1]}{_format_site(calls[index - 1])}"] if index else []
            raise AssertionError("\n".join([f"{description}: call {index + 1} differs", *lines, *previous]))


def _format_site(call: Collective) -> str:
    """Returns the lines of `call.site` for a message, each with a newline before it."""
    return "".join(f"\n      {'at' if index == 0 else 'from'} {line}" for index, line in enumerate(call.site))


_TORCH_NAMES = {
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
"""The names of operations in `torch.distributed`, by the other names under which torch dispatches them."""


_HIDDEN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))  # messages omit frames in these folders
_NUM_SITES = 3  # the maximum number of frames in `Collective.site`


@contextmanager
def collectives() -> Iterator[list[Collective]]:
    """Yields a list that receives the collectives that this rank issues in the block, in order."""
    recorder = _CollectiveRecorder()
    with recorder, ExitStack() as stack:
        # torch does not dispatch cross-memory operations. `input_index` is the position of this rank's input.
        if find_spec("sley_cma") is not None:
            module = import_module("sley_cma.transport")
            transport, published_offer = module.CmaTransport, module.PublishedOffer
            for cls, method, operation, input_index in (
                (transport, "all_gather", "gather", 1),
                (published_offer, "all_gather", "gather", 1),
                (transport, "reduce_scatter", "reduce", 0),
                (transport, "all_to_all", "swap", 1),
                (transport, "all_reduce", "all_reduce", 0),
            ):
                record_and_call = recorder.wrap_method(operation, input_index, getattr(cls, method))
                stack.enter_context(mock.patch.object(cls, method, record_and_call))
        yield recorder.calls


class _CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends to `calls` each collective that torch dispatches while the mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim", "prims"):
            schema = func._schema
            arguments = {argument.name: argument.default_value for argument in schema.arguments}
            arguments |= dict(zip(arguments, args, strict=False)) | (kwargs or {})
            group = arguments.get("process_group", arguments.get("group_name"))
            if isinstance(group, str):
                # torch has no public function that finds a group by name
                group = c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
            if group is not None:
                process_group = group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
                self.calls.append(_describe_call(schema.name, process_group, arguments))
        return func(*args, **(kwargs or {}))

    def wrap_method(self, operation: str, input_index: int, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a replacement for `method` of a cross-memory transport. The replacement records each call as `operation`,
        then calls `method`. input_index: the position of this rank's input among the arguments.
        """

        def record_and_call(transport: Any, *args: Any, **kwargs: Any) -> Any:
            members: Members = getattr(transport, "offers", transport).members
            tensors = [args[input_index]] if isinstance(args[input_index], Tensor) else args[input_index]
            numel, dtype = sum(tensor.numel() for tensor in tensors), str(tensors[0].dtype).removeprefix("torch.")
            self.calls.append(Collective(operation, f"{members} {operation}", members.ranks, numel, dtype, site=_user_frames()))
            return method(transport, *args, **kwargs)

        return record_and_call


def _describe_call(name: str, group: dist.ProcessGroup, arguments: Mapping[str, Any]) -> Collective:
    """Returns the description of a call. name, arguments: the name and the arguments of the operation that torch dispatches."""
    base_name = name.partition("::")[2].strip("_")
    op = _TORCH_NAMES.get(base_name, base_name)
    ranks = tuple(dist.get_process_group_ranks(group))
    peers = [arguments[key] for key in ("root_rank", "src", "dst") if key in arguments]
    # Measure the tensor that has the same size on all ranks: the input, or the output of a scatter.
    prefix = "output" if op == "scatter" else "input"
    default = next(iter(arguments.values()))
    measured = next((value for key, value in arguments.items() if key.startswith(prefix)), default)
    tensors = [] if "barrier" in op else list(iterate_tensors(measured))
    communicator = f"group {group.group_name}" if group.group_desc in ("", "undefined") else group.group_desc
    return Collective(
        op=op,
        group=_caller_label(communicator),
        ranks=ranks,
        numel=sum(tensor.numel() for tensor in tensors),
        dtype="/".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
        is_async=op != "monitored_barrier" and arguments.get("async_op", True),
        peer=ranks[peers[0]] if peers else None,
        site=_user_frames(),
        communicator=communicator,
    )


def _caller_label(communicator: str) -> str:
    """Returns the label of Sley's group that issued the call, or `communicator` if no group of Sley did. Groups with the same
    members share a communicator, which has the label of the first group. Only `run_guarded`, which starts every exchange, knows
    the labels of the other groups.
    """
    frame = next((frame for frame, _ in walk_stack(None) if frame.f_code is run_guarded.__code__), None)
    if frame is None:
        return communicator
    members: Members = frame.f_locals["turn"].members
    if communicator.startswith((f"{members.axis}[", f"{members.axis}.")):
        return communicator
    return GroupEntry(members.axis, DEFAULT_CHANNEL, members.ranks).label


def _user_frames() -> tuple[str, ...]:
    """Returns up to _NUM_SITES frames of the caller outside torch and the test kit, each as "file:line function". The first is
    the innermost.
    """
    codes = ((frame.f_code, line) for frame, line in walk_stack(None))
    user_codes = ((code, line) for code, line in codes if not code.co_filename.startswith(_HIDDEN_FOLDERS))
    return tuple(f"{code.co_filename}:{line} {code.co_name}" for code, line in islice(user_codes, _NUM_SITES))


Traces = dict[str, dict[str, Any]]
"""Maps the name of each module to the plain data of its class and attributes. `traces` returns such a dict."""


def traces(layers: Iterable[Layer]) -> Traces:
    """Returns the class and the attributes of each module of `layers`, by module name, as plain data that can be compared. The
    data of a parameter are its class, attributes, `requires_grad`, numbers of hooks, and whether it has a gradient. Values,
    dtype and device are omitted, since a run sets them. A stand-in for a sharded or remote weight is described as that weight.
    """
    return {
        name: {"class": type(module).__qualname__} | {key: _describe_attribute(value) for key, value in vars(module).items()}
        for layer in layers
        for name, module in layer.module.named_modules(prefix=layer.name)
    }


@contextmanager
def record_built_models() -> Iterator[list[tuple[Model, Traces]]]:
    """Yields a list that receives each model that `assemble` builds in the block, with its initial traces."""
    built_models: list[tuple[Model, Traces]] = []

    def build_and_record(*args: Any) -> Model:
        model = build_meta_model(*args)
        built_models.append((model, traces(model.layers)))
        return model

    with mock.patch.object(assemble, "build_meta_model", build_and_record):
        yield built_models


def _describe_attribute(value: Any) -> Any:
    """Returns plain data that describes an attribute of a module and can be compared."""
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else index: _describe_attribute(item) for index, (key, item) in enumerate(value.items())
        }
    if not isinstance(value, Tensor):
        if value is None or isinstance(value, bool | int | float | str):
            return value
        name = getattr(value, "__qualname__", None)
        return f"{type(value).__qualname__} {name}" if name else type(value).__qualname__
    if isinstance(value, StandIn):
        value = value.shard
    cls: type[Tensor] = type(value)
    attributes = set(vars(value))
    if cls is UnregisteredParameter:
        cls, attributes = nn.Parameter, attributes - {"refusal"}
    with torch._C.DisableTorchFunctionSubclass():  # some parameters refuse to be read
        return {
            "class": cls.__qualname__,
            "attributes": sorted(attributes),
            "requires_grad": value.requires_grad,
            "has_gradient": value.is_leaf and value.grad is not None,
            "hooks": len(value._backward_hooks or ()),
            "accumulated_hooks": len(value._post_accumulate_grad_hooks or ()),
        }


def assert_untouched(expected: Traces, layers: Iterable[Layer]) -> None:
    """Asserts that the traces of `layers` equal `expected`. The message names the attributes that differ in a module."""
    actual = traces(layers)
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    for name, old in expected.items():
        pairs = {key: (old.get(key, "nothing"), actual[name].get(key, "nothing")) for key in {**old, **actual[name]}}
        lines = [f"{name}: {key} was {before}, is {after}" for key, (before, after) in pairs.items() if before != after]
        assert not lines, "\n".join(lines)


def can_read_peers() -> bool:
    """Returns whether sley-cma is installed and can read other processes' memory: on x86-64 Linux, as root or without Yama."""
    if find_spec("sley_cma") is None or platform.machine() != "x86_64" or sys.platform != "linux":
        return False
    yama_file = Path("/proc/sys/kernel/yama/ptrace_scope")
    return os.geteuid() == 0 or not yama_file.exists() or yama_file.read_text("ascii").strip() == "0"


@contextmanager
def late_exchanges() -> Iterator[None]:
    """Delays each exchange in the block until the program waits for it, like a device whose communication stream is far behind.
    All ranks must enter the block. A result contains NaN until `wait`, so a program that reads a result too early computes NaN.
    Inputs are sent at the time of `wait`, so a program that writes to them, frees them or returns them to a pool too early
    sends wrong values. Exchanges then happen in the order of their waits, which must be the same on all ranks. Sends and
    receives are not delayed.
    """
    choose = Group.transport

    def choose_late(group: Group, channel: str = DEFAULT_CHANNEL) -> Transport:
        transport = choose(group, channel)
        return transport if group.size == 1 else _LateTransport(transport, group)

    with mock.patch.object(Group, "transport", choose_late):
        yield


class _DeferredWork(Work):
    """An exchange that starts when the program waits for it."""

    def __init__(self, start: Callable[[], Work]) -> None:
        self._start = start

    @cached_property
    def _work(self) -> Work:
        return self._start()

    def is_completed(self) -> bool:
        """Returns whether the exchange is complete; False until `wait` is called."""
        return "_work" in vars(self) and self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()

    def release(self) -> None:
        self._work.wait()
        self._work.release()

    def wait_sent(self) -> None:
        self._work.wait()
        self._work.wait_sent()


class _LateTransport(Transport):
    """Delays each exchange of another transport until the program waits for it."""

    def __init__(self, transport: Transport, group: Group) -> None:
        self._transport = transport
        self._group = group

    def num_scratch_rows(self, num_rows: int) -> int:
        return self._transport.num_scratch_rows(num_rows)

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        for tensor, shard in zip(tensors, shards, strict=True):
            rows = tensor.view(self._group.size, *shard.shape)
            for coord, row in enumerate(rows):
                if coord != self._group.coord or row.data_ptr() != shard.data_ptr():
                    fill_with_nan(row)
        return _DeferredWork(lambda: self._transport.all_gather(tensors, shards, label=label))

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, checksum: int = 0) -> Work:
        return _DeferredWork(lambda: self._transport.reduce_scatter(tensors, scratches, label=label, checksum=checksum))

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, checksum: int = 0) -> Work:
        fill_with_nan(received)
        return _DeferredWork(lambda: self._transport.all_to_all(received, sent, label=label, checksum=checksum))

    def all_reduce(self, tensor: Tensor, *, label: str, checksum: int = 0) -> Work:
        return _DeferredWork(lambda: self._transport.all_reduce(tensor, label=label, checksum=checksum))
