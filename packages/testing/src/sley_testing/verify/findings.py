"""Stores and reports the comparisons of ranks with one process. Imports no torch.

Differences are reported in causal order: first values, then for each step the loss, gradients, gradient norm, held-out loss
and weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Quantity = Literal["first value", "loss", "gradient", "gradient norm", "held-out loss", "weight"]
QUANTITIES: tuple[Quantity, ...] = ("first value", "loss", "gradient", "gradient norm", "held-out loss", "weight")
_MAX_NAMES = 5

_LIKELY_CAUSES: dict[Quantity, str] = {
    "first value": "the initial weights of ranks differ from those of one process",
    "loss": "the forward computes something else, or uses other samples",
    "gradient": "the forward agrees: check the backward and the reduction of gradients",
    "gradient norm": "every gradient agrees: check whether the layout counts a gradient twice, or not at all",
    "held-out loss": "the evaluation computes something else, or uses other samples",
    "weight": "the gradient agrees, and only the update differs: check the optimizer, its state, and other code that writes to "
    "the weight; if the weight agrees with `--set optimizer.use=core.sgd`, the optimizer amplifies rounding errors",
}


@dataclass(frozen=True)
class Limits:
    """Holds the allowed relative errors. near: the limit in the first step, where weights are still equal. far: the limit of
    later steps and of weights. reduced: the sum of the tolerances of the plan's gradient handlers.
    """

    near: float
    far: float
    reduced: float = 0.0

    def of(self, quantity: Quantity, step: int) -> float:
        """Returns the limit of `quantity` in `step`. First values must be bit-identical."""
        if quantity == "first value":
            return 0.0
        base = self.near if step == 1 and quantity != "weight" else self.far
        # The loss of the first step comes before any gradient.
        return base if step == 1 and quantity == "loss" else base + self.reduced


@dataclass(frozen=True)
class Comparison:
    """Holds the comparison of a number or tensor on one rank with one process.

    error: ||actual - expected|| / ||expected||. factor: actual / expected if all elements share this ratio, as with a wrong
    scale. expected, actual: the numbers or norms. num_noise: the number of elements whose gradient is only rounding noise and
    may differ. error_without_noise: the error of all other elements.
    """

    quantity: Quantity
    step: int
    name: str
    error: float
    expected: float
    actual: float
    factor: float | None = None
    num_noise: int = 0
    error_without_noise: float = math.inf


@dataclass
class RankFindings:
    """Holds the comparisons of one rank in order. skipped: the steps that were skipped because of non-finite gradients."""

    rank: int
    stage: int
    skipped: list[int] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Writes the findings into `folder`."""
        (folder / f"rank-{self.rank}.json").write_text(json.dumps(asdict(self)), "utf-8")


def read_findings(folder: Path, num_ranks: int) -> list[RankFindings]:
    """Reads the findings of all ranks from `folder`."""
    contents = [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(num_ranks)]
    return [
        RankFindings(**{**content, "comparisons": [Comparison(**comparison) for comparison in content["comparisons"]]})
        for content in contents
    ]


@dataclass(frozen=True)
class LargestError:
    """Holds the largest relative error of a quantity over all ranks and steps, its location, and its limit. num_names: the
    number of compared tensors.
    """

    quantity: Quantity
    error: float
    allowed: float
    step: int
    name: str
    num_names: int


def largest_errors(ranks: Sequence[RankFindings], limits: Limits) -> list[LargestError]:
    """Returns for each quantity the error that is largest relative to its limit."""
    results = []
    for quantity in QUANTITIES:
        comparisons = [
            comparison
            for rank in ranks
            for comparison in rank.comparisons
            if comparison.quantity == quantity and not _differs_only_by_noise(comparison, limits)
        ]
        if comparisons:
            worst = max(comparisons, key=lambda comparison: (_share_of_limit(comparison, limits), comparison.error))
            num_names = len({comparison.name for comparison in comparisons})
            limit = limits.of(quantity, worst.step)
            results.append(LargestError(quantity, worst.error, limit, worst.step, worst.name, num_names))
    return results


def _share_of_limit(comparison: Comparison, limits: Limits) -> float:
    allowed = limits.of(comparison.quantity, comparison.step)
    return comparison.error / allowed if allowed else (float("inf") if comparison.error else 0.0)


def _differs_only_by_noise(comparison: Comparison, limits: Limits) -> bool:
    """Returns whether all differences are in elements whose gradient is rounding noise."""
    limit = limits.of(comparison.quantity, comparison.step)
    return comparison.num_noise > 0 and comparison.error_without_noise <= limit < comparison.error


def differences(ranks: Sequence[RankFindings], limits: Limits) -> list[tuple[RankFindings, Comparison]]:
    """Returns all differences beyond the limits in causal order: by step, quantity, position in the model and rank."""
    keyed = [
        ((comparison.step, QUANTITIES.index(comparison.quantity), rank.stage, position, rank.rank), rank, comparison)
        for rank in ranks
        for position, comparison in enumerate(rank.comparisons)
        if not comparison.error <= limits.of(comparison.quantity, comparison.step)
        and not _differs_only_by_noise(comparison, limits)
    ]
    return [(rank, comparison) for _, rank, comparison in sorted(keyed, key=lambda entry: entry[0])]


