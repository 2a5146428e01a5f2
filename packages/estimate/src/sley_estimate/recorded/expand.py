"""Makes a step of many micro-batches from a recorded one of few: each action does what the one in its place did. No torch.

Its place is what comes before and after it, and whether it is the first or the last of its chunk that handlers or gathers
look at. Where no action stood in just that place, one of the same kind and chunk is taken, the last of those that were
recorded. What an action waits for keeps its distance in the queue: the gather before the last stays the one before the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import count

from sley_core.actions.action import GRADIENT_KINDS, Action, Kind
from sley_core.errors import PlanError
from sley_estimate.recorded.words import Awaited, Began, RecordedStep, Word, Words


def expanded(step: RecordedStep, actions: Sequence[Action], more: Sequence[RecordedStep] = ()) -> RecordedStep:
    """Returns `step` as a step of the compute actions `actions`, in their order; `step` itself if those are its own. Each
    action gets the words of a recorded one in the same place, and exchanges get new numbers. Pure.

    more: steps of alike stages, in which an action may be whose place `step` does not have.
    Raises PlanError "estimate-seconds" for an action of a kind or chunk that was not recorded.
    """
    if list(actions) == [action for action, _ in step.actions]:
        return step
    known: dict[Hashable, Words] = {}
    for one in (*more, step):
        for (_, words), places in zip(one.actions, _places([action for action, _ in one.actions]), strict=True):
            for place in places:
                known[place] = words
    copied = _Copies(step, more)
    opening = copied.of(step.opening)
    made = []
    for action, places in zip(actions, _places(actions), strict=True):
        found = [known[place] for place in places if place in known]
        if not found:
            raise PlanError("estimate-seconds", f"no action like {action} was recorded")
        made.append((action, copied.of(found[0])))
    return RecordedStep(opening, made, copied.of(step.closing), step.carried)


def _places(actions: Sequence[Action]) -> Iterator[list[Hashable]]:
    """Yields for each action the keys of its place, the most exact first: with its neighbours, with the next one, whether it is
    the first or last of its chunk, kind and chunk alone.
    """
    last = {action.chunk: at for at, action in enumerate(actions) if action.kind in GRADIENT_KINDS}
    first: dict[tuple[Kind, int], int] = {}
    for at, action in enumerate(actions):
        first.setdefault((action.kind, action.chunk), at)
    kinds = [None, *((action.kind, action.chunk) for action in actions), None]
    for at, action in enumerate(actions):
        own = action.kind, action.chunk
        ends = first[own] == at, last.get(action.chunk) == at
        yield [(own, ends, kinds[at], kinds[at + 2]), (own, ends, kinds[at + 2]), (own, ends), own]


class _Copies:
    """Copies words, so that every exchange has a number of its own and waits keep their distance in its queue."""

    def __init__(self, step: RecordedStep, more: Sequence[RecordedStep] = ()) -> None:
        self._queues: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._numbers = count(1 + max((word.number for word in step.words if isinstance(word, Began)), default=0))
        self._distances = {key: value for one in (*more, step) for key, value in _distances(one).items()}
        for one in step.carried:
            self._queues[one.queue].append(one.number)

    def of(self, words: Words) -> Words:
        """Returns copies of the words for the longer step, in which each exchange has a new number and each wait the number of
        the exchange that is as far back in its queue as it was when recorded.
        """
        return tuple(self._of(word) for word in words)

    def _of(self, word: Word) -> Word:
        """Returns a copy of one word; an exchange is added to its queue. What a rank computed is returned as it is."""
        if isinstance(word, Began):
            number = next(self._numbers)
            after = self._at_distance(id(word)) if word.after is not None else None
            self._queues[word.queue].append(number)
            return Began(number, word.kind, word.axis, word.lane, word.num_bytes, after)
        if isinstance(word, Awaited):
            known = self._at_distance(id(word))
            assert known is not None, word
            return Awaited(known)
        return word

    def _at_distance(self, word: int) -> int | None:
        """Returns the number, in the longer step, of the exchange that the word with this `id` waits for or comes after; None
        where that lies before the step.
        """
        if word not in self._distances:
            return None
        queue, distance = self._distances[word]
        return self._queues[queue][-distance]


def _distances(step: RecordedStep) -> dict[int, tuple[tuple[str, str], int]]:
    """Returns, by `id` of each wait, and of each copy that comes after another, the queue of the exchange that it refers to,
    and how far back in that queue it is: 1 for the last.
    """
    queues: dict[tuple[str, str], list[int]] = defaultdict(list)
    where: dict[int, tuple[str, str]] = {}
    found = {}
    for one in step.carried:
        queues[one.queue].append(one.number)
        where[one.number] = one.queue
    for word in step.words:
        before = word.number if isinstance(word, Awaited) else word.after if isinstance(word, Began) else None
        if before in where:
            queue = queues[where[before]]
            found[id(word)] = where[before], len(queue) - queue.index(before)
        if isinstance(word, Began):
            queues[word.queue].append(word.number)
            where[word.number] = word.queue
    return found
