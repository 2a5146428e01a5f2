"""Tries a user's optimizer on two small parameters before training. This takes milliseconds.

An optimizer may keep tensors that no checkpoint saves, or wrap an optimizer that ignores the learning rate. A run would then
silently give wrong results. The probe compares small trials: both parameters at once or one by one, full parameters or parts of
them, without a stop or resumed from a checkpoint. The last comparison reveals states outside `self.state[parameter]`.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sley_core.checkpointing import join_leaves
from sley_core.comm.device import storage_id
from sley_core.engine.buffers import ElementRange
from sley_core.engine.parts import Parts
from sley_core.errors import PlanError, RunError, format_cause
from sley_core.generators import comparable_state, find_optimizer_generators, seed_generators, seed_host, use_seed
from sley_core.json_text import decode_value, encode_value
from sley_core.model.layers import Model
from sley_core.optim import optimizers
from sley_core.optim.config import scope_of
from sley_core.optim.optimizers import Traits
from sley_core.plan.plan import Plan
from sley_core.records import OffloadManagerRecord
from sley_trainer.restore import name_leaves, state_leaves
from sley_trainer.update import step_buckets

Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # builds an optimizer from parameter groups
Shape = tuple[int, ...]

NUM_STEPS = 7
"""The number of steps in a trial: more than five, since rectified optimizers change no weight in their first five steps."""

RESUME_STEP = 3
"""The number of steps that a trial takes before its checkpoint."""

HINT = "keep tensors in `self.state[parameter]`, and numbers in attributes; a checkpoint contains nothing else"
"""The hint for faults in the state of an optimizer."""


class OptimizerFault(NamedTuple):
    """A fault of an optimizer. message: a predicate of the optimizer. hint: "" for none. key: the key of `[optimizer]` at
    fault.
    """

    message: str
    hint: str = HINT
    key: str = "factory"


class ToyParameters(NamedTuple):
    """The parameters of a trial. options: the options of each parameter's group. ndims: each parameter's number of dims."""

    options: Sequence[dict[str, Any]]
    ndims: Sequence[int]
    dtype: torch.dtype
    device: torch.device


class Trial:
    """Runs the optimizer that `build` returns on the two small parameters `toys`. is_split: whether each parameter is split in
    two. keeps_gradients, draws_random: whether a step so far has shown this trait of the optimizer.
    """

    def __init__(self, build: Build, toys: ToyParameters, *, is_split: bool = False) -> None:
        self._generator = torch.Generator().manual_seed(5)
        self._toys = toys
        self._shapes = [tuple(3 + dim for dim in range(ndim)) for ndim in toys.ndims]
        self._is_split = is_split
        self._parameters = [[nn.Parameter(part) for part in self._draw_parts(shape)] for shape in self._shapes]
        self.parameters = [part for parts in self._parameters for part in parts]
        groups = [{**options, "params": parts} for options, parts in zip(toys.options, self._parameters, strict=True)]
        self.optimizer = optimizers.set_training_mode(build(groups))
        self._generators = find_optimizer_generators(self.optimizer)
        self.initial_values = optimizers.copy_attributes(self.optimizer)
        self.keeps_gradients = self.draws_random = False

    def run(self, steps: Iterable[int] = range(NUM_STEPS), factor: float = 1.0, *, one_by_one: bool = False) -> "Trial":
        """Takes the steps numbered `steps`, and returns this trial. Every trial gets the same gradients and random numbers.
        In step n, from 0, the learning rate is multiplied by factor ** (n + 1). one_by_one: steps each parameter separately.
        """
        for step in steps:
            self._step(step, factor ** (step + 1), one_by_one=one_by_one)
        return self

    def _step(self, number: int, factor: float, *, one_by_one: bool) -> None:
        """Takes step `number` with random gradients, and sets the traits. factor: the factor of the learning rate."""
        self._generator.manual_seed(100 + number)
        gradients = [part for shape in self._shapes for part in self._draw_parts(shape)]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        seed_generators(self._generators, number)
        is_cuda = self._toys.device.type == "cuda"
        cuda_generator = torch.cuda.default_generators[torch.cuda.current_device()] if is_cuda else None
        seed_host(number)
        before = comparable_state(), cuda_generator and cuda_generator.manual_seed(number).get_offset()
        if one_by_one:
            step = optimizers.copy_gradients_first(self.optimizer, self.optimizer.step)
            params: Any = [SimpleNamespace(parameter=parameter) for parameter in self.parameters]
            step_buckets(self.optimizer, params, lambda params: ([param] for param in params[::-1]), step)
        else:
            self.optimizer.step()
        self.draws_random |= before != (comparable_state(), cuda_generator and cuda_generator.get_offset()) or bool(
            self._generators
        )
        attributes = (value for _, _, value in optimizers.extra_attributes(self.optimizer))
        states = tree_leaves([*self.optimizer.state.values(), *attributes])
        storages = {storage_id(tensor) for tensor in states if isinstance(tensor, Tensor)}
        self.keeps_gradients |= any(storage_id(tensor) in storages for tensor in gradients if tensor.numel())

    def values(self) -> list[Tensor]:
        """Returns a flat copy of each parameter, with its parts concatenated."""
        return [torch.cat([part.detach().reshape(-1) for part in parts]) for parts in self._parameters]

    def _draw_parts(self, shape: Shape) -> list[Tensor]:
        """Returns normal random values of `shape`, in one tensor, or in two flat parts if the trial splits its parameters."""
        flat = torch.randn(prod(shape), generator=self._generator, dtype=torch.float64)
        flat = flat.to(self._toys.device, self._toys.dtype)
        if not self._is_split or not shape:
            return [flat.view(shape)]
        ranges = (ElementRange(0, 2), ElementRange(2, len(flat)))  # in the middle of a row, as in a flat buffer
        return [flat[part.first : part.last].clone().view(part.optimizer_shape(shape)) for part in ranges]


def probe_optimizer(
    plan: Plan, parts: Parts, model: Model, factor: Callable[[int], float], dtype: torch.dtype, device: torch.device
) -> Traits:
    """Returns the traits of the plan's optimizer. factor: returns the factor of the learning rate at a step. dtype, device: the
    dtype and device of the weights that the optimizer updates. Raises PlanError "optimizer-unfit" on every rank if a run would
    give wrong results.
    """
    ndims = {param.ndim for layer in model.layers for param in layer.module.parameters() if param.requires_grad}
    lr_changes = any(factor(step) != 1.0 for step in range(0, plan.run.steps, 1 + plan.run.steps // 100))
    traits, faults = try_optimizer(plan, ndims, dtype, device, lr_changes=lr_changes)
    # A rank that updates only some of the elements draws different random numbers.
    has_shards = any(getattr(handler.record, "result", "full") == "shard" for handler in plan.gradient_handlers)
    is_split = plan.parallel.pp > 1 or plan.parallel.wp > 1 or has_shards
    if traits.draws_random and parts.store.reduction.has_fixed_order and is_split:
        message = "draws random numbers for the parameters that a rank updates, so results would depend on the layout"
        faults.append(OptimizerFault(message, 'use `reduction = "fast"`, or remove `pp`, `wp` and shards'))
    for manager in plan.offload if traits.has_modes else ():
        record = manager.record
        assert isinstance(record, OffloadManagerRecord), manager.name
        if record.scope(manager.config) != "global" and not record.steps_on_host:
            message = "switches weights between training and evaluation, so all of its states must be on the device at once"
            faults.append(OptimizerFault(message, 'use `when = "idle"`, or `memory.host_optimizer`'))
    if faults:
        raise PlanError.from_diagnostics(
            plan.diagnostic("optimizer-unfit", f"`{plan.optimizer.name}` {message}", ("optimizer", key), hint or None)
            for message, hint, key in faults
        )
    return traits


def try_optimizer(
    plan: Plan, ndims: Collection[int], dtype: torch.dtype, device: torch.device, *, lr_changes: bool = True
) -> tuple[Traits, list[OptimizerFault]]:
    """Returns the traits and faults of the plan's optimizer. Preserves the states of the random generators. ndims: the numbers
    of dims of the model's parameters, of which the extremes are tried. dtype, device: those of the small parameters.
    lr_changes: whether the run changes the learning rate.
    """
    config: Any = plan.optimizer.config
    options = [{"lr": config.lr, "initial_lr": config.lr, "weight_decay": decay} for decay in (config.weight_decay, 0.0)]
    toys = ToyParameters(options, (max(ndims, default=1), min(ndims, default=1)), dtype, device)

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = plan.optimizer.build(groups, device)
        return optimizer

    scope = scope_of(plan.optimizer.record, plan.optimizer.config)
    with use_seed(0), torch.random.fork_rng(list(range(torch.cuda.device_count())) if device.type == "cuda" else []):
        first = Trial(build, toys)
        start = first.values()
        try:
            first.run()
        except Exception as error:
            message = f"cannot step two small parameters of {toys.ndims[0]} and {toys.ndims[1]} dims: {format_cause(error)}"
            return Traits(), [OptimizerFault(message, "")]
        traits = Traits(first.keeps_gradients, first.draws_random, optimizers.has_modes(first.optimizer))
        end = first.values()

        def is_same(trial: Trial) -> bool:
            """Returns whether `trial` ends with the first trial's values, up to rounding and 0.1 % of the largest change."""
            for initial, expected, value in zip(start, end, trial.values(), strict=True):
                rounding = 16 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
                atol = rounding + 1e-3 * float((expected - initial).abs().max())
                if not torch.allclose(value, expected, rtol=0.0, atol=atol, equal_nan=True):
                    return False
            return True

        faults = []
        try:
            if not is_same(_run_with_resume(build, toys)):
                faults.append(OptimizerFault("takes different steps after it resumes from a checkpoint"))
        except Exception as error:
            faults.append(OptimizerFault(f"cannot resume from a checkpoint: {format_cause(error)}"))
        has_moved = not all(map(torch.equal, start, end))
        if lr_changes and has_moved and is_same(Trial(build, toys).run(factor=0.5)):
            message = "ignores the learning rate in its groups"
            faults.append(OptimizerFault(message, 'read `group["lr"]` in each step'))
        if traits.draws_random or scope not in ("elementwise", "per_matrix"):
            return traits, faults
        try:
            is_separable = is_same(Trial(build, toys).run(one_by_one=True))
            is_checked = scope == "elementwise" and is_separable
            is_elementwise = not is_checked or is_same(Trial(build, toys, is_split=True).run())
        except Exception as error:
            reason = "" if isinstance(error, RunError) else f": {format_cause(error)}"
            message = f"cannot update its parameters one by one, or in parts{reason}"
            return traits, [*faults, OptimizerFault(message, 'set `scope = "global"`', "scope")]
        if not is_separable:
            message = "does not update each parameter from its own gradients alone, so an update depends on other parameters"
            faults.append(OptimizerFault(message, 'set `scope = "global"`', "scope"))
        elif not is_elementwise:
            message = "does not update each element from its own gradient alone, so an update depends on other elements"
            faults.append(OptimizerFault(message, 'set `scope = "matrix"`', "scope"))
    return traits, faults


