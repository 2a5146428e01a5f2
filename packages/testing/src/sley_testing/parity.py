"""Compares two sets of gradients or weights by name, and reports the worst parameter.

The error of a parameter is ||actual - reference|| / ||reference|| in float64: one number per parameter, so that a small
wrong parameter is not hidden by large correct ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.registry import Param
from sley_core.engine.shards import AXIS
from sley_core.engine.update import AVERAGE, MASTER, states_of
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_core.topology import DEFAULT_CHANNEL

_MAX_LINES = 5


def relative_errors(reference: Mapping[str, Tensor], actual: Mapping[str, Tensor], *, floor: float = 0.0) -> dict[str, float]:
    """Returns the relative error of every parameter in the order of `reference`; inf for non-finite values.

    floor: the minimum of the reference norm, for gradients that are rounding noise. Raises AssertionError if names or shapes
    differ.
    """
    _assert_same_layout(reference, actual)
    return {name: _error(value, actual[name], floor) for name, value in reference.items()}


def assert_close_gradients(
    reference: Mapping[str, Tensor], actual: Mapping[str, Tensor], relative: float, *, floor: float = 0.0
) -> None:
    """Asserts that the error of every tensor is at most `relative`; the message lists the largest errors."""
    errors = relative_errors(reference, actual, floor=floor)
    failures = sorted(((error, name) for name, error in errors.items() if not error <= relative), reverse=True)
    if failures:
        lines = [f"  {name} {tuple(reference[name].shape)}: {error:.3g}" for error, name in failures[:_MAX_LINES]]
        omitted = [f"  and {len(failures) - _MAX_LINES} more"] if len(failures) > _MAX_LINES else []
        title = f"{len(failures)} of {len(errors)} differ by more than {relative:g}, the worst first"
        raise AssertionError("\n".join([title, *lines, *omitted]))


def assert_same_bits(reference: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> None:
    """Asserts that all tensors are bit-identical; the message lists those that differ."""
    _assert_same_layout(reference, actual)
    differing_names = [name for name, value in reference.items() if not have_same_bits(value, actual[name])]
    if differing_names:
        lines = []
        for name in differing_names[:_MAX_LINES]:
            values = [tensor.detach().cpu() for tensor in (reference[name], actual[name])]
            text = f"{values[0].dtype} against {values[1].dtype}"
            if values[0].dtype == values[1].dtype:
                unequal = values[0] != values[1]
                text = f"{int(unequal.sum())} of {unequal.numel()} elements, error {_error(values[0], values[1], 0.0):.3g}"
            lines.append(f"  {name}: {text}")
        raise AssertionError("\n".join([f"{len(differing_names)} of {len(reference)} differ", *lines]))


def _assert_same_layout(reference: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> None:
    """Asserts that both have the same names and shapes."""
    unmatched = sorted(reference.keys() ^ actual.keys())
    assert not unmatched, f"not the same names: {', '.join(unmatched)}"
    shapes = {name: (tuple(reference[name].shape), tuple(actual[name].shape)) for name in reference}
    wrong = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    assert not wrong, f"not the same shapes: {wrong}"


def _error(reference: Tensor, actual: Tensor, floor: float) -> float:
    """Returns the norm of the difference relative to the reference's norm, at least `floor`; inf if it is not finite."""
    expected, actual = (tensor.detach().to("cpu", torch.float64) for tensor in (reference, actual))
    difference = (actual - expected).norm().item()
    if difference == 0.0:
        return 0.0
    scale = max(expected.norm().item(), floor)
    error = difference / scale if scale else math.inf
    return error if math.isfinite(error) else math.inf


def have_same_bits(reference: Tensor, actual: Tensor) -> bool:
    """Returns whether two tensors have the same shape, dtype and bytes."""
    if (reference.shape, reference.dtype) != (actual.shape, actual.dtype):
        return False
    return _bytes(reference) == _bytes(actual)


Bits = dict[str, bytes]  # the bytes of tensors and numbers, by layout-independent names


def train_bits(tables: Mapping[str, Any], num_steps: int, *, folder: Path | None = None) -> Bits:
    """Takes `num_steps` steps of the plan in `tables`, and returns the bits of rows and of this rank's full tensors. All ranks
    must call it.
    """
    plan = plan_from_dict(tables, folder)
    with World.join(plan.run.device) as world, assemble(plan, world) as run:
        bits: Bits = {}
        for _ in range(num_steps):
            row = run.step()
            for key in ("loss", "grad_norm"):
                bits[f"step {row['step']}: {key}"] = float(row[key]).hex().encode()
        if run.held_out is not None:
            bits["held out"] = run.evaluate().hex().encode()
        bits |= {name: _bytes(value) for name, value in _full_tensors(run)}
        return bits


