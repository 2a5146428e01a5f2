"""Pipeline schedules: pure functions `(stages, chunks, micros) -> one list of compute actions per stage`. Imports no torch.

Drawings have P stages and 4 micro-batches; capitals are chunk 0, small letters chunk 1.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from sley_core.api.actions import Action, Delivery, Kind, Placement, Schedule, loop, v
from sley_core.errors import Place, PlanError
from sley_pp.config import CsvConfig, GPipeConfig, InterleavedConfig, OneFOneBConfig, ZeroBubbleH1Config, ZeroBubbleVConfig

Word = tuple[Kind, int]
"""A kind and a chunk: an action without its micro-batch."""

F: Word = (Kind.FORWARD, 0)
B: Word = (Kind.BACKWARD, 0)
INPUTS: Word = (Kind.INPUT_GRADIENT, 0)
"""The words of a schedule with one chunk per stage."""


def numbered(words: Iterable[Word]) -> list[Action]:
    """Returns the actions of a pattern: the first F of a chunk is of micro-batch 0, its second of 1, and so for every word."""
    seen: Counter[Word] = Counter()
    actions = []
    for kind, chunk in words:
        actions.append(Action(kind, chunk, seen[kind, chunk]))
        seen[kind, chunk] += 1
    return actions


def wrong_chunks(name: str, needed: str, chunks: int, hint: str | None = None) -> PlanError:
    """Returns the PlanError "schedule-chunks" for schedule `name`, which needs `needed` per stage, not `chunks`."""
    message = f"`{name}` needs {needed} per stage, not {chunks}"
    return PlanError("schedule-chunks", message, path=("pipeline", "use"), hint=hint)


def one_f_one_b(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """1F1B: one forward, one backward, so that a stage never holds more micro-batches than there are stages (arXiv 2006.09503).

        stage 0  F0-F1-F2-F3-..................B0====...B1====...B2====...B3====
        stage 1  ...F0-F1-F2-............B0====F3-B1====...B2====...B3====......
        stage 2  ......F0-F1-......B0====F2-B1====F3-B2====...B3====............
        stage 3  .........F0-B0====F1-B1====F2-B2====F3-B3====..................

    As long as GPipe, but stage s of P holds min(P - s, M) pairs of M micro-batches. Returns one list per stage, for one chunk
    each.
    """
    if chunks != 1:
        raise wrong_chunks("pp.one_f_one_b", "one chunk", chunks, "use `pp.interleaved` for several")
    lists = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micros)
        lists.append(numbered([F] * ahead + [F, B] * (micros - ahead) + [B] * ahead))
    return lists


def gpipe(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """GPipe: all forwards, then all backwards (arXiv 1811.06965).

        stage 0  F0-F1-F2-F3-...........................B0====B1====B2====B3====
        stage 1  ...F0-F1-F2-F3-..................B0====B1====B2====B3====......
        stage 2  ......F0-F1-F2-F3-.........B0====B1====B2====B3====............
        stage 3  .........F0-F1-F2-F3-B0====B1====B2====B3====..................

    The simplest schedule, and the one with the most in flight: every micro-batch of the step at once. One chunk per stage;
    returns the same list for each.
    """
    if chunks != 1:
        raise wrong_chunks("pp.gpipe", "one chunk", chunks, "use `pp.interleaved` for several")
    return [numbered([F] * micros + [B] * micros) for _ in range(stages)]


def interleaved(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """Interleaved 1F1B: several chunks per stage, dealt in a loop, so that the pipeline fills in smaller steps (arXiv
    2104.04473).

        stage 0  F0-F1-F2-F3-f0-f1-f2-f3-..................b0====...b1====...b2====...b3====B0====B1====B2====B3====
        stage 1  ...F0-F1-F2-F3-f0-f1-f2-f3-.........b0====...b1====...b2====...b3====B0====B1====B2====B3====......
        stage 2  ......F0-F1-F2-F3-f0-f1-f2-...b0====f3-b1====...b2====...b3====B0====B1====B2====B3====............
        stage 3  .........F0-F1-F2-F3-f0-b0====f1-b1====f2-b2====f3-b3====B0====B1====B2====B3====..................

    Micro-batches go in rounds: a round passes chunk 0, then chunk 1, ..., then the next one comes. A round is never smaller
    than the pipeline is long, or a stage would wait for its own output to come round. Where M is not a multiple of P some
    rounds are one larger than others, which costs memory and no time; only M < P costs time.

    Returns one list per stage, for two chunks per stage or more and any number of micro-batches.

    With rounds of P, stage s holds P x C + P - 1 - 2s pairs at most, and the bubble is that of 1F1B divided by C.
    """
    if chunks < 2:
        raise wrong_chunks("pp.interleaved", "two chunks or more", chunks, "use `pp.one_f_one_b` for one")
    rounds = round_sizes(stages, micros)
    there, back = range(chunks), range(chunks - 1, -1, -1)
    forwards: list[Word] = [(Kind.FORWARD, chunk) for size in rounds for chunk in there for _ in range(size)]
    backwards: list[Word] = [(Kind.BACKWARD, chunk) for size in rounds for chunk in back for _ in range(size)]
    lists = []
    for stage in range(stages):
        # The first backward comes back to this stage two hops per later stage after its last chunk has begun.
        ahead = min((chunks - 1) * rounds[0] + 2 * (stages - 1 - stage), len(forwards))
        paired = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
        lists.append(numbered([*forwards[:ahead], *paired, *backwards[len(forwards) - ahead :]]))
    return lists


def round_sizes(stages: int, micros: int) -> list[int]:
    """Returns the most rounds possible of at least `stages` micro-batches each, as equal as can be, larger ones first."""
    num_rounds = max(1, micros // stages)
    size, larger = divmod(micros, num_rounds)
    return [size + 1] * larger + [size] * (num_rounds - larger)


def with_weight_gradients(lists: Sequence[Sequence[Action]], placement: Placement, most: int) -> list[list[Action]]:
    """Returns `lists` of F and I with a W added for every I, so that no stage holds more than `most` pairs.

    Simulates all stages in step, one tick per action. A stage does the next action of its list if that action's input
    was made in an earlier tick, else its oldest W. It does a W first if it holds `most` pairs, but not between an F and
    the I that follows: earlier stages are waiting for that I.

    A stage of ZB-H1 without them, and with:

        stage 2  ......F0-F1-...I0=F2-I1=F3-I2=...I3=
        stage 2  ......F0-F1-...I0=F2-I1=F3-I2=W0~I3=W1~W2~W3~
    """
    fillings = [_Filling(actions, stage, placement, most) for stage, actions in enumerate(lists)]
    made: set[Delivery] = set()
    moving = True
    while moving:
        ticks = [filling.tick(made) for filling in fillings]
        made.update(*ticks)
        moving = any(filling.moved for filling in fillings)
    assert not any(filling.rest for filling in fillings), f"no way on: {[filling.rest for filling in fillings]}"
    return [filling.done for filling in fillings]


class _Filling:
    """Holds the state of one stage: `rest` of its list, `done` so far, and the W that it still has to do, oldest first."""

    def __init__(self, actions: Sequence[Action], stage: int, placement: Placement, most: int) -> None:
        self.rest = deque(actions)
        self.done: list[Action] = []
        self.moved = False
        self._stage = stage
        self._placement = placement
        self._most = most
        self._owed: deque[Action] = deque()
        self._held = 0

    def tick(self, made: set[Delivery]) -> set[Delivery]:
        """Does one action or none; returns its output for another action, if any. made: the outputs of earlier ticks."""
        self.moved = True
        if self.rest and not self._is_full() and self._has_come(made):
            return self._do(self.rest.popleft())
        if self._owed:
            self._held -= 1
            self.done.append(self._owed.popleft())
        else:
            self.moved = False
        return set()

    def _is_full(self) -> bool:
        """Returns whether a W must come before the next action to stay within `most`."""
        between = self.done and self.done[-1].kind is Kind.FORWARD and self.rest[0].kind is Kind.INPUT_GRADIENT
        return bool(self._owed) and self._held >= self._most and not between

    def _has_come(self, made: set[Delivery]) -> bool:
        """Returns whether the input of the next action was made in an earlier tick."""
        action = self.rest[0]
        delivery = self._placement.input_of(action, self._placement.position(self._stage, action.chunk))
        return delivery is None or delivery in made

    def _do(self, action: Action) -> set[Delivery]:
        """Does an F or an I and queues the W of an I; returns its output for another action, if any."""
        self.done.append(action)
        if action.kind is Kind.FORWARD:
            self._held += 1
        else:
            self._owed.append(Action(Kind.WEIGHT_GRADIENT, action.chunk, action.micro))
        delivery = self._placement.output_of(action, self._placement.position(self._stage, action.chunk))
        return set() if delivery is None else {delivery}


def zero_bubble_h1(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """ZB-H1: 1F1B with its backward split, a third of the bubble in the same memory (arXiv 2401.10241, section 2.1).

        stage 0  F0-F1-F2-F3-.........I0=W0~I1=W1~I2=W2~I3=W3~
        stage 1  ...F0-F1-F2-......I0=F3-I1=W0~I2=W1~I3=W2~W3~
        stage 2  ......F0-F1-...I0=F2-I1=F3-I2=W0~I3=W1~W2~W3~
        stage 3  .........F0-I0=F1-I1=F2-I2=F3-I3=W0~W1~W2~W3~

    The gradient that the previous stage waits for is ready after I; later stages defer their W until they hold P micro-batches,
    as many as stage 0 holds in 1F1B (every stage min(P, M)). The bubble is (P - 1)(F + I - W), as long as W takes no longer
    than F or I.
    """
    if chunks != 1:
        raise wrong_chunks("pp.zero_bubble_h1", "one chunk", chunks, "use `pp.zero_bubble_v` for two")
    lists = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micros)
        lists.append(numbered([F] * ahead + [F, INPUTS] * (micros - ahead) + [INPUTS] * ahead))
    return with_weight_gradients(lists, loop(stages), most=stages)


F0, F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
I0, I1 = (Kind.INPUT_GRADIENT, 0), (Kind.INPUT_GRADIENT, 1)


def zero_bubble_v(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """ZB-V: two chunks per stage in a V, no bubble but the skew of the start, in the memory of 1F1B (arXiv 2401.10241, section
    6).

        stage 0  F0-F1-F2-F3-F4-F5-F6-f0-i0=w0~f1-i1=w1~f2-i2=w2~f3-i3=w3~F7-I0=W0~f4-i4=w4~ ...
        stage 1  ...F0-F1-F2-F3-F4-f0-F5-f1-i0=w0~f2-i1=w1~f3-i2=w2~F6-I0=W0~f4-i3=w3~F7-I1= ...
        stage 2  ......F0-F1-F2-f0-F3-f1-F4-f2-i0=w0~f3-i1=w1~F5-I0=W0~f4-i2=w2~F6-I1=W1~f5- ...
        stage 3  .........F0-f0-F1-f1-F2-f2-F3-f3-i0=w0~F4-I0=W0~f4-i1=w1~F5-I1=W1~f5-i2=w2~ ...

    A sample goes down the stages through chunk 0 and up again through chunk 1. Stage 0 has both ends of the model, embedding
    and loss, so its gradients start where its forwards end, and the last stage hands over to itself. The pattern has 2P - 1
    micro-batches or more; with fewer, those that are not there are left out of it, and weight gradients fill what that leaves.

    Returns one list per stage, for two chunks each placed as a V and any number of micro-batches.

    A stage holds 2 min(P, M) pairs, half a stage each. If F, I and W take the same time and M >= P, the step takes P -
    1 of them longer than its work.
    """
    if chunks != 2:
        raise wrong_chunks("pp.zero_bubble_v", "two chunks", chunks, "use `pp.zero_bubble_h1` for one")
    whole = [numbered(_pattern(stage, stages, max(micros, 2 * stages - 1))) for stage in range(stages)]
    lists = [[action for action in actions if action.micro < micros] for actions in whole]
    return with_weight_gradients(lists, v(stages), most=2 * stages)


def _pattern(stage: int, stages: int, micros: int) -> Iterator[Word]:
    """Yields the words of stage `stage` without weight gradients, for at least 2P - 1 micro-batches."""
    after = stages - 1 - stage
    yield from [F0] * (2 * after + 1)  # until the first sample is back
    yield from [F1, F0] * stage  # until the last stage has a gradient for this one
    yield from [F1, I1] * (after + 1)  # until that has come back down to chunk 0
    yield from [F0, I0, F1, I1] * (micros - stages - after)  # the steady state: all four
    yield from [I0, F1, I1] * after  # no F0 is left
    yield from [I0, I1] * stage  # no F1 is left
    yield from [I0] * (after + 1)


def build_gpipe(config: GPipeConfig) -> Schedule:
    return Schedule(gpipe)


def build_one_f_one_b(config: OneFOneBConfig) -> Schedule:
    return Schedule(one_f_one_b)


def build_interleaved(config: InterleavedConfig) -> Schedule:
    """Returns the interleaved schedule with the table's number of chunks per stage."""
    return Schedule(interleaved, config.chunks)