def report_lines(ranks: Sequence[RankFindings], limits: Limits, num_steps: int) -> Iterator[str]:
    """Yields the lines of the report: agreement or the first difference, then a line for each quantity."""
    all_differences = differences(ranks, limits)
    if all_differences:
        yield from _describe_first_difference(all_differences)
    else:
        subject = "the plan" if len(ranks) == 1 else f"{len(ranks)} ranks"
        single = f"one process{' without its layout' * (len(ranks) == 1)}"
        yield f"{subject} and {single} agree over {num_steps} step{'s' * (num_steps != 1)}"
    yield ""
    yield f"{'':<16}{'largest error':>14}{'allowed':>12}  where"
    for largest in largest_errors(ranks, limits):
        location = f"{largest.name}, " if largest.name else ""
        location += "before the first step" if largest.step == 0 else f"step {largest.step}"
        location += f" (of {largest.num_names})" if largest.num_names > 1 else ""
        location = location if largest.error else "equal"
        yield f"{largest.quantity:<16}{largest.error:>14.2g}{largest.allowed:>12.2g}  {location}"
    if noisy := _noisy_parameters(ranks, limits):
        omitted = f" and {len(noisy) - _MAX_NAMES} more" if len(noisy) > _MAX_NAMES else ""
        yield f"not compared where the gradient is only rounding noise: {', '.join(noisy[:_MAX_NAMES])}{omitted}"
    if skipped := _skipped_steps(ranks):
        yield f"skipped because gradients are not finite in this precision: step {', '.join(map(str, skipped))}"


def has_taken_no_step(ranks: Sequence[RankFindings], num_steps: int) -> bool:
    """Returns whether all steps were skipped because of non-finite gradients."""
    return len(_skipped_steps(ranks)) == num_steps


def _noisy_parameters(ranks: Sequence[RankFindings], limits: Limits) -> list[str]:
    """Returns the parameters with rounding noise, as text with the number of noisy elements."""
    max_elements: dict[str, int] = {}
    for comparison in (comparison for rank in ranks for comparison in rank.comparisons):
        if _differs_only_by_noise(comparison, limits):
            max_elements[comparison.name] = max(max_elements.get(comparison.name, 0), comparison.num_noise)
    return [f"{name} ({count:,} element{'' if count == 1 else 's'})" for name, count in max_elements.items()]


def _skipped_steps(ranks: Sequence[RankFindings]) -> list[int]:
    return sorted({step for rank in ranks for step in rank.skipped})


def findings_to_json(ranks: Sequence[RankFindings], limits: Limits, num_steps: int) -> dict[str, Any]:
    """Returns the report as JSON data with all differences in causal order. null stands for non-finite numbers."""
    return {
        "agrees": not differences(ranks, limits) and not has_taken_no_step(ranks, num_steps),
        "ranks": len(ranks),
        "steps": num_steps,
        "largest": [_to_json(error) for error in largest_errors(ranks, limits)],
        "differs": [
            {"rank": rank.rank, "stage": rank.stage, **_to_json(comparison)} for rank, comparison in differences(ranks, limits)
        ],
        "not_compared": _noisy_parameters(ranks, limits),
        "not_taken": _skipped_steps(ranks),
    }


def finite_or_none(value: float) -> float | None:
    """Returns `value`, or None if it is not finite."""
    return value if math.isfinite(value) else None


def _to_json(result: LargestError | Comparison) -> dict[str, Any]:
    return {key: finite_or_none(value) if isinstance(value, float) else value for key, value in asdict(result).items()}


def _describe_first_difference(all_differences: Sequence[tuple[RankFindings, Comparison]]) -> Iterator[str]:
    """Yields lines about the first difference from one process, and about similar differences."""
    rank, first = all_differences[0]
    time = "before the first step" if first.step == 0 else f"since step {first.step}"
    article = {"gradient": "the gradient of", "weight": "the weight", "first value": "the first value of"}
    subject = f"{article[first.quantity]} `{first.name}`" if first.name else f"the {first.quantity}"
    yield f"differs: {subject}, {time}, on stage {rank.stage} (rank {rank.rank})"
    if first.factor is not None:
        yield f"  it is {first.factor:.6g} times that of one process"
    else:
        sizes = "its norm is" if first.name else "it is"
        yield f"  relative error {first.error:.3g}: {sizes} {first.actual:.6g}, that of one process {first.expected:.6g}"
    similar = [
        (rank.rank, comparison.name)
        for rank, comparison in all_differences
        if (comparison.step, comparison.quantity) == (first.step, first.quantity)
    ]
    names = list(dict.fromkeys(name for _, name in similar))
    if len(names) > 1:
        yield f"  so do {len(names) - 1} more: {', '.join(names[1:_MAX_NAMES])}{', ...' * (len(names) > _MAX_NAMES)}"
    rank_numbers = sorted({rank_number for rank_number, name in similar if name == first.name})
    if len(rank_numbers) > 1:
        yield f"  on each of the ranks {', '.join(map(str, rank_numbers))}"
    is_later_loss = first.quantity == "loss" and first.step > 1
    yield f"  {'see the earlier differences' if is_later_loss else _LIKELY_CAUSES[first.quantity]}"