def differing_names(first_run: Sequence[Bits], second_run: Sequence[Bits]) -> list[str]:
    """Returns the names whose bits differ between two runs or are missing in one."""
    first_bits, second_bits = _merge_ranks(first_run), _merge_ranks(second_run)
    return sorted(name for name in first_bits.keys() | second_bits.keys() if first_bits.get(name) != second_bits.get(name))


def digest(ranks: Sequence[Bits]) -> str:
    """Returns the sha256 of the merged bits of all ranks."""
    hasher = sha256()
    for name, value in sorted(_merge_ranks(ranks).items()):
        hasher.update(f"{name} {len(value)} ".encode())
        hasher.update(value)
    return hasher.hexdigest()


def _merge_ranks(ranks: Sequence[Bits]) -> Bits:
    """Merges the bits of all ranks; asserts that ranks agree on common names."""
    merged: Bits = {}
    for bits in ranks:
        for name, value in bits.items():
            assert merged.setdefault(name, value) == value, f"ranks have different bits of {name}"
    return merged


def _full_tensors(run: Run) -> Iterator[tuple[str, Tensor]]:
    """Yields names and full tensors of weights, master weights and optimizer states. Gathers in registry order."""
    run.parts.weights.settle()
    states = {(state_tensor.name, state_tensor.state): state_tensor for state_tensor in states_of(run.stepper.update)}
    # A rank that steps no element of a weight has no state, but must join the collectives. Other stages have the same states.
    names_of_ranks = run.groups["control"].gather_objects([state for _, state in states], label="the names of states")
    state_names = sorted({state for names in names_of_ranks for state in names})
    owners = run.stepper.update.masters.owners
    for param in run.registry:
        yield param.name, _gather_full_tensor(run, param, param.parameter.detach())
        if not param.trainable:
            continue
        for state_name in state_names:
            state_tensor = states.get((param.name, state_name))
            is_scalar = state_tensor is not None and state_tensor.tensor.ndim == 0
            if is_scalar or (state_tensor is None and state_name == "step"):
                if state_tensor is not None:
                    yield f"{param.name} {state_name}", state_tensor.tensor
                continue
            dtype = run.stepper.update.masters.dtype if state_tensor is None else state_tensor.tensor.dtype
            is_owned = owners is not None and param in owners.params and state_name not in (MASTER, AVERAGE)
            full_shape = param.shape if is_owned else param.parameter.shape
            full_state = torch.zeros(full_shape, dtype=dtype, device=param.parameter.device)
            if state_tensor is not None and state_tensor.elements is not None:
                full_state.view(-1)[state_tensor.elements.first : state_tensor.elements.last] = state_tensor.tensor.reshape(-1)
            elif state_tensor is not None:
                full_state.copy_(state_tensor.tensor)
            if run.store.elements(param) is not None:
                buffer = next(buffer for buffer in run.store.buffers if param in buffer.params)
                assert buffer.shard is not None, param
                _merge_bytes(run, full_state, buffer.shard.axis)
            if is_owned and param.shard is not None:
                _merge_bytes(run, full_state, AXIS)
            yield f"{param.name} {state_name}", full_state if is_owned else _gather_full_tensor(run, param, full_state)


def _gather_full_tensor(run: Run, param: Param, local: Tensor) -> Tensor:
    """Returns the full tensor of this rank's shard `local`, or `local` if the parameter is not sharded."""
    shard = param.shard
    if shard is None:
        return local
    rows = local.movedim(shard.dim, 0)
    full = rows.new_zeros(shard.size * shard.count, *rows.shape[1:])
    full[shard.index * shard.size : (shard.index + 1) * shard.size] = rows
    _merge_bytes(run, full, AXIS)
    return full[: shard.shape[shard.dim]].movedim(0, shard.dim).contiguous()


def _merge_bytes(run: Run, full: Tensor, axis: str) -> None:
    """Merges the bytes of `full` over the group; each byte is nonzero on at most one rank."""
    group, local = run.groups[axis], full.view(-1).view(torch.uint8)
    gathered = local.new_empty(group.size, *local.shape)
    # All ranks of the group use the registry order.
    group.all_gather(gathered, local[None], label="parts of states", channel=next(iter(group.channels), DEFAULT_CHANNEL)).wait()
    local.copy_(gathered.sum(0))


def _bytes(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