def build_zero_bubble_h1(config: ZeroBubbleH1Config) -> Schedule:
    return Schedule(zero_bubble_h1)


def build_zero_bubble_v(config: ZeroBubbleVConfig) -> Schedule:
    """Returns the ZB-V schedule, with two chunks per stage in a V."""
    return Schedule(zero_bubble_v, chunks=2, place=v)


def build_csv(config: CsvConfig) -> Schedule:
    """Returns the schedule of a file, which fits one number of stages and of micro-batches.

    It raises PlanError "schedule-file" for other numbers, and for a file that cannot be read.
    """
    placement, lists = read_file(config.file)
    micros = 1 + max(action.micro for actions in lists for action in actions)

    def place(stages: int, chunks: int) -> Placement:
        if stages != placement.stages:
            raise misfit(f"{placement.stages} stages", f"{stages}")
        return placement

    def only(stages: int, chunks: int, num_micros: int) -> list[list[Action]]:
        if (stages, num_micros) != (placement.stages, micros):
            raise misfit(f"{placement.stages} stages and {micros} micro-batches", f"{stages} and {num_micros}")
        return lists

    def misfit(has: str, plan_has: str) -> PlanError:
        message = f"the schedule {config.file} is for {has}, but the plan has {plan_has}"
        return PlanError("schedule-file", message, path=("pipeline", "file"))

    return Schedule(only, placement.chunks, place)


