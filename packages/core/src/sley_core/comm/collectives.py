"""Collectives over a group, with errors that name group and content; and comparisons of what ranks run and exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.groups import Exchange, Group, Op
from sley_core.comm.guard import Turn, guarded, message_turn, turn_of
from sley_core.comm.marks import HINT, Exchanged
from sley_core.comm.startup import gather_values
from sley_core.errors import RunError
from sley_core.topology import DEFAULT_LANE

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""Renamed in torch 2.13."""


class Pending:
    """The handle of a collective. After `wait` the result is there (on CUDA: for later work on this stream); done without
    `work`."""

    __slots__ = ("_turn", "_work")

    def __init__(self, work: Any = None, turn: Turn | None = None) -> None:
        self._work = work
        self._turn = turn

    def wait(self) -> None:
        """Waits for the result; a second call does nothing.

        Raises RunError `collective-failed`, naming operation, group and tensor, after a timeout or if a peer died, and
        `ranks-differ` if ranks wait for each other.
        """
        if self._work is None or self._turn is None:
            return
        guarded(self._work.wait, self._turn)
        self._work = None

    def is_done(self) -> bool:
        """Returns whether `wait` would return at once; never blocks."""
        return self._work is None or bool(self._work.is_completed())


class Imitated(Pending):
    """Is the handle of an exchange with members that do not exist; `waits` is called where the rank would wait for it."""

    __slots__ = ("_waits",)

    def __init__(self, waits: Callable[[], None]) -> None:
        super().__init__()
        self._waits = waits

    def wait(self) -> None:
        self._waits()


class LandingPending(Pending):
    """A message that arrives on the host, in `came`; the first `wait` copies it to `place`, on the device."""

    __slots__ = ("_came", "_place")

    def __init__(self, work: Any, turn: Turn, came: Tensor, place: Tensor) -> None:
        super().__init__(work, turn)
        self._came = came
        self._place = place

    def wait(self) -> None:
        has_landed = self._work is None
        super().wait()
        if not has_landed:
            self._place.copy_(self._came)


def goes_by_host(tensor: Tensor, group: Group, lane: str) -> bool:
    """Returns whether a message must be in host memory: gloo takes any address for one of the host."""
    return tensor.device.type != "cpu" and dist.get_backend(group.lane(lane)) == "gloo"


def _started(
    kind: Exchange, operation: str, result: Tensor, given: Tensor, group: Group, lane: str, what: str, call: Callable[[], Any]
) -> Pending:
    """Starts the collective `call` of torch, which gives `given` and fills `result`; returns its handle."""
    if group.size == 1:
        if result is not given:
            result.copy_(given)
        return Pending()
    if group.imitate is not None:
        return Imitated(group.imitate(kind, result, given, lane, what))
    turn = turn_of(operation, group, what, lane, given.nbytes)
    return Pending(guarded(call, turn), turn)


def all_reduce(tensor: Tensor, group: Group, op: Op = "sum", *, what: str) -> Pending:
    """Starts an all-reduce of `tensor` (contiguous) in place over `group`. what: describes it, for errors."""
    call = partial(dist.all_reduce, tensor, OPS[op], async_op=True)
    return _started(op, "all-reduce", tensor, tensor, group, DEFAULT_LANE, what, lambda: call(group=group.lane()))


def broadcast(tensor: Tensor, group: Group, *, what: str) -> Pending:
    """Starts a broadcast of `tensor` in place from the first rank of `group`; returns its handle."""
    call = partial(dist.broadcast, tensor, src=group.ranks[0], async_op=True)
    return _started("broadcast", "broadcast", tensor, tensor, group, DEFAULT_LANE, what, lambda: call(group=group.lane()))


def all_to_all(output: Tensor, tensor: Tensor, group: Group, *, what: str, lane: str = DEFAULT_LANE) -> Pending:
    """Starts an all-to-all: slice i of `tensor` goes to the i-th rank of `group`, slice i of `output` comes from it.

    Both are contiguous, of one size and dtype, and divide along dim 0 into `group.size` equal slices. Returns the handle.
    """
    call = partial(dist.all_to_all_single, output, tensor, async_op=True)
    return _started("all_to_all", "all-to-all", output, tensor, group, lane, what, lambda: call(group=group.lane(lane)))


def all_gather(output: Tensor, tensor: Tensor, group: Group, *, what: str, lane: str = DEFAULT_LANE) -> Pending:
    """Starts an all-gather of the ranks' `tensor` along dim 0 of `output`, in the order of `group`; both are contiguous."""
    call = partial(all_gather_single, output, tensor, async_op=True)
    return _started("all_gather", "all-gather", output, tensor, group, lane, what, lambda: call(group=group.lane(lane)))


def send_to(tensor: Tensor, group: Group, lane: str, peer: int, *, what: str) -> Pending:
    """Starts to send `tensor` (contiguous) to the member of `group` at coordinate `peer`, on `lane`; returns its handle.

    Calls the communicator itself, which numbers members as `group` does: the overhead of `dist.isend` is a fifth of the call.
    """
    if group.imitate is not None:
        return Imitated(group.imitate("send", tensor, tensor, lane, what))
    turn = message_turn("send", group, what, lane, group.coord, peer, tensor.nbytes)
    sent = tensor.to("cpu", copy=True) if goes_by_host(tensor, group, lane) else tensor
    return Pending(guarded(lambda: group.lane(lane).send([sent], peer, 0), turn), turn)


