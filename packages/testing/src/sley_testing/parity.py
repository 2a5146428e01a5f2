"""Compares two sets of gradients or weights by name, and reports the parameters that differ most.

The error of a parameter is ||actual - reference|| / ||reference|| in float64. Each parameter has its own error, so that large
correct parameters cannot hide a small wrong one.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sley_core.checkpointing import Rectangle
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

_MAX_LINES = 5  # the maximum number of parameters that a message lists


def relative_errors(
    reference: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], *, floor: float = 0.0
) -> dict[str, float]:
    """Returns the relative error of each tensor by name, in the order of `reference`. The error is inf if it is not finite.
    floor: errors are relative to at least this norm, for gradients that are rounding noise. Raises AssertionError if names or
    shapes differ.
    """
    _assert_same_names_and_shapes(reference, actual)
    return {name: relative_error(value, actual[name], floor) for name, value in reference.items()}


def assert_close_gradients(
    reference: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], tolerance: float, *, floor: float = 0.0
) -> None:
    """Asserts that the relative error of each tensor is at most `tolerance`. The message lists the largest errors. floor:
    errors are relative to at least this norm. Raises AssertionError if names or shapes differ.
    """
    errors = relative_errors(reference, actual, floor=floor)
    failures = sorted(((error, name) for name, error in errors.items() if not error <= tolerance), reverse=True)
    if failures:
        lines = [f"  {name} {tuple(reference[name].shape)}: {error:.3g}" for error, name in failures[:_MAX_LINES]]
        omitted = [f"  and {len(failures) - _MAX_LINES} more"] if len(failures) > _MAX_LINES else []
        title = f"{len(failures)} of {len(errors)} differ by more than {tolerance:g}, the worst first"
        raise AssertionError("\n".join([title, *lines, *omitted]))


def assert_same_bits(reference: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]) -> None:
    """Asserts that names, shapes, dtypes and bits of all tensors are equal. The message lists tensors that differ."""
    _assert_same_names_and_shapes(reference, actual)
    differing_names = [name for name, value in reference.items() if not have_same_bits(value, actual[name])]
    if differing_names:
        lines = []
        for name in differing_names[:_MAX_LINES]:
            values = [tensor.detach().cpu() for tensor in (reference[name], actual[name])]
            text = f"{values[0].dtype} against {values[1].dtype}"
            if values[0].dtype == values[1].dtype:
                unequal, error = values[0] != values[1], relative_error(values[0], values[1])
                text = f"{int(unequal.sum())} of {unequal.numel()} elements, error {error:.3g}"
            lines.append(f"  {name}: {text}")
        raise AssertionError("\n".join([f"{len(differing_names)} of {len(reference)} differ", *lines]))


def _assert_same_names_and_shapes(reference: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]) -> None:
    unmatched = sorted(reference.keys() ^ actual.keys())
    assert not unmatched, f"not the same names: {', '.join(unmatched)}"
    shapes = {name: (tuple(reference[name].shape), tuple(actual[name].shape)) for name in reference}
    unequal = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    assert not unequal, f"not the same shapes: {unequal}"


def relative_error(reference: torch.Tensor, actual: torch.Tensor, floor: float = 0.0) -> float:
    """Returns ||actual - reference|| / max(||reference||, floor) in float64: 0 for equal tensors, inf if not finite."""
    expected, actual = (tensor.detach().to("cpu", torch.float64) for tensor in (reference, actual))
    difference = (actual - expected).norm().item()
    if difference == 0.0:
        return 0.0
    scale = max(expected.norm().item(), floor)
    error = difference / scale if scale else math.inf
    return error if math.isfinite(error) else math.inf


def have_same_bits(reference: torch.Tensor, actual: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape, dtype and bytes."""
    is_same_type = (reference.shape, reference.dtype) == (actual.shape, actual.dtype)
    return is_same_type and tensor_bytes(reference) == tensor_bytes(actual)


def noise_floor(gradients: Mapping[str, torch.Tensor]) -> float:
    """Returns the norm below which a gradient is rounding noise: 1e-6 of the largest norm among `gradients`."""
    return 1e-6 * max((float(gradient.double().norm()) for gradient in gradients.values()), default=0.0)


def train_tensors(tables: Mapping[str, Any], num_steps: int, *, folder: Path | None = None) -> dict[str, torch.Tensor]:
    """Takes `num_steps` steps of the plan in `tables`. Returns the tensors of `full_tensors`, and the losses and norms as fp64
    scalars, by names that do not depend on the layout. All ranks must call it. folder: the plan's folder.
    """
    plan = plan_from_dict(tables, folder)
    with World.join(plan.run.device) as world, assemble(plan, world) as run:
        rows = [run.step() for _ in range(num_steps)]
        numbers = {f"step {row['step']}: {key}": row[key] for row in rows for key in ("loss", "grad_norm")}
        if run.held_out is not None:
            numbers["held out"] = run.evaluate()
        return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()} | full_tensors(run)


def full_tensors(run: Run) -> dict[str, torch.Tensor]:
    """Returns full tensors by their names in a checkpoint: the trained weights (or master weights, if any), their averages, and
    the optimizer states. All ranks must call it. Raises AssertionError if ranks hold different bits of the same part.
    """
    run.parts.weights.settle()
    pieces = [
        (piece.name, piece.shape, piece.rectangle, piece.tensor.cpu().clone())
        for piece in run._state.pieces()
        if piece.is_updated_by_optimizer
    ]
    pieces_by_rank = [pieces] * run.world.size
    if run.world.size > 1:
        dist.all_gather_object(pieces_by_rank, pieces)  # uses the default group, to which all ranks belong
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[tuple[str, Rectangle], torch.Tensor] = {}
    for name, shape, rectangle, part in (piece for rank_pieces in pieces_by_rank for piece in rank_pieces):
        assert have_same_bits(parts.setdefault((name, rectangle), part), part), f"ranks have different bits of {name}"
        tensors.setdefault(name, torch.zeros(shape, dtype=part.dtype))[rectangle.slices] = part
    return tensors


def tensor_bytes(value: torch.Tensor) -> bytes:
    """Returns the bytes of the elements of a tensor on any device, in row-major order."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