# -- schedules in files ------------------------------------------------------------------------------------------------

LETTERS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRADIENT, "W": Kind.WEIGHT_GRADIENT}
WORDS = {kind: letter for letter, kind in LETTERS.items()}
CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")

Parsed = tuple[int, Kind, int]
"""Position, kind, micro-batch."""


def write_csv(lists: Sequence[Sequence[Action]], placement: Placement) -> str:
    """Returns the text of compute lists, one line per stage, without waits."""
    rows = [
        [f"{placement.position(stage, action.chunk)}{WORDS[action.kind]}{action.micro}" for action in actions]
        for stage, actions in enumerate(lists)
    ]
    return "".join(",".join(row) + "\n" for row in rows)


def read_csv(text: str, name: str) -> tuple[Placement, list[list[Action]]]:
    """Returns the placement and the lists in `text`, the CSV form of torch.distributed.pipelining: a row per stage, a cell per
    action. name: of the file, for error messages.

        0F0,0F1,,1F0,1I0,1W0,...        `1I0`: input gradients of model part 1 (counted along the model), micro-batch 0

    F and B are forward and full backward, I and W the halves of a split one; an empty cell is a wait. `(0F4;1B2)OVERLAP_F_B` is
    read as its actions one after another. Sends and receives are not read: `lower` writes its own, and checks that the lists
    form a valid step. Raises PlanError "schedule-file" with line and column.
    """
    rows = [_row(line, name, number) for number, line in enumerate(text.splitlines(), start=1)]
    if not any(rows):
        raise _file_error("has no actions", Place(name))
    placement = _placement([{position for position, _, _ in row} for row in rows], Place(name))
    chunks = [{placement.position(stage, chunk): chunk for chunk in range(placement.chunks)} for stage in range(len(rows))]
    lists = [[Action(kind, chunks[stage][position], micro) for position, kind, micro in row] for stage, row in enumerate(rows)]
    return placement, lists