def receive_from(tensor: Tensor, group: Group, lane: str, peer: int, *, what: str) -> Pending:
    """Starts to receive into `tensor` (contiguous) from the member of `group` at coordinate `peer`; returns its handle."""
    if group.imitate is not None:
        return Imitated(group.imitate("receive", tensor, tensor, lane, what))
    turn = message_turn("receive", group, what, lane, peer, group.coord, tensor.nbytes)
    if goes_by_host(tensor, group, lane):
        came = torch.empty_like(tensor, device="cpu")
        return LandingPending(guarded(lambda: group.lane(lane).recv([came], peer, 0), turn), turn, came, tensor)
    return Pending(guarded(lambda: group.lane(lane).recv([tensor], peer, 0), turn), turn)


def gather_objects(value: Any, group: Group, *, what: str) -> list[Any]:
    """Gathers every rank's `value`, small and JSON, in the order of the ranks of the group, which is `control`. Blocks. Where
    the other members do not exist, the values of all ranks are this one's.
    """
    if not group.has_peers:
        return [value] * group.size
    values: list[Any] = guarded(lambda: gather_values(value, group.lane()), turn_of("all-gather of objects", group, what))
    return values


MOST_PARTS = 3
"""How many differing parts an error names."""

Parts = Callable[[], Mapping[str, str]]


def agree(facts: Mapping[str, str], control: Group, parts: Mapping[str, Parts] = MappingProxyType({})) -> None:
    """Compares `facts` (plan digest, versions, group table) over all ranks; a blocking collective on `control`.

    parts: by name of a fact, a function that returns the pieces that make it up; called and gathered only if ranks differ, to
    name the piece. Raises RunError `ranks-disagree` on every rank alike, with the fact, the ranks in the minority, and both
    values.
    """
    everyone = gather_objects(dict(facts), control, what="the facts that ranks agree on")
    for name in facts:
        values = [str(theirs.get(name)) for theirs in everyone]
        most, _ = Counter(values).most_common(1)[0]
        odd = [(rank, value) for rank, value in zip(control.ranks, values, strict=True) if value != most]
        if odd:
            rank, value = odd[0]
            usual = next(r for r, v in zip(control.ranks, values, strict=True) if v == most)
            others = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            message = f"rank {rank}{others} has {name} {value}, rank {usual} has {most}"
            if name in parts:
                # All ranks get here: they have compared the same values.
                every = gather_objects(dict(parts[name]()), control, what=f"what {name} is made of")
                of = dict(zip(control.ranks, every, strict=True))
                if pieces := differing(of[rank], of[usual]):
                    message = f"rank {rank}{others} has another {name.removeprefix('the ')} than rank {usual}: {pieces}"
            raise RunError("ranks-disagree", message, hint="install the same versions and give the same plan on every node")


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Returns in words which parts differ, the first of them with both values."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    texts = [f"`{name}` is {one.get(name, 'left out')}, not {other.get(name, 'left out')}" for name in names[:MOST_PARTS]]
    more = f", and {len(names) - MOST_PARTS} more" if len(names) > MOST_PARTS else ""
    return "; ".join(texts) + more


Exchanges = dict[str, Exchanged]
"""A summary of a rank's exchanges without marks, by the label of the group."""

_NOTHING = ((), 0, 0, "")


def difference(group: Group, number: int) -> int:
    """Returns this rank's summand of a sum over all ranks that is 0 if the ranks of `group` have the same `number`.

    An integer below 2^32 x the group's size; float64 sums are exact below 2^53. If ranks differ the sum is 0 with a chance of
    2^-32. The hash includes the group, so that differences in two groups do not cancel, as they could with a linear function.
    """
    digest = blake2b(f"{group.axis} {group.ranks[0]} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") * (group.size - 1 if group.ranks[0] == group.rank else -1)


def exchanges_of(groups: Iterable[Group]) -> Exchanges:
    """Returns this rank's exchanges since the logs of `groups` were cleared, by the group's label."""
    # Runs in every step, so labels, which list the group's ranks, are made only for groups with exchanges.
    return {str(group): exchanged for group in groups if (exchanged := group.log.exchanged(group.ranks)) is not None}


def exchanges_differ(groups: Iterable[Group]) -> int:
    """Returns this rank's summand of a sum over all ranks that is 0 if the ranks of each group have exchanged the same: in each
    group one rank adds size - 1 times a hash of its number, and the others subtract theirs.
    """
    noted = ((group, group.log.exchanged(group.ranks)) for group in groups)
    return sum(difference(group, exchanged.number) for group, exchanged in noted if exchanged is not None)


def exchanges_error(when: str, own: Exchanges, control: Group) -> RunError:
    """Returns the error `ranks-differ` of ranks that are known to differ, the same on all: it names the first group in which
    they exchanged other numbers, and who. A blocking collective on `control`. own: this rank's counts.
    """
    views = gather_objects(own, control, what="what ranks have exchanged")
    groups: dict[str, Sequence[int]] = {label: one[0] for view in views for label, one in view.items()}
    for label, ranks in groups.items():
        by_rank = {rank: tuple(views[rank].get(label, _NOTHING))[1:] for rank in ranks}
        (usual, _), *others = Counter(by_rank.values()).most_common()
        if others:
            other = next(rank for rank, exchanged in by_rank.items() if exchanged == usual)
            odd = next(rank for rank, exchanged in by_rank.items() if exchanged != usual)
            message = f"{when}: of {label}, rank {odd} made {_in_words(by_rank[odd])}, rank {other} {_in_words(usual)}"
            return RunError("ranks-differ", message, hint=HINT)
    raise AssertionError(f"all ranks have exchanged the same: {views}")


def _in_words(exchanged: Sequence[Any]) -> str:
    times, _, last = exchanged
    return f"{times} exchanges, the last of {last}" if times else "none"
