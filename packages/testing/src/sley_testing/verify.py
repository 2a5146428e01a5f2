"""Compares a plan's layout with a single-process run of the same plan, for `train-cli verify`.

One process takes the reference steps, and saves the loss, gradient norm, gradients and weights of each step to files. Each
rank takes the same steps in the layout, compares its values with the files, one tensor at a time, and writes its findings.
Differences are reported in causal order: first values (initial weights), then for each step the loss, gradients, gradient norm,
held-out loss and weights.
"""

import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.modules.dropout import _DropoutNd

from sley_core.errors import RunError
from sley_core.plan.plan import Plan
from sley_core.records import GradientHandlerRecord
from sley_testing.parity import relative_error
from sley_testing.runs import BF16_SUMS, GRADIENTS, WEIGHTS, gradients, weights
from sley_trainer.run import Run
from sley_trainer.update import CLIP_EPSILON

Quantity = Literal["first value", "loss", "gradient", "gradient norm", "held-out loss", "weight"]
QUANTITIES: tuple[Quantity, ...] = ("first value", "loss", "gradient", "gradient norm", "held-out loss", "weight")
"""The compared quantities in causal order within a step."""

_MAX_NAMES = 5  # the maximum number of parameters that a line of the report names
_LIKELY_CAUSES: dict[Quantity, str] = {
    "first value": "the initial weights of ranks differ from those of one process",
    "loss": "the forward computes something else, or uses other samples",
    "gradient": "the forward agrees: check the backward and the reduction of gradients",
    "gradient norm": "every gradient agrees: check whether the layout counts a gradient twice, or not at all",
    "held-out loss": "the evaluation computes something else, or uses other samples",
    "weight": "the gradient agrees, and only the update differs: check the optimizer, its state, and other code that writes to "
    "the weight; if the weight agrees with `--set precision.compute=fp64`, the optimizer amplifies rounding errors",
}
"""The hint that the report gives if a quantity is the first that differs."""


@dataclass(frozen=True)
class Limits:
    """Holds the allowed relative errors. first_step: the limit in step 1, which starts from equal weights. later_steps: the
    limit for later steps, and for weights in every step. handler_tolerance: the sum of the tolerances of the plan's gradient
    handlers.
    """

    first_step: float
    later_steps: float
    handler_tolerance: float = 0.0

    def limit_for(self, quantity: Quantity, step: int) -> float:
        """Returns the limit for `quantity` in `step`, counted from 1. The limit is 0 for "first value", the initial weights."""
        if quantity == "first value":
            return 0.0
        base = self.first_step if step == 1 and quantity != "weight" else self.later_steps
        # No gradient affects the loss of the first step.
        return base if step == 1 and quantity == "loss" else base + self.handler_tolerance


@dataclass(frozen=True)
class Comparison:
    """Compares a number or tensor of one rank with that of the one-process run. step: counted from 1; 0 for values before
    the first step. name: the name of the parameter, or "" for a number. error: ||actual - expected|| / ||expected||, without
    elements that are noise. expected, actual: the numbers, or the norms of the tensors. factor: the ratio actual / expected if
    all elements share it, as with a wrong scale, else None. num_noise: the number of elements that were not compared, since
    their gradient is only rounding noise.
    """

    quantity: Quantity
    step: int
    name: str
    error: float
    expected: float
    actual: float
    factor: float | None = None
    num_noise: int = 0


@dataclass
class RankFindings:
    """Holds the comparisons of one rank in order. skipped_steps: the steps that were skipped for non-finite gradients."""

    rank: int
    stage: int
    skipped_steps: list[int] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)


def read_findings(folder: Path, num_ranks: int) -> list[RankFindings]:
    """Returns the findings that `compare_steps` has written into `folder`, by rank."""
    return [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(num_ranks)]


def find_largest_errors(ranks: Sequence[RankFindings], limits: Limits) -> list[tuple[Comparison, int]]:
    """Returns for each quantity the comparison with the largest ratio of error to limit, and the number of compared tensors."""

    def share_of_limit(comparison: Comparison) -> tuple[float, float]:
        limit = limits.limit_for(comparison.quantity, comparison.step)
        return comparison.error / limit if limit else comparison.error and math.inf, comparison.error

    results = []
    for quantity in QUANTITIES:
        if comparisons := [comparison for comparison in _all_comparisons(ranks) if comparison.quantity == quantity]:
            num_names = len({comparison.name for comparison in comparisons})
            results.append((max(comparisons, key=share_of_limit), num_names))
    return results


