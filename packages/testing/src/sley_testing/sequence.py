"""Proves that ranks issue their collectives in one order, or finds where they part ways.

Ranks of a group that issue the same collectives in another order hang, or sum the wrong tensors without an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_PAIRED = ("send", "recv", "recv_any")
_UNEVEN = ("all_to_all", "all_to_all_single")
_ROOTED = {"send": "to", "recv": "from"}


@dataclass(frozen=True)
class Collective:
    """One call as one rank issued it.

    op: as `torch.distributed` names it (2.13), with `send`, `recv` and `recv_any` for every way to send and receive.
    group: the group that the caller asked for, else the description that torch's group was made with, else its name.
    ranks: its members, global. communicator: torch's group, where groups of the same members share one.
    numel, dtype: of what this rank puts in (of what it takes out, for a scatter); 0 for a barrier.
    is_async: False only where torch was asked to wait. Sends and receives do not tell, and count as asynchronous.
    peer: global rank of the root, the destination or the source, where the call has one.
    site: the innermost frames outside torch and the kit, as `file:line function`.
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
        return f"{self.op}{size}" + ("" if self.peer is None else f" {_ROOTED.get(self.op, 'with root')} {self.peer}")

    @property
    def agreed(self) -> tuple[object, ...]:
        """Returns what all members of the communicator must do alike; both ends, of a send and its receive."""
        if self.op in _PAIRED:
            return self.group, self.numel, self.dtype
        return self.group, self.op, None if self.op in _UNEVEN else self.numel, self.dtype, self.peer


def assert_same_sequence(sequences: Sequence[Sequence[Collective]] | Mapping[int, Sequence[Collective]]) -> None:
    """Asserts that all members of every group issued the same collectives in the same order, and every send
    meets its receive.

    sequences: what each rank recorded, by rank. Ranks that are left out of a mapping are not compared.
    Raises AssertionError for the first call that differs, with what the ranks do there and where in their code.
    """
    by_rank = dict(sequences) if isinstance(sequences, Mapping) else dict(enumerate(sequences))
    for (group, _), members in _by_group(by_rank).items():
        for calls in members.values():
            anyone = next((call for call in calls if call.op == "recv_any"), None)
            assert anyone is None, f"a receive from any source has no order to prove: {group}{_at(anyone)}"
        together = {rank: [c for c in calls if c.op not in _PAIRED] for rank, calls in members.items()}
        _assert_alike(f"the order on {group} is not the same on all ranks", together)
        for pair in _pairs(members):
            _assert_alike(f"a send and its receive on {group} do not match", pair)


def _by_group(by_rank: Mapping[int, Sequence[Collective]]) -> dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]]:
    """Returns, per communicator, the calls of each of its members, none for one that never used it; in the
    order of first use.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = defaultdict(dict)
    for rank, calls in by_rank.items():
        for call in calls:
            members = groups[call.communicator or call.group, call.ranks]
            if not members:
                members.update({member: [] for member in call.ranks if member in by_rank})
            members[rank].append(call)
    return groups


def _pairs(members: Mapping[int, list[Collective]]) -> Iterator[dict[int, list[Collective]]]:
    """Returns what each source sends to each target beside what that target receives from it, where both were recorded."""
    between: dict[tuple[int, int], dict[int, list[Collective]]] = {}
    for rank, calls in members.items():
        for call in calls:
            if call.op in _PAIRED and call.peer is not None and call.peer in members:
                ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
                between.setdefault(ends, {ends[0]: [], ends[1]: []})[rank].append(call)
    yield from between.values()


def _assert_alike(what: str, members: Mapping[int, list[Collective]]) -> None:
    """Asserts that all members of a group issued the same collectives in the same order. what: begins the message."""
    for place in range(max(map(len, members.values()), default=0)):
        here = {rank: calls[place] if place < len(calls) else None for rank, calls in members.items()}
        ranks: dict[object, list[int]] = defaultdict(list)
        for rank, call in here.items():
            ranks[call and call.agreed].append(rank)
        if len(ranks) > 1:
            lines = [_line(alike, here[alike[0]], place) for alike in ranks.values()]
            first = next(iter(members.values()))
            before = [f"  before it, on all: {first[place - 1]}{_at(first[place - 1])}"] if place else []
            raise AssertionError("\n".join([f"{what}: call {place + 1} differs", *lines, *before]))


def _line(ranks: list[int], call: Collective | None, num_before: int) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"  {who}: {call}{_at(call)}" if call else f"  {who}: nothing after {num_before} calls"


def _at(call: Collective) -> str:
    return "".join(f"\n      {'at' if index == 0 else 'from'} {place}" for index, place in enumerate(call.site))