def read_file(path: Path) -> tuple[Placement, list[list[Action]]]:
    """Returns `read_csv` of a file. Raises PlanError "schedule-file" also if it cannot be read."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _file_error(f"cannot be read: {error}", Place(str(path))) from error
    return read_csv(text, str(path))


def _row(line: str, name: str, number: int) -> list[Parsed]:
    """Returns the actions in line `number`, overlapped ones one after another."""
    actions: list[Parsed] = []
    start = 0
    for cell in line.split(","):
        overlapped = OVERLAP.fullmatch(cell.strip())
        for part in overlapped[1].split(";") if overlapped else [cell]:
            if word := part.strip():
                match = CELL.fullmatch(word)
                if match is None:
                    place = Place(name, number, line.index(word, start) + 1)
                    raise _file_error(f"has `{word}`, which is no compute action such as `0F0`, `1B3`, `1I3` or `1W3`", place)
                actions.append((int(match[1]), LETTERS[match[2]], int(match[3])))
        start += len(cell) + 1
    return actions


def _placement(positions_of: Sequence[set[int]], place: Place) -> Placement:
    """Returns the placement in which rank i holds `positions_of[i]`; raises PlanError if that is none."""
    holders = {position: rank for rank, positions in enumerate(positions_of) for position in positions}
    listed = "; ".join(f"rank {rank}: {sorted(positions)}" for rank, positions in enumerate(positions_of[:8]))
    if len(holders) != sum(map(len, positions_of)) or sorted(holders) != list(range(len(holders))):
        raise _file_error(f"does not give each part of the model, counted from 0, to one rank ({listed})", place)
    if len({len(positions) for positions in positions_of}) > 1:
        raise _file_error(f"does not give every rank equally many parts of the model ({listed})", place)
    return Placement(tuple(holders[position] for position in range(len(holders))))


def _file_error(fault: str, place: Place) -> PlanError:
    """Returns the PlanError "schedule-file"."""
    return PlanError("schedule-file", f"the schedule {place} {fault}", path=("pipeline", "file"))