def _run_with_resume(build: Build, toys: ToyParameters) -> Trial:
    """Returns a finished trial that stopped after `RESUME_STEP` steps, and continued from a checkpoint in a new optimizer."""
    first, second = Trial(build, toys).run(range(RESUME_STEP)), Trial(build, toys)
    states = {}
    with torch.no_grad():
        for saved, parameter in zip(first.parameters, second.parameters, strict=True):
            parameter.copy_(saved)
            state = first.optimizer.state.get(saved, {})
            leaves = {name: _encode_and_decode(value) for name, value in state_leaves(state)}
            states[id(parameter)] = join_leaves(_encode_and_decode(name_leaves(state)), leaves)
    optimizer = first.optimizer
    options = [_encode_and_decode(optimizers.options_to_save(optimizer, group)) for group in optimizer.param_groups]
    saved_values = optimizers.shared_values_to_save(optimizer, first.initial_values)
    values = {location: _encode_and_decode(value) for location, value in saved_values.items()}
    dtypes = dict.fromkeys(states, toys.dtype)
    optimizers.load_optimizer_state(second.optimizer, states, options, values, second.initial_values, dtypes)
    return second.run(range(RESUME_STEP, NUM_STEPS))


def _encode_and_decode(value: Any) -> Any:
    """Returns a copy of `value`, as a checkpoint would restore it."""
    return value.clone() if isinstance(value, Tensor) else decode_value(json.loads(json.dumps(encode_value(value))))
