"""Runs many cases on few starts of ranks, and judges each; a case that fails poisons no other.

ranks start ──> case ──> case ──> case that all ranks refuse ──> case that one fails: they leave, and new ones start with the
                 │                                               next case
                 └ what all ranks saw goes to rank 0, which runs the plain loop while the others go on
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from drawn_cases import Case, draw
from drawn_runs import (
    Seen,
    StepDiffersError,
    compare,
    has_nothing_to_train,
    is_undetermined,
    problems,
    see,
    some_step_counts_nothing,
)

from sley_core.errors import SleyError
from sley_testing.ranks import RankError

MOST_DRAWS = 50
"""How often a number is drawn again because the plan's own check refuses what it says."""

WAIT_S = 3.0
"""How long a rank that refused a case waits for the others to do so too, before it leaves."""


@dataclass(frozen=True)
class Verdict:
    """how: "equal", "refused" with a code that the case allows, "undetermined" where the plain loop does not know either, or
    "wrong". why: the code, or what is wrong.
    """

    how: str
    why: str = ""


def valid(seed: int, folder: Path, world: int | None = None) -> Case:
    """The case of a number; where the plan's check refuses it, that of the next of its kind."""
    for again in range(MOST_DRAWS):
        case = draw(seed + again * 10**9, world)
        if not problems(case, folder):
            return case
        world = case.world
    raise AssertionError(f"none of {MOST_DRAWS} draws of {seed} makes a plan: {problems(case, folder)}")


def judge(ranks: Callable[..., Any], cases: Sequence[Case], folder: Path, limit_s: float = 60.0) -> dict[int, Verdict]:
    """The verdict on each case, by its number; all are of one world."""
    found: dict[int, Verdict] = {}
    while left := [case for case in cases if case.seed not in found]:
        for file in folder.glob("*.json*"):
            file.unlink()
        failure: BaseException | None = None
        try:
            ranks(left[0].world, limit_s + 2.0 * len(left))(work, left, folder)
        except (Exception, RankError) as error:
            failure = error
        found |= _written(folder)
        if failure is not None:
            failed = {case.seed: case for case in left if case.seed not in found and _faults(folder, case)}
            begun = [json.loads(file.read_text("utf-8")) for file in folder.glob("at*.json")]
            assert begun, f"no rank has begun: {failure!r}"
            case = next(iter(failed.values()), left[min(begun)])
            told = "\n".join([repr(failure), *getattr(failure, "__notes__", [])])
            found[case.seed] = _judged(case, _faults(folder, case), told)
    return found


def work(cases: Sequence[Case], folder: Path) -> None:
    """On every rank: the cases one after the other. Raises what the first raises that not every rank refuses."""
    rank = dist.get_rank()
    for number, case in enumerate(cases):
        begun = folder / f"begun{rank}"
        begun.write_text(json.dumps(number), "utf-8")
        begun.replace(folder / f"at{rank}.json")  # at once: a rank may be ended while it writes
        seen = Seen()
        try:
            see(case, folder, seen)
        except Exception as error:
            _note(folder, case, rank, error)
            if not isinstance(error, SleyError) or not _all_refuse(folder, case):
                raise
            faults = _faults(folder, case)  # the same on all ranks
            if any(fault["codes"] != ["not-finite"] for fault in faults):
                if rank == 0:
                    _write(folder, case, _judged(case, faults, str(error)))
                continue
        everybody: list[Any] | None = [None] * case.world if rank == 0 else None
        dist.gather_object(seen, everybody)
        if everybody is not None:
            _write(folder, case, _compared(case, everybody))


def _compared(case: Case, seen: Sequence[Seen]) -> Verdict:
    """The verdict on what the ranks saw; where that is not all, they refused the rest for want of a number."""
    try:
        compare(case, seen)
    except StepDiffersError as error:
        if is_undetermined(case, seen, error.number):
            return Verdict("undetermined", str(error))
        return Verdict("wrong", str(error))
    except Exception as error:
        return Verdict("wrong", str(error) if isinstance(error, AssertionError) else _told(error))
    return Verdict("equal") if len(seen[0].held_out) == len(case.steps) else Verdict("refused", "not-finite")


def _judged(case: Case, faults: Sequence[dict[str, Any]], otherwise: str) -> Verdict:
    """Whether a case may fail as it did. faults: what the ranks raised, the first first. otherwise: if none said a word."""
    causes = [fault for fault in faults if fault["codes"] != ["collective-failed"]] or list(faults)
    codes = {code for fault in causes for code in fault["codes"] or ["error"]}
    if codes <= {"no-gradient", "all-frozen"} and codes and has_nothing_to_train(case):
        return Verdict("refused", min(codes))
    if codes == {"nothing-counts"} and some_step_counts_nothing(case):
        return Verdict("refused", "nothing-counts")
    if codes and codes <= case.refusals:
        return Verdict("refused", min(codes))
    return Verdict("wrong", causes[0]["text"] if causes else otherwise)


def _note(folder: Path, case: Case, rank: int, error: Exception) -> None:
    codes = [one.code for one in error.diagnostics] if isinstance(error, SleyError) else []
    own = folder / f"own{rank}"
    own.write_text(json.dumps({"time": time.monotonic(), "codes": codes, "text": _told(error)}), "utf-8")
    own.replace(folder / f"fault{case.seed}.{rank}.json")


def _faults(folder: Path, case: Case) -> list[dict[str, Any]]:
    notes = [json.loads(file.read_text("utf-8")) for file in folder.glob(f"fault{case.seed}.*.json")]
    return sorted(notes, key=lambda note: note["time"])


def _all_refuse(folder: Path, case: Case) -> bool:
    """Whether every rank has left the case, so that all can go on together."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        faults = _faults(folder, case)
        if len(faults) == case.world:
            return all(fault["codes"] for fault in faults)
        time.sleep(0.01)
    return False


def _write(folder: Path, case: Case, verdict: Verdict) -> None:
    with (folder / "verdicts.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps([case.seed, verdict.how, verdict.why]) + "\n")


def _written(folder: Path) -> dict[int, Verdict]:
    path = folder / "verdicts.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {seed: Verdict(how, why) for seed, how, why in map(json.loads, lines)}


def _told(error: BaseException) -> str:
    """The error and where it came from, without the frames before the run's."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    lines = [f"    {Path(frame.filename).name}:{frame.lineno} {frame.name}: {frame.line}" for frame in frames]
    return "\n".join([f"{type(error).__name__}: {error}", *lines])