def _all_comparisons(ranks: Sequence[RankFindings]) -> Iterator[Comparison]:
    return (comparison for rank in ranks for comparison in rank.comparisons)


def find_differences(ranks: Sequence[RankFindings], limits: Limits) -> list[tuple[RankFindings, Comparison]]:
    """Returns each comparison with too large an error, and its rank, sorted by step, quantity, model position and rank."""
    keyed = [
        ((comparison.step, QUANTITIES.index(comparison.quantity), rank.stage, position, rank.rank), rank, comparison)
        for rank in ranks
        for position, comparison in enumerate(rank.comparisons)
        if not comparison.error <= limits.limit_for(comparison.quantity, comparison.step)
    ]
    return [(rank, comparison) for _, rank, comparison in sorted(keyed, key=lambda entry: entry[0])]


def report_lines(ranks: Sequence[RankFindings], limits: Limits, num_steps: int) -> Iterator[str]:
    """Yields the lines of the report: the agreement or the first difference, then the largest error of each quantity."""
    all_differences = find_differences(ranks, limits)
    if all_differences:
        yield from _describe_first_difference(all_differences)
    else:
        subject = "the plan" if len(ranks) == 1 else f"{len(ranks)} ranks"
        single = f"one process{' without its layout' * (len(ranks) == 1)}"
        yield f"{subject} and {single} agree over {num_steps} step{'s' * (num_steps != 1)}"
    yield ""
    yield f"{'':<16}{'largest error':>14}{'allowed':>12}  where"
    for largest, num_names in find_largest_errors(ranks, limits):
        location = f"{largest.name}, " if largest.name else ""
        location += "before the first step" if largest.step == 0 else f"step {largest.step}"
        location += f" (of {num_names})" if num_names > 1 else ""
        location = location if largest.error else "equal"
        limit = limits.limit_for(largest.quantity, largest.step)
        yield f"{largest.quantity:<16}{largest.error:>14.2g}{limit:>12.2g}  {location}"
    if noisy := _noisy_parameters(ranks):
        omitted = f" and {len(noisy) - _MAX_NAMES} more" if len(noisy) > _MAX_NAMES else ""
        yield f"not compared, since the gradient is only rounding noise: {', '.join(noisy[:_MAX_NAMES])}{omitted}"
    if skipped := _skipped_steps(ranks):
        yield f"skipped because gradients are not finite in this precision: step {', '.join(map(str, skipped))}"


def is_every_step_skipped(ranks: Sequence[RankFindings], num_steps: int) -> bool:
    """Returns whether every step was skipped because of non-finite gradients."""
    return len(_skipped_steps(ranks)) == num_steps


def _noisy_parameters(ranks: Sequence[RankFindings]) -> list[str]:
    """Returns a text for each parameter with rounding noise: its name and the number of noisy elements."""
    num_noise: dict[str, int] = {}
    for comparison in _all_comparisons(ranks):
        if comparison.num_noise:
            num_noise[comparison.name] = max(num_noise.get(comparison.name, 0), comparison.num_noise)
    return [f"{name} ({count:,} element{'' if count == 1 else 's'})" for name, count in num_noise.items()]


def _skipped_steps(ranks: Sequence[RankFindings]) -> list[int]:
    return sorted({step for rank in ranks for step in rank.skipped_steps})


def findings_to_json(ranks: Sequence[RankFindings], limits: Limits, num_steps: int) -> dict[str, Any]:
    """Returns the report with all differences in causal order as JSON data. A non-finite number becomes None."""
    differences = find_differences(ranks, limits)
    return {
        "agrees": not differences and not is_every_step_skipped(ranks, num_steps),
        "ranks": len(ranks),
        "steps": num_steps,
        "largest": [
            {**_to_json(largest), "allowed": limits.limit_for(largest.quantity, largest.step), "num_names": num_names}
            for largest, num_names in find_largest_errors(ranks, limits)
        ],
        "differs": [{"rank": rank.rank, "stage": rank.stage, **_to_json(comparison)} for rank, comparison in differences],
        "not_compared": _noisy_parameters(ranks),
        "not_taken": _skipped_steps(ranks),
    }


