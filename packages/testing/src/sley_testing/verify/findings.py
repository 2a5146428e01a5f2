"""Holds and explains the comparisons of ranks with one process or a plain loop. Imports no torch.

Differences are reported in causal order: first values, then for each step the loss, gradients, gradient norm, held-out loss and
weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["first value", "loss", "gradient", "gradient norm", "held-out loss", "weight"]
KINDS: tuple[Kind, ...] = ("first value", "loss", "gradient", "gradient norm", "held-out loss", "weight")
_TOLD = 5

_MEANINGS: dict[Kind, str] = {
    "first value": "the initial weights of ranks differ from those of one process",
    "loss": "the forward computes something else, or on other samples",
    "gradient": "the forward agrees: look at the backward and at what sums gradients",
    "gradient norm": "every gradient agrees: look at what the layout counts twice, or not at all",
    "held-out loss": "the evaluation computes something else, or on other samples",
    "weight": "the gradient agrees, and only the update differs: look at the optimizer, its state, and what else changes "
    "the weight; if the weight agrees with `--set optimizer.use=core.sgd`, the optimizer enlarges what rounding changes",
}
"""The likely cause of a difference of each kind."""


class Habit(NamedTuple):
    """Describes something that a module does and that is correct in a plain loop but needs care in other layouts."""

    location: str
    description: str


@dataclass(frozen=True)
class Limits:
    """Holds the allowed relative errors. near: the limit in the first step, where weights are still equal. far: the limit of
    later steps and of weights. reduced: the sum of the tolerances of the plan's gradient handlers.
    """

    near: float
    far: float
    reduced: float = 0.0

    def of(self, kind: Kind, step: int) -> float:
        """Returns the limit for `kind` in `step`. First values must be bit-identical."""
        if kind == "first value":
            return 0.0
        base = self.near if step == 1 and kind != "weight" else self.far
        # The loss of the first step comes before any gradient.
        return base if step == 1 and kind == "loss" else base + self.reduced


@dataclass(frozen=True)
class Comparison:
    """Holds the comparison of a number or tensor on one rank with one process.

    error: ||found - expected|| / ||expected||. times: the factor found / expected if all elements share it, as with a wrong
    scale. expected, found: the numbers or norms. num_noise: the number of elements whose gradient is only rounding noise and
    need not agree. sure: the error of all other elements.
    """

    kind: Kind
    step: int
    name: str
    error: float
    expected: float
    found: float
    times: float | None = None
    num_noise: int = 0
    sure: float = math.inf


@dataclass
class RankFindings:
    """Holds the comparisons of one rank in order. skipped: the steps that were skipped for non-finite gradients."""

    rank: int
    stage: int
    skipped: list[int] = field(default_factory=list)
    compared: list[Comparison] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Writes the findings into `folder` for the process that started the ranks."""
        (folder / f"rank-{self.rank}.json").write_text(json.dumps(asdict(self)), "utf-8")


def read(folder: Path, num_ranks: int) -> list[RankFindings]:
    """Reads the findings of all ranks from `folder`."""
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(num_ranks)]
    return [RankFindings(**{**one, "compared": [Comparison(**each) for each in one["compared"]]}) for one in ranks]


@dataclass(frozen=True)
class LargestError:
    """Holds the largest relative error of a kind over all ranks and steps, its location, and its limit."""

    kind: Kind
    error: float
    allowed: float
    step: int
    name: str
    num: int


def worst(ranks: Sequence[RankFindings], limits: Limits) -> list[LargestError]:
    """Returns the error of each kind that is largest relative to its limit."""
    found = []
    for kind in KINDS:
        every = [one for rank in ranks for one in rank.compared if one.kind == kind and not _is_lost(one, limits)]
        if every:
            top = max(every, key=lambda one: (_share(one, limits), one.error))
            names = len({one.name for one in every})
            found.append(LargestError(kind, top.error, limits.of(kind, top.step), top.step, top.name, names))
    return found


def _share(one: Comparison, limits: Limits) -> float:
    allowed = limits.of(one.kind, one.step)
    return one.error / allowed if allowed else (float("inf") if one.error else 0.0)


def _is_lost(one: Comparison, limits: Limits) -> bool:
    """Returns whether the two differ only in elements whose gradient is rounding noise."""
    return one.num_noise > 0 and one.sure <= limits.of(one.kind, one.step) < one.error


def differences(ranks: Sequence[RankFindings], limits: Limits) -> list[tuple[RankFindings, Comparison]]:
    """Returns all differences beyond the limits in causal order: by step, kind, position in the model and rank."""
    wrong = [
        (one.step, KINDS.index(one.kind), rank.stage, place, rank.rank, rank, one)
        for rank in ranks
        for place, one in enumerate(rank.compared)
        if not one.error <= limits.of(one.kind, one.step) and not _is_lost(one, limits)
    ]
    return [(found[-2], found[-1]) for found in sorted(wrong, key=lambda found: found[:5])]


