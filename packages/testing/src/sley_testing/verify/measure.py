"""Takes the steps of `train-cli verify`: a reference saves its results, and each rank compares its own with them.

The reference is one process of the plan. It saves the loss, norm, gradients and weights of each step as files. A rank reads
one tensor at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sley_core.engine.update import CLIP_EPSILON
from sley_core.errors import RunError
from sley_core.plan.plan import Plan
from sley_core.records import GradientHandlerRecord
from sley_core.run import Run
from sley_testing.parity import relative_errors
from sley_testing.runs import BF16_SUMS, GRADIENTS, WEIGHTS, gradients, weights
from sley_testing.verify.findings import Comparison, Limits, Quantity, RankFindings

NOISE = {"fp64": 1e-12, "fp32": 1e-6, "fp16": 2.0**-13, "bf16": 2.0**-10}
"""The share of the model's largest gradient below which a gradient is rounding noise, such as that of a key bias, which softmax
ignores. Adam takes full-size steps in random directions from noise, so that such a weight cannot be compared. In a fused
weight, such as queries, keys and values in one, single elements can be noise although the whole gradient agrees."""

_ROW_QUANTITIES: dict[str, Quantity] = {"loss": "loss", "grad_norm": "gradient norm", "held_out_loss": "held-out loss"}


def limits(plan: Plan, tolerance: float | None = None) -> Limits:
    """Returns the allowed errors: `tolerance` if it is not None, 0 for canonical sums, else those of the precision and handler
    records.
    """
    if tolerance is not None:
        return Limits(tolerance, tolerance)
    if plan.parallel.reduction == "canonical":
        return Limits(0.0, 0.0)
    handlers: list[tuple[GradientHandlerRecord, Any]] = [
        (handler.record, handler.config)  # type: ignore[misc]  # a list of handlers has no factories
        for handler in plan.gradient_handlers
    ]
    reduced = sum(record.tolerance_for(config) for record, config in handlers)
    precision = BF16_SUMS if plan.precision.gradients == "bf16" else plan.precision.compute
    return Limits(GRADIENTS[precision], WEIGHTS[precision], reduced)


def save_reference(run: Run, num_steps: int, folder: Path) -> None:
    """Takes steps of the one-process `run` and saves their results in `folder`. Ends early if the run is asked to stop."""
    save_file(full_weights(run), tensor_file(folder, 0, "weights"))
    for step, row in _steps(run, num_steps):
        (folder / f"row-{step}.json").write_text(json.dumps(row), "utf-8")
        unclipped = _unclipped(gradients(run), row, run.plan.optimizer.config.clip_norm)
        save_file(unclipped, tensor_file(folder, step, "gradients"))
        save_file(full_weights(run), tensor_file(folder, step, "weights"))


def compare_steps(run: Run, num_steps: int, folder: Path) -> None:
    """Takes the same steps on this rank, compares each with `folder`, and writes the findings there."""
    comparer = StepComparer(run.world.rank, run.plan, folder)
    comparer.begin(run)
    for step, row in _steps(run, num_steps):
        comparer.step(run, step, row)
    comparer.findings.write(folder)


class StepComparer:
    """Compares the tensors of this rank step by step with those that one process saved in `folder`. findings: the comparisons
    so far.
    """

    def __init__(self, rank: int, plan: Plan, folder: Path) -> None:
        precision = plan.precision.compute
        self.findings = RankFindings(rank, stage=0)
        self._folder = folder
        self._noise_share = NOISE[precision]
        # Parameters whose gradient norm was below the noise floor in this or an earlier step: their weights are random.
        self._noise_parameters: set[str] = set()
        self._noise_floor = 0.0
        self._weight_limit = WEIGHTS[precision] + limits(plan).reduced
        self._noise_masks: dict[str, Tensor] = {}

    def begin(self, run: Run) -> None:
        """Records this rank's stage, and compares first values if the run has not taken a step."""
        self.findings.stage = run.groups["pp"].coord
        if run.num_steps_done == 0:
            self.findings.comparisons += self._compare_tensors("first value", 0, full_weights(run), "weights")

    def step(self, run: Run, step: int, row: Mapping[str, float]) -> None:
        """Compares the results of step `step`, counted from 1. All ranks must call it, since sharded tensors are gathered."""
        reference = json.loads((self._folder / f"row-{step}.json").read_text("utf-8"))
        self.findings.comparisons += _compare_numbers(step, row, reference)
        if row.get("skipped") and reference.get("skipped"):
            self.findings.skipped.append(step)  # gradients that are not finite have nothing to compare
        else:
            unclipped = _unclipped(gradients(run), row, run.plan.optimizer.config.clip_norm)
            self._record_noise(step, unclipped)
            self.findings.comparisons += self._compare_tensors("gradient", step, unclipped, "gradients")
        self.findings.comparisons += self._compare_tensors("weight", step, full_weights(run), "weights")

    def _compare_tensors(
        self, quantity: Quantity, step: int, actual_tensors: Mapping[str, Tensor], file_name: str
    ) -> list[Comparison]:
        """Compares the tensors of this rank in registry order."""
        with _open_tensors(tensor_file(self._folder, step, file_name)) as expected_tensors:
            return [
                self._compare_tensor(quantity, step, name, expected_tensors.get_tensor(name), tensor)
                for name, tensor in actual_tensors.items()
            ]

    def _compare_tensor(self, quantity: Quantity, step: int, name: str, expected: Tensor, actual: Tensor) -> Comparison:
        error = relative_errors({name: expected}, {name: actual})[name]
        sizes, times = (_norm(expected), _norm(actual)), _common_factor(expected, actual, error)
        if step == 0 or not error:
            return Comparison(quantity, step, name, error, *sizes, times)
        if name in self._noise_parameters and (quantity == "weight" or sizes[1] <= 8 * self._noise_floor):
            return Comparison(quantity, step, name, error, *sizes, times, num_noise=expected.numel(), error_without_noise=0.0)
        noise = self._noise_masks.get(name)
        if quantity != "weight" or noise is None:
            return Comparison(quantity, step, name, error, *sizes, times, error_without_noise=error)
        error_without_noise = relative_errors({name: expected}, {name: torch.where(noise, expected, actual)})[name]
        return Comparison(quantity, step, name, error, *sizes, times, int(noise.count_nonzero()), error_without_noise)

    def _record_noise(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Records the rounding noise of the gradients: parameters with a small norm, and elements that differ by more than the
        weight limit.
        """
        with _open_tensors(tensor_file(self._folder, step, "gradients")) as tensors:
            norms = {name: _norm(tensors.get_tensor(name)) for name in tensors.keys()}  # noqa: SIM118  # no mapping
            self._noise_floor = self._noise_share * max(norms.values(), default=0.0)
            # An exact zero is not noise: only zero agrees with it.
            self._noise_parameters |= {name for name, norm in norms.items() if 0.0 < norm < self._noise_floor}
            for name, actual in gradients.items():
                expected = tensors.get_tensor(name)
                differs = (actual - expected).abs() > self._weight_limit * expected.abs()
                if bool(differs.any()):
                    self._noise_masks[name] = differs | self._noise_masks.get(name, differs)


def check_complete(ranks: Sequence[RankFindings], folder: Path) -> None:
    """Raises RunError "not-compared" if one process saved a first value, gradient or weight that no rank has compared."""
    saved: list[tuple[Quantity, int]] = [("first value", 0)]
    for step in range(1, 1 + sum(1 for _ in folder.glob("row-*.json"))):
        skipped = any(step in rank.skipped for rank in ranks)
        saved += [("weight", step)] if skipped else [("gradient", step), ("weight", step)]
    compared_names: dict[tuple[Quantity, int], set[str]] = {}
    for comparison in (comparison for rank in ranks for comparison in rank.comparisons):
        compared_names.setdefault((comparison.quantity, comparison.step), set()).add(comparison.name)
    for quantity, step in saved:
        with _open_tensors(tensor_file(folder, step, "gradients" if quantity == "gradient" else "weights")) as tensors:
            if missing := sorted(set(tensors.keys()) - compared_names.get((quantity, step), set())):
                label = f"{quantity} of step {step}" if step > 1 else quantity
                message = f"no rank has the {label} of `{missing[0]}` (of {len(missing)} such parameters)"
                raise RunError("not-compared", message)


def dropout_modules(run: Run) -> list[str]:
    """Returns the names of modules with dropout: torch's dropout modules, and modules with an attribute `dropout` above 0."""
    from torch.nn.modules.dropout import _DropoutNd

    def dropout_names(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, submodule in module.named_modules(prefix=prefix):
            rate = submodule.p if isinstance(submodule, _DropoutNd) else getattr(submodule, "dropout", 0.0)
            if isinstance(rate, float) and rate > 0:
                yield name

    return [name for layer in run.layers for name in dropout_names(layer.module, layer.name)]


def _steps(run: Run, num_steps: int) -> Iterator[tuple[int, dict[str, float | int]]]:
    """Yields the number and row of each step, and ends early if all ranks agree to stop."""
    for number in range(1, num_steps + 1):
        yield number, run.step()
        if run.was_stopped:
            return


def _compare_numbers(step: int, row: Mapping[str, float], reference: Mapping[str, float]) -> Iterator[Comparison]:
    """Yields the comparison of each number of a row with the reference."""
    for key, quantity in _ROW_QUANTITIES.items():
        if key in reference:
            expected, actual = float(reference[key]), float(row[key])
            scale = max(abs(expected), 1e-30)
            is_equal = expected == actual or (math.isnan(expected) and math.isnan(actual))
            error = 0.0 if is_equal else abs(actual - expected) / scale
            yield Comparison(quantity, step, "", error if math.isfinite(error) else math.inf, expected, actual)


def _common_factor(expected: Tensor, actual: Tensor, error: float) -> float | None:
    """Returns the ratio actual / expected if all elements share it within 0.1 %. Returns None otherwise, or if the error is
    small.
    """
    if not 0.01 < error < math.inf:
        return None
    expected_flat, actual_flat = (tensor.detach().to("cpu").double().reshape(-1) for tensor in (expected, actual))
    size = float(expected_flat @ expected_flat)
    factor = float(expected_flat @ actual_flat) / size if size else 0.0
    residual = float((actual_flat - factor * expected_flat).norm())
    return factor if factor and residual <= 1e-3 * abs(factor) * math.sqrt(size) else None


def full_weights(run: Run) -> dict[str, Tensor]:
    """Returns the full parameters of this rank's layers in registry order, without buffers."""
    all_weights = weights(run)
    return _make_contiguous({name: all_weights[name] for name in run.registry.names})


def _unclipped(gradients: Mapping[str, Tensor], row: Mapping[str, float], limit: float | None) -> dict[str, Tensor]:
    """Returns the gradients before clipping, which would hide a wrong scale."""
    factor = 1.0 if limit is None else min(1.0, limit / (row["grad_norm"] + CLIP_EPSILON))
    return _make_contiguous({name: gradient / factor for name, gradient in gradients.items()})


def _make_contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def tensor_file(folder: Path, step: int, file_name: str) -> str:
    """Returns the path of the `gradients` or `weights` file of a step. Step 0 is before the first step."""
    return str(folder / f"{file_name}-{step}.safetensors")


def _open_tensors(file: str) -> AbstractContextManager[Any]:
    """Opens a safetensors file, whose tensors are read one at a time."""
    return safe_open(file, "pt")


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())