def _to_json(comparison: Comparison) -> dict[str, Any]:
    values = asdict(comparison).items()
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values}


def _describe_first_difference(all_differences: Sequence[tuple[RankFindings, Comparison]]) -> Iterator[str]:
    """Yields the lines about the first difference, other parameters that differ at the same time, and the likely cause."""
    rank, first = all_differences[0]
    time = "before the first step" if first.step == 0 else f"since step {first.step}"
    article = {"gradient": "the gradient of", "weight": "the weight", "first value": "the first value of"}
    subject = f"{article[first.quantity]} `{first.name}`" if first.name else f"the {first.quantity}"
    yield f"differs: {subject}, {time}, on stage {rank.stage} (rank {rank.rank})"
    if first.factor is not None:
        yield f"  it is {first.factor:.6g} times the value of one process"
    else:
        sizes = "its norm is" if first.name else "it is"
        yield f"  relative error {first.error:.3g}: {sizes} {first.actual:.6g}, but {first.expected:.6g} in one process"
    same_step = {
        comparison.name: None
        for _, comparison in all_differences
        if (comparison.step, comparison.quantity) == (first.step, first.quantity)
    }
    if names := [*same_step][1:]:
        yield f"  {len(names)} more differ: {', '.join(names[: _MAX_NAMES - 1])}{', ...' * (len(names) >= _MAX_NAMES)}"
    is_later_loss = first.quantity == "loss" and first.step > 1
    yield f"  {'see the earlier differences' if is_later_loss else _LIKELY_CAUSES[first.quantity]}"


NOISE = {"fp64": 1e-12, "fp32": 1e-6, "fp16": 2.0**-13, "bf16": 2.0**-10}
"""Maps a precision to a share of the model's largest gradient norm. A gradient with a smaller norm is rounding noise.

An example is the bias of a key projection, which softmax cancels. Adam turns noise into full-size steps in random directions,
so the weight of such a gradient cannot be compared. In a fused weight of queries, keys and values, only some elements of the
gradient may be noise."""

_ROW_QUANTITIES: dict[str, Quantity] = {"loss": "loss", "grad_norm": "gradient norm", "held_out_loss": "held-out loss"}
"""The compared quantities, by their keys in a step's row of metrics."""


def compute_limits(plan: Plan, tolerance: float | None = None) -> Limits:
    """Returns the allowed errors: `tolerance` if it is given, 0 for the canonical reduction, else the limits of the plan's
    precision and the tolerances of its gradient handlers.
    """
    if tolerance is not None:
        return Limits(tolerance, tolerance)
    if plan.parallel.reduction == "canonical":
        return Limits(0.0, 0.0)
    records = [(cast(GradientHandlerRecord, handler.record), handler.config) for handler in plan.gradient_handlers]
    handler_tolerance = sum(record.tolerance_for(config) for record, config in records)
    precision = BF16_SUMS if plan.precision.gradients == "bf16" else plan.precision.compute
    return Limits(GRADIENTS[precision], WEIGHTS[precision], handler_tolerance)


def save_reference(run: Run, num_steps: int, folder: Path) -> None:
    """Takes `num_steps` steps of the one-process `run` and saves their results in `folder`. Ends early if the run stops.

    Writes one file with the weights before the first step and, for each step, three files: its row of numbers, its gradients
    before clipping, and the weights after it.
    """
    save_file(full_weights(run), tensor_file(folder, 0, "weights"))
    for step, row in _take_steps(run, num_steps):
        (folder / f"row-{step}.json").write_text(json.dumps(row), "utf-8")
        unclipped = _undo_clipping(gradients(run), row, run.plan.optimizer.config.clip_norm)
        save_file(unclipped, tensor_file(folder, step, "gradients"))
        save_file(full_weights(run), tensor_file(folder, step, "weights"))


def compare_steps(run: Run, num_steps: int, folder: Path) -> None:
    """Takes `num_steps` steps on this rank, compares them with the reference in `folder`, and writes the findings there."""
    findings = StepComparer(run, folder).compare(num_steps)
    (folder / f"rank-{run.world.rank}").write_bytes(pickle.dumps(findings))


