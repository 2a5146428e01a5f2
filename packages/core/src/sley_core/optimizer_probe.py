"""Tries an optimizer of a user's own on two small parameters before training, in milliseconds.

A plain loop lets an optimizer do much that a run cannot: keep tensors where no checkpoint looks, or another optimizer that no
learning rate reaches. A run would go wrong silently, so each is found here, by comparing small trials: of both parameters at
once and one by one, whole and cut, without a stop and resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sley_core.comm.copies import storage_id
from sley_core.engine.buffers import ElementRange
from sley_core.engine.update import step_buckets
from sley_core.errors import PlanError, RunError, format_cause
from sley_core.generators import comparable_state, optimizer_generators, seed_generators, seed_host, use_seed
from sley_core.json_text import decode_value, encode_value
from sley_core.optim.config import scope_of
from sley_core.optim.shared import (
    Traits,
    attributes_of,
    copy_gradients_first,
    copy_values,
    extra_attributes,
    extra_states,
    has_modes,
    inner_optimizers,
    load_optimizer_state,
    options_to_save,
    set_training_mode,
    shared_to_save,
    shared_values,
)
from sley_core.records import OffloadManagerRecord
from sley_core.run_state.tensors import StateLeaf, join_leaves, state_leaves

if TYPE_CHECKING:
    from sley_core.engine.parts import Parts
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan

Groups = list[dict[str, Any]]
Build = Callable[[Groups], torch.optim.Optimizer]
Shapes = Sequence[tuple[int, ...]]
Cut = Callable[[tuple[int, ...]], list[tuple[int, tuple[int, ...]]]]
"""Returns the number of elements and the shape of each part of a parameter with this shape."""

NUM_STEPS = 7
"""The rectified ones move no weight in their first five steps."""

RESUME_STEP = 3


class OptimizerFault(NamedTuple):
    """A fault of an optimizer, with a hint. key: the key of [optimizer] that causes it."""

    message: str
    hint: str
    key: str = "factory"


class ToyParameters(NamedTuple):
    """The parameters and gradients of a trial. options: of the groups, one for each parameter. ndims: of both parameters."""

    options: Sequence[dict[str, Any]]
    ndims: Sequence[int]
    dtype: torch.dtype
    device: torch.device


class Trial:
    """An optimizer over two small parameters, or over the parts that `cut` makes of them. more: makes them larger."""

    def __init__(self, build: Build, toys: ToyParameters, cut: Cut | None = None, more: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(5)
        self._toys = toys
        self._shapes = [tuple(3 + more + index for index in range(ndim)) for ndim in toys.ndims]
        self._cut = cut or _keep_whole
        self.parameters = [[nn.Parameter(one) for one in self._make_parts(shape)] for shape in self._shapes]
        self.flat_parameters = [one for parts in self.parameters for one in parts]
        groups = [{**one, "params": parts} for one, parts in zip(toys.options, self.parameters, strict=True)]
        self.optimizer = set_training_mode(build(groups))
        self._generators = optimizer_generators(self.optimizer)
        self.initial_values = copy_values(attributes_of(shared_values(self.optimizer)))
        self.keeps_gradients = self.draws = False

    def run(self, steps: Iterable[int] = range(NUM_STEPS), factor: float = 1.0, *, one_by_one: bool = False) -> Trial:
        """Takes these steps: the same gradients in every trial, each in memory of its own, and the same random numbers. factor:
        on the learning rate, in step n to the power of n + 1.
        """
        for number in steps:
            self._step(number, factor ** (number + 1), one_by_one=one_by_one)
        return self

    def _step(self, number: int, factor: float, *, one_by_one: bool) -> None:
        self._generator.manual_seed(100 + number)
        gradients = [part for shape in self._shapes for part in self._make_parts(shape)]
        for parameter, gradient in zip(self.flat_parameters, gradients, strict=True):
            parameter.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        seed_generators(self._generators, number)
        device = self._toys.device
        on_device = torch.cuda.default_generators[torch.cuda.current_device()] if device.type == "cuda" else None
        seed_host(number)
        before = comparable_state(), on_device and on_device.manual_seed(number).get_offset()
        step = copy_gradients_first(self.optimizer, self.optimizer.step)
        if not one_by_one:
            self.optimizer.step()
        else:
            stepped: Any = [_Stepped(tensor) for tensor in self.flat_parameters]
            step_buckets(self.optimizer, stepped, lambda params: ([param] for param in params[::-1]), step)
        after = comparable_state(), on_device and on_device.get_offset()
        self.draws |= before != after or bool(self._generators)
        objects = [*self.optimizer.state.values(), *(value for _, _, value in extra_attributes(self.optimizer))]
        storages = {storage_id(tensor) for tensor in tree_leaves(objects) if isinstance(tensor, Tensor)}
        self.keeps_gradients |= any(storage_id(tensor) in storages for tensor in gradients if tensor.numel())

    def values(self) -> list[Tensor]:
        """Returns the current values of each parameter as a flat tensor."""
        return [torch.cat([part.detach().reshape(-1) for part in parts]) for parts in self.parameters]

    def _make_parts(self, shape: tuple[int, ...]) -> list[Tensor]:
        flat = torch.randn(prod(shape), generator=self._generator, dtype=torch.float64)
        flat = flat.to(self._toys.device, self._toys.dtype)
        sizes, shapes = zip(*self._cut(shape), strict=True)
        return [part.clone().view(shape) for part, shape in zip(torch.split(flat, list(sizes)), shapes, strict=True)]


class _Stepped(NamedTuple):
    parameter: nn.Parameter


def probe_optimizer(
    plan: Plan, parts: Parts, model: Model, factor: Callable[[int], float], dtype: torch.dtype, place: torch.device
) -> Traits:
    """Returns the traits of the plan's optimizer. factor: of the learning rate at a step. dtype, place: of the parameters that
    it steps. Raises PlanError `optimizer-unfit`, the same on every rank, if a run cannot step it right.
    """
    ndims = {one.ndim for layer in model.layers for one in layer.module.parameters() if one.requires_grad}
    lr_changes = any(factor(step) != 1.0 for step in range(0, plan.run.steps, 1 + plan.run.steps // 100))
    traits, faults = try_optimizer(plan, ndims, dtype, place, lr_changes=lr_changes)
    # Where ranks step other elements than one process does, they draw other numbers.
    shards = any(getattr(one.record, "result", "full") == "shard" for one in plan.gradient_handlers)
    is_cut = plan.parallel.pp > 1 or plan.parallel.wp > 1 or shards
    if traits.draws and parts.store.reduction.fixed_order and is_cut:
        message = "draws random numbers for the parameters that a rank updates, so layouts that cut the model differ"
        faults.append(OptimizerFault(message, 'use `reduction = "fast"`, or leave `pp`, `wp` and shards out'))
    for manager in plan.offload if traits.has_modes else ():
        record = manager.record
        assert isinstance(record, OffloadManagerRecord), manager.name
        if record.scope(manager.config) != "global" and not record.steps_on_host:
            message = "switches weights between training and evaluation, which needs all of its states on the device at once"
            faults.append(OptimizerFault(message, 'use `when = "idle"`, or `memory.host_optimizer`'))
    if faults:
        name = plan.optimizer.name
        raise PlanError.from_diagnostics(
            plan.diagnostic("optimizer-unfit", f"`{name}` {one.message}", ("optimizer", one.key), one.hint or None)
            for one in faults
        )
    return traits


def try_optimizer(
    plan: Plan, ndims: Collection[int], dtype: torch.dtype, place: torch.device, *, lr_changes: bool = True
) -> tuple[Traits, list[OptimizerFault]]:
    """Tries the plan's optimizer on two small parameters of `dtype`, with the most and the fewest dims of a model's; returns
    its traits and its faults. lr_changes: whether it must follow a learning rate that changes. Leaves all generators as
    they are.
    """
    config: Any = plan.optimizer.config
    rates = {"lr": config.lr, "initial_lr": config.lr}
    options = [{**rates, "weight_decay": config.weight_decay}, {**rates, "weight_decay": 0.0}]
    toys = ToyParameters(options, (max(ndims, default=1), min(ndims, default=1)), dtype, place)

    def build(groups: Groups) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = plan.optimizer.build(groups, place)
        return optimizer

    scope = scope_of(plan.optimizer.record, plan.optimizer.config)
    with use_seed(0), torch.random.fork_rng(list(range(torch.cuda.device_count())) if toys.device.type == "cuda" else []):
        first = Trial(build, toys)
        start = first.values()
        try:
            first.run()
            larger = Trial(build, toys, more=2).run()
        except Exception as error:
            fault = OptimizerFault(
                f"cannot step two small parameters of {toys.ndims[0]} and {toys.ndims[1]} dims: {format_cause(error)}", ""
            )
            return Traits(), [fault]
        traits = Traits(first.keeps_gradients, first.draws, has_modes(first.optimizer))
        end = first.values()

        def is_same(trial: Trial) -> bool:
            """Returns whether the values are those of the first trial, but for rounding."""
            for initial, expected, value in zip(start, end, trial.values(), strict=True):
                eps = torch.finfo(expected.dtype).eps
                largest_change = float((expected - initial).abs().max()) if expected.numel() else 0.0
                size = float(expected.abs().max()) if expected.numel() else 0.0
                if not torch.allclose(value, expected, rtol=0.0, atol=16 * eps * size + 1e-3 * largest_change, equal_nan=True):
                    return False
            return True

        faults = list(_find_unsaved_state(first, larger))
        if not faults:
            try:
                if not is_same(_run_with_resume(build, toys)):
                    faults.append(OptimizerFault("takes other steps once it goes on from a checkpoint", HINT))
            except Exception as error:
                reason = error.diagnostics[0].message if isinstance(error, RunError) else format_cause(error)
                faults.append(OptimizerFault(f"cannot go on from a checkpoint: {reason}", HINT))
        has_moved = not all(map(torch.equal, start, end))
        if lr_changes and has_moved and is_same(Trial(build, toys).run(factor=0.5)):
            faults.append(
                OptimizerFault("takes no notice of the learning rate in its groups", 'read `group["lr"]` in each step')
            )
        if traits.draws or scope not in ("elementwise", "per_matrix"):
            return traits, faults
        try:
            is_apart = is_same(Trial(build, toys).run(one_by_one=True))
        except Exception as error:
            reason = "" if isinstance(error, RunError) else f": {format_cause(error)}"
            faults.append(OptimizerFault(f"cannot step its parameters one by one{reason}", 'say `scope = "global"`', "scope"))
            return traits, faults
        if not is_apart:
            faults.append(
                OptimizerFault("updates a parameter by more than its own gradients", 'say `scope = "global"`', "scope")
            )
        elif scope == "elementwise" and not all(is_same(Trial(build, toys, cut).run()) for cut in (_split_rows, _split_flat)):
            message = "updates an element by more than its own gradients and the number of dims of its parameter"
            faults.append(OptimizerFault(message, 'say `scope = "matrix"`', "scope"))
    return traits, faults


HINT = "keep numbers, and tensors in `self.state[parameter]`; other attributes are not in a checkpoint"


def _find_unsaved_state(trial: Trial, larger: Trial) -> Iterator[OptimizerFault]:
    """Yields a fault for each state that neither a checkpoint nor an offload can find."""
    optimizer = trial.optimizer
    for name, inner in inner_optimizers(optimizer):
        yield OptimizerFault(
            f"has another optimizer in `{name}`, whose groups and states are its own: no learning rate and no checkpoint "
            f"reaches them",
            f"give {type(inner).__name__} the outer's: `{name}.param_groups = self.param_groups`, `{name}.state = self.state`",
        )
    known = {id(one) for one in trial.flat_parameters}
    if any(isinstance(key, Tensor) and id(key) not in known for key in optimizer.state):
        yield OptimizerFault("has states of tensors that are no parameters of it", HINT)
    places, others = _extra_tensor_shapes(trial), _extra_tensor_shapes(larger)
    for place, shapes in places.items():
        if shapes != others.get(place, shapes):
            yield OptimizerFault(
                f"keeps tensors that grow with the parameters in {place}, where no checkpoint finds them", HINT
            )


def _extra_tensor_shapes(trial: Trial) -> dict[str, list[torch.Size]]:
    """Returns the shapes of the tensors in each attribute, and in each state whose key is no parameter."""
    parameters = {id(one) for one in trial.flat_parameters}
    places = {f"the attribute `{path}{name}`": value for path, name, value in extra_attributes(trial.optimizer)}
    places |= {f"the state {key!r}, whose key is no parameter": one for key, one in extra_states(trial.optimizer).items()}
    shapes = {}
    for place, value in places.items():
        inside = [one for one in tree_leaves(value) if isinstance(one, Tensor) and id(one) not in parameters]
        shapes[place] = [one.shape for one in inside]
    return shapes


def _run_with_resume(build: Build, toys: ToyParameters) -> Trial:
    """Returns a trial after all steps, which resumed in between from the checkpoint of another trial."""
    first, second = Trial(build, toys).run(range(RESUME_STEP)), Trial(build, toys)
    states = {}
    with torch.no_grad():
        for expected, actual in zip(first.flat_parameters, second.flat_parameters, strict=True):
            actual.copy_(expected)
            leaves = state_leaves(first.optimizer.state.get(expected, {}))
            states[id(actual)] = join_leaves(StateLeaf(leaf.path, _encode_and_decode(leaf.value)) for leaf in leaves)
    options = [_encode_and_decode(options_to_save(first.optimizer, group)) for group in first.optimizer.param_groups]
    shared = {
        place: _encode_and_decode(value) for place, value in shared_to_save(first.optimizer, first.initial_values).items()
    }
    load_optimizer_state(second.optimizer, states, options, shared, second.initial_values, dict.fromkeys(states, toys.dtype))
    return second.run(range(RESUME_STEP, NUM_STEPS))


def _encode_and_decode(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else decode_value(json.loads(json.dumps(encode_value(value))))


def _keep_whole(shape: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    return [(prod(shape), shape)]


def _split_rows(shape: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    if not shape:
        return _keep_whole(shape)
    width = prod(shape[1:])
    return [(rows * width, (rows, *shape[1:])) for rows in (1, shape[0] - 1)]


def _split_flat(shape: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Cuts in the middle of a row, as spans of a flat buffer are."""
    if not shape:
        return _keep_whole(shape)
    ends = [0, 2, prod(shape)]
    return [(last - first, ElementRange(first, last).stepped_shape(shape)) for first, last in pairwise(ends)]