def report_lines(ranks: Sequence[RankFindings], limits: Limits, num_steps: int, *, is_plain: bool = False) -> Iterator[str]:
    """Yields the lines of the report: agreement or the first difference, then a line for each kind. is_plain: whether ranks
    are compared with a plain loop instead of one process of the plan.
    """
    wrong = differences(ranks, limits)
    if wrong:
        yield from _cause(wrong, "a plain loop" if is_plain else "one process")
    else:
        what = "the plan" if len(ranks) == 1 else f"{len(ranks)} ranks"
        what += " and a plain loop" if is_plain else f" and one process{' without its layout' * (len(ranks) == 1)}"
        yield f"{what} agree over {num_steps} step{'s' * (num_steps != 1)}"
    yield ""
    yield f"{'':<16}{'largest error':>14}{'allowed':>12}  where"
    for one in worst(ranks, limits):
        where = f"{one.name}, " if one.name else ""
        where += "before the first step" if one.step == 0 else f"step {one.step}"
        where += f" (of {one.num})" if one.num > 1 else ""
        yield f"{one.kind:<16}{one.error:>14.2g}{one.allowed:>12.2g}  {where if one.error else 'equal'}"
    if lost := _lost(ranks, limits):
        more = f" and {len(lost) - _TOLD} more" if len(lost) > _TOLD else ""
        yield f"not compared where the gradient is zero but for rounding: {', '.join(lost[:_TOLD])}{more}"
    if skipped := _skipped(ranks):
        yield f"not taken, for gradients that are not finite in this precision: step {', '.join(map(str, skipped))}"


def habit_lines(habits: Sequence[Habit]) -> Iterator[str]:
    """Yields a line for each habit."""
    for one in habits:
        yield f"{one.location} {one.description}"
    if habits:
        yield ""


def no_step_taken(ranks: Sequence[RankFindings], num_steps: int) -> bool:
    """Returns whether all steps were skipped for non-finite gradients."""
    return len(_skipped(ranks)) == num_steps


def _lost(ranks: Sequence[RankFindings], limits: Limits) -> list[str]:
    """Returns the names of parameters with rounding noise, with the number of noisy elements."""
    most: dict[str, int] = {}
    for one in (one for rank in ranks for one in rank.compared if _is_lost(one, limits)):
        most[one.name] = max(most.get(one.name, 0), one.num_noise)
    return [f"{name} ({count:,} element{'' if count == 1 else 's'})" for name, count in most.items()]


def _skipped(ranks: Sequence[RankFindings]) -> list[int]:
    return sorted({step for rank in ranks for step in rank.skipped})


def as_json(ranks: Sequence[RankFindings], limits: Limits, num_steps: int) -> dict[str, Any]:
    """Returns the report as JSON data with all differences in causal order; null stands for non-finite numbers."""
    return {
        "agrees": not differences(ranks, limits) and not no_step_taken(ranks, num_steps),
        "ranks": len(ranks),
        "steps": num_steps,
        "largest": [_json(one) for one in worst(ranks, limits)],
        "differs": [{"rank": rank.rank, "stage": rank.stage, **_json(one)} for rank, one in differences(ranks, limits)],
        "not_compared": _lost(ranks, limits),
        "not_taken": _skipped(ranks),
    }


def as_number(value: float) -> float | None:
    """Returns `value`, or None if it is not finite."""
    return value if math.isfinite(value) else None


def _json(one: LargestError | Comparison) -> dict[str, Any]:
    return {key: as_number(value) if isinstance(value, float) else value for key, value in asdict(one).items()}


def _cause(wrong: Sequence[tuple[RankFindings, Comparison]], reference: str) -> Iterator[str]:
    """Yields lines about the first difference from `reference` and about similar differences."""
    rank, first = wrong[0]
    since = "before the first step" if first.step == 0 else f"since step {first.step}"
    article = {"gradient": "the gradient of", "weight": "the weight", "first value": "the first value of"}
    subject = f"{article[first.kind]} `{first.name}`" if first.name else f"the {first.kind}"
    yield f"differs: {subject}, {since}, on stage {rank.stage} (rank {rank.rank})"
    if first.times is not None:
        yield f"  it is {first.times:.6g} times that of {reference}"
    else:
        sizes = "its norm is" if first.name else "it is"
        yield f"  off by {first.error:.3g} of its size: {sizes} {first.found:.6g}, that of {reference} {first.expected:.6g}"
    alike = [(one.rank, other) for one, other in wrong if (other.step, other.kind) == (first.step, first.kind)]
    names = list(dict.fromkeys(other.name for _, other in alike))
    if len(names) > 1:
        more = ", ..." if len(names) > _TOLD else ""
        yield f"  so do {len(names) - 1} more: {', '.join(names[1:_TOLD])}{more}"
    by_rank = sorted({each for each, other in alike if other.name == first.name})
    if len(by_rank) > 1:
        yield f"  on ranks {', '.join(map(str, by_rank))} alike"
    sees = "see what came before" if first.kind == "loss" and first.step > 1 else _MEANINGS[first.kind]
    yield f"  {sees}"