class StepComparer:
    """Compares the numbers and tensors of this rank with the values that `save_reference` saved in `folder`, step by step."""

    def __init__(self, run: Run, folder: Path) -> None:
        precision = run.plan.precision.compute
        self._run = run
        self._folder = folder
        self._limits = compute_limits(run.plan)
        self._weight_limit = WEIGHTS[precision] + self._limits.handler_tolerance
        self._noise_share = NOISE[precision]
        self._noise_floor = 0.0
        # Names of parameters whose gradient norm was below the noise floor in a step so far. Noise determines their weights.
        self._noise_parameters: set[str] = set()
        # By name of the other parameters: the elements whose gradient differed in a step so far.
        self._noise_masks: dict[str, torch.Tensor] = {}

    def compare(self, num_steps: int) -> RankFindings:
        """Takes `num_steps` steps and returns the findings. All ranks must call it, since sharded tensors are gathered."""
        run = self._run
        findings = RankFindings(run.world.rank, run.groups["pp"].coord)
        if run.num_steps_done == 0:
            findings.comparisons += self._compare_tensors("first value", 0, full_weights(run), "weights")
        for step, row in _take_steps(run, num_steps):
            reference = json.loads((self._folder / f"row-{step}.json").read_text("utf-8"))
            findings.comparisons += _compare_numbers(step, row, reference)
            if row.get("skipped") and reference.get("skipped"):
                findings.skipped_steps.append(step)  # gradients that are not finite cannot be compared
            else:
                unclipped = _undo_clipping(gradients(run), row, run.plan.optimizer.config.clip_norm)
                self._record_noise(step, unclipped)
                findings.comparisons += self._compare_tensors("gradient", step, unclipped, "gradients")
            findings.comparisons += self._compare_tensors("weight", step, full_weights(run), "weights")
        return findings

    def _compare_tensors(
        self, quantity: Quantity, step: int, actual_tensors: Mapping[str, torch.Tensor], file_name: str
    ) -> list[Comparison]:
        with safe_open(tensor_file(self._folder, step, file_name), "pt") as expected_tensors:
            return [
                self._compare_tensor(quantity, step, name, expected_tensors.get_tensor(name), tensor)
                for name, tensor in actual_tensors.items()
            ]

    def _compare_tensor(
        self, quantity: Quantity, step: int, name: str, expected: torch.Tensor, actual: torch.Tensor
    ) -> Comparison:
        """Compares one tensor. If its error exceeds the limit, compares it again without elements whose gradient is noise."""
        assert actual.shape == expected.shape, f"{name} has the shape {list(actual.shape)}, not {list(expected.shape)}"
        error = relative_error(expected, actual)
        norms, factor, num_noise = (_norm(expected), _norm(actual)), _common_factor(expected, actual, error), 0
        if step > 0 and error > self._limits.limit_for(quantity, step) and math.isfinite(norms[1]):
            noise = self._noise_masks.get(name) if quantity == "weight" else None
            if name in self._noise_parameters and (quantity == "weight" or norms[1] <= 8 * self._noise_floor):
                error, num_noise = 0.0, expected.numel()
            elif noise is not None:
                error = relative_error(expected, torch.where(noise, expected, actual))
                num_noise = int(noise.count_nonzero())
        return Comparison(quantity, step, name, error, *norms, factor, num_noise)

    def _record_noise(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Records which gradients are rounding noise: tensors with a tiny norm, and elements with a large relative error."""
        with safe_open(tensor_file(self._folder, step, "gradients"), "pt") as tensors:
            norms = {name: _norm(tensors.get_tensor(name)) for name in tensors.keys()}  # noqa: SIM118  # not a mapping
            self._noise_floor = self._noise_share * max(norms.values(), default=0.0)
            # An exact zero is not noise, since only zero is equal to it.
            self._noise_parameters |= {name for name, norm in norms.items() if 0.0 < norm < self._noise_floor}
            for name, actual in gradients.items():
                expected = tensors.get_tensor(name)
                differs = (actual - expected).abs() > self._weight_limit * expected.abs()
                if bool(differs.any()):
                    self._noise_masks[name] = differs | self._noise_masks.get(name, differs)


def check_all_compared(ranks: Sequence[RankFindings], folder: Path) -> None:
    """Raises RunError `not-compared` if the one-process run saved a first value, gradient or weight that no rank has compared.

    folder: the folder that `save_reference` has filled.
    """
    saved: list[tuple[Quantity, int]] = [("first value", 0)]
    for step in range(1, 1 + sum(1 for _ in folder.glob("row-*.json"))):
        saved += [("weight", step)] if step in _skipped_steps(ranks) else [("gradient", step), ("weight", step)]
    compared_names: dict[tuple[Quantity, int], set[str]] = {}
    for comparison in _all_comparisons(ranks):
        compared_names.setdefault((comparison.quantity, comparison.step), set()).add(comparison.name)
    for quantity, step in saved:
        with safe_open(tensor_file(folder, step, "gradients" if quantity == "gradient" else "weights"), "pt") as tensors:
            if missing := sorted(set(tensors.keys()) - compared_names.get((quantity, step), set())):
                label = f"{quantity} of step {step}" if step > 1 else quantity
                message = f"no rank has the {label} of `{missing[0]}` (the first of {len(missing)} such parameters)"
                raise RunError("not-compared", message)


def find_dropout_modules(run: Run) -> list[str]:
    """Returns the names of modules with dropout: torch's dropout modules with `p` > 0, and modules with `dropout` > 0."""
    modules = [pair for layer in run.layers for pair in layer.module.named_modules(prefix=layer.name)]
    rates = {name: getattr(module, "p" if isinstance(module, _DropoutNd) else "dropout", 0.0) for name, module in modules}
    return [name for name, rate in rates.items() if isinstance(rate, float) and rate > 0]


def _take_steps(run: Run, num_steps: int) -> Iterator[tuple[int, dict[str, float | int]]]:
    """Takes `num_steps` steps and yields the number and the metrics of each. Ends early if all ranks agree to stop."""
    for number in range(1, num_steps + 1):
        yield number, run.step()
        if run.was_stopped:
            return


def _compare_numbers(step: int, row: Mapping[str, float], reference: Mapping[str, float]) -> Iterator[Comparison]:
    """Yields the comparison of each number of a step that the reference row also has. Two NaNs are equal."""
    for key, quantity in _ROW_QUANTITIES.items():
        if key in reference:
            expected, actual = float(reference[key]), float(row[key])
            is_equal = expected == actual or (math.isnan(expected) and math.isnan(actual))
            error = 0.0 if is_equal else abs(actual - expected) / max(abs(expected), 1e-30)
            yield Comparison(quantity, step, "", error if math.isfinite(error) else math.inf, expected, actual)


def _common_factor(expected: torch.Tensor, actual: torch.Tensor, error: float) -> float | None:
    """Returns the factor by which `actual` differs from `expected`, if it is the same for all elements within 0.1 %, else
    None. Also returns None if `error` is at most 1 % or not finite.
    """
    if not 0.01 < error < math.inf:
        return None
    expected_flat, actual_flat = (tensor.detach().to("cpu").double().reshape(-1) for tensor in (expected, actual))
    size = float(expected_flat @ expected_flat)
    factor = float(expected_flat @ actual_flat) / size if size else 0.0
    residual = float((actual_flat - factor * expected_flat).norm())
    return factor if factor and residual <= 1e-3 * abs(factor) * math.sqrt(size) else None


def full_weights(run: Run) -> dict[str, torch.Tensor]:
    """Returns the full parameters of this rank's layers on the host, in registry order. All ranks must call it."""
    all_weights = weights(run)
    return {name: all_weights[name].detach().contiguous() for name in run.registry.names}


def _undo_clipping(
    gradients: Mapping[str, torch.Tensor], row: Mapping[str, float], limit: float | None
) -> dict[str, torch.Tensor]:
    """Returns unclipped gradients, since clipping hides a wrong scale. limit: the clip norm; None if the run does not clip."""
    factor = 1.0 if limit is None else min(1.0, limit / (row["grad_norm"] + CLIP_EPSILON))
    return {name: (gradient / factor).contiguous() for name, gradient in gradients.items()}


def tensor_file(folder: Path, step: int, file_name: str) -> str:
    """Returns the path of the tensors of `step`, which is 0 for initial weights. file_name: `gradients` or `weights`."""
    return str(folder / f"{file_name}-{step}.safetensors")


def _norm(tensor: torch.Tensor) -> float:
    """Returns the Euclidean norm, computed in float64."""
    return float(tensor.detach().double().norm())
