"""Ends a step after all gradients are reduced: unscales and clips the gradients, exchanges votes, and runs the optimizer.

The norm counts every gradient once: a gradient on `copies` ranks adds 1/copies on each of them, so one sum over all ranks is
the norm of the full model in every layout. On CUDA nothing here waits for the device, with two exceptions: fp16, whose scale
depends on overflows, and optimizers that cannot skip a step on the device. Then the host must know whether a step is taken.

If the loss or the norm is not finite, or the loss weight of the batch is 0, no rank updates: weights, masters and optimizer
states do not change, and the code that reads the totals raises an error, or counts a skipped step (`Skips`).

The average of a weight (`[averaging]`) is elementwise, so each rank averages only the elements that its optimizer updates.
Evaluations and saved weights use the averages; training keeps the raw weights.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from sley_core.engine.agreement import collect_exchanges, exchange_difference
from sley_core.engine.buffers import ElementRange, NormGroup
from sley_core.engine.parts import Buckets, Parts
from sley_core.engine.totals import NORM, LossScale, Skips, StepTotals, Votes
from sley_core.engine.weights import MasterWeights, OptimizerParam
from sley_core.errors import RunError
from sley_core.generators import derive_seed, find_optimizer_generators, seed_generators
from sley_core.optim import optimizers
from sley_trainer.row_metrics import SourceSums

CLIP_EPSILON = 1e-6
"""The number added to the norm before `clip_norm` is divided by it, as in `torch.nn.utils.clip_grad_norm_`."""


@dataclass(eq=False)
class Update:
    """Updates this rank's weights at the end of a step: runs `optimizer` on `masters` with the gradients in `parts.store`.

    config: the plan's [optimizer] table. parameter_groups: returns torch.optim's groups for parameters that are unfrozen later.
    lr_factor: returns the learning rate's factor at a step. traits: the optimizer's behaviour. averages: None if the plan has
    no [averaging]. sources: the losses by source. scale: the loss scale of fp16, or None. skips: counts non-finite steps; None
    if the plan does not skip steps. was_taken: whether the last step changed weights, as far as the host knows.
    """

    parts: Parts
    config: Any
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    parameter_groups: Callable[[list[OptimizerParam]], list[dict[str, Any]]]
    lr_factor: Callable[[int], float]
    traits: optimizers.Traits
    averages: "Averages | None"
    sources: SourceSums | None = field(default=None, init=False)
    was_taken: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        parts = self.parts
        self.store, self.groups, self.device, self.numbers = parts.store, parts.groups, parts.world.device, parts.numbers
        self.scale = None if parts.precision.loss_scale is None else LossScale(parts.precision.loss_scale)
        self.skips = Skips(parts.run.max_skips) if parts.run.on_nan == "skip" else None
        optimizer = self.optimizer = optimizers.set_training_mode(self.optimizer)
        self.initial_values = optimizers.copy_attributes(optimizer)
        self._generators = [] if self.traits is optimizers.TORCH_TRAITS else find_optimizer_generators(optimizer)
        self._factor = 1.0
        self._has_stepped = False
        self._num_layouts = self.store.num_layouts
        self._multi_rank_groups = [group for group in self.groups.values() if group.size > 1]
        rate = optimizer.defaults["lr"]
        self._default_group = next((group for group in optimizer.param_groups if group.get("initial_lr") == rate), {})

    @property
    def lr(self) -> float:
        """The learning rate in the last step, for parameters whose group sets none of its own. Includes a program's changes."""
        return float(self._default_group.get("initial_lr", self.optimizer.defaults["lr"])) * self._factor

    def step(self, step: int, loss: Tensor, weight: float, votes: Votes) -> StepTotals:
        """Clips the gradients, runs the optimizer, and returns the step's totals. If the loss or norm is not finite, no weight
        changes on any rank. All ranks must call it. The learning rate depends on the number of steps that changed weights.

        loss: this rank's sum of losses, float64 on the device: a scalar, or one per microbatch if the order of sums is fixed; 0
        on ranks without the loss. weight: this rank's share of the batch's loss weight. votes: this rank's requests.
        """
        num_skipped = sum(counter.num_skipped for counter in (self.scale, self.skips) if counter is not None)
        self.was_taken = False
        self._factor = self.lr_factor(step - num_skipped)
        gradients = list(self.store.norm_groups())
        totals = self._unscale_and_reduce(gradients, loss, weight, votes)
        if self.scale is not None:
            overflowed = totals.read().is_skipped  # the same on every rank; waits for the device
            self.scale.update(step, overflowed=overflowed)
            if overflowed:
                return totals
        self._add_unfrozen_params()
        is_on_device = self.device.is_async and self._has_stepped and optimizers.can_skip_on_device(self.optimizer)
        is_on_device &= self.masters.device is None
        if is_on_device:
            norm: Tensor | float = totals.values[NORM]
        else:
            result = totals.read()
            if not result.allows_update:
                return totals
            norm = result.grad_norm
        if self.config.clip_norm is not None:
            self._clip_gradients(gradients, norm, self.config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self._factor
        self.masters.set_gradients()
        run_optimizer_step: Callable[[], Any] = self.optimizer.step
        if is_on_device:
            run_optimizer_step = partial(optimizers.step_if, self.optimizer, totals.allows_update_on_device)
        if self.traits.keeps_gradients:
            run_optimizer_step = optimizers.copy_gradients_first(self.optimizer, run_optimizer_step)
        if self.averages is not None:
            self.averages.add(self.masters.local_params)
        with self._seed_optimizer(step):
            if (buckets := self.parts.events.step_in_buckets) is None:
                run_optimizer_step()
            else:
                step_buckets(self.optimizer, self.masters.optimizer_params, buckets, run_optimizer_step)
        self.masters.scatter_owned_params()
        if self.averages is not None:
            allowed = totals.allows_update_on_device if is_on_device else None
            self.averages.update(self.masters.local_params, step, step - num_skipped, allowed)
        self._has_stepped = self.was_taken = True
        self.masters.write_back()
        return totals

    @property
    def switches_weights(self) -> bool:
        """Whether evaluations and saves use other weights than training: averages, or the weights after optimizer.eval()."""
        return self.averages is not None or self.traits.has_modes

    @contextmanager
    def use_evaluation_weights(self) -> Iterator[None]:
        """Within the block, weights and masters are the averages, or the weights of the optimizer's evaluation mode, if the run
        has either. Then restores the old values exactly. All ranks must call it between steps, with all memory on the device.
        """
        if not self.switches_weights:
            yield
            return
        self.masters.copy_outside_writes()
        restore = self._switch_mode() if self.averages is None else self.averages.swap(self.masters.local_params)
        self._publish_weights()
        try:
            yield
        finally:
            restore()
            self._publish_weights()

    def _switch_mode(self) -> Callable[[], None]:
        """Switches the optimizer to its evaluation mode. Returns a function that restores the mode and the masters."""
        optimizer: Any = self.optimizer
        before = [entry.parameter.detach().clone() for entry in self.masters.local_params]
        self.masters.gather_owned_params()
        optimizer.eval()
        self.masters.scatter_owned_params()

        def restore() -> None:
            self.masters.gather_owned_params()
            optimizer.train()
            self.masters.scatter_owned_params()
            with torch.no_grad():
                for entry, value in zip(self.masters.local_params, before, strict=True):
                    entry.parameter.copy_(value)

        return restore

    def _publish_weights(self) -> None:
        """Copies the masters into the weights, and waits until the weights have arrived on all ranks."""
        self.masters.write_back(are_sent=False)
        self.masters.weights.settle()

    @contextmanager
    def _seed_optimizer(self, step: int) -> Iterator[None]:
        """Within the block, the optimizer's generators have the same seed on all ranks, unless the optimizer is torch's."""
        if self.traits is optimizers.TORCH_TRAITS:
            yield
            return
        seed = derive_seed(self.parts.run.seed, "update", step)
        with self.device.preserve_random_state():
            self.device.seed(seed)
            seed_generators(self._generators, seed)
            yield

    def include_unfrozen_params(self) -> None:
        """Extends the gradient store and the optimizer with the parameters that a program has unfrozen since the last step, so
        that values can be loaded into their masters and states. All ranks of a stage call it between steps.
        """
        self.store.update_layout()
        self._add_unfrozen_params()

    def _add_unfrozen_params(self) -> None:
        """Extends the optimizer with the parameters that a program has unfrozen since the last step."""
        if self._num_layouts == self.store.num_layouts:
            return
        self._num_layouts = self.store.num_layouts
        local_params = {entry.param for entry in self.masters.local_params}
        new_params = [param for param in self.store.params if param not in local_params]
        # The next step cannot be skipped on the device: fused optimizers create a parameter's state in its first step.
        self._has_stepped = False
        for group in self.parameter_groups(self.masters.add(new_params)) if new_params else ():
            self.optimizer.add_param_group(group)

    def _unscale_and_reduce(self, gradients: list[NormGroup], loss: Tensor, weight: float, votes: Votes) -> StepTotals:
        """Unscales `gradients`, and returns the norm, the loss, votes and plugins' numbers, summed over all ranks. An inf-norm
        or a fixed order of sums needs a second all-reduce.
        """
        if self.scale is not None:
            for group in gradients:
                torch._foreach_mul_(group.tensors, 1 / self.scale.value)
        norm_type = math.inf if self.config.clip_kind == "inf" else self.config.clip_kind
        totals = self.store.reduction.totals(gradients, loss, norm_type)
        terms = totals.terms()
        differs = exchange_difference(self._multi_rank_groups)
        numbers = [self.numbers.local_shares(self.device.torch_device)] if self.numbers.names else []
        numbers += [] if self.sources is None else [self.sources.terms()]
        host = torch.tensor([weight, *map(float, votes), differs], dtype=torch.float64)
        # One message carries all numbers: on a small model the latency of a second one would slow every step noticeably.
        summed = torch.cat([terms, self.device.move(host), *numbers])
        # A collective of all ranks: every rank ends every step here, after its own reductions.
        self.groups["all"].all_reduce(summed, label="loss and gradient norm").wait()
        num_terms = terms.numel()
        values = torch.cat([torch.stack(totals.loss_and_norm(summed[:num_terms])), summed[num_terms:]])
        scale = None if self.scale is None else self.scale.value
        return StepTotals(values, loss.sum(), collect_exchanges(self._multi_rank_groups), self.device, scale)

    def _clip_gradients(self, gradients: list[NormGroup], norm: Tensor | float, clip_norm: float) -> None:
        """Scales all gradients in place so that their norm is at most `clip_norm`. norm: a float, or a tensor on the device."""
        if isinstance(norm, Tensor):
            # If the norm is NaN, no rank steps. Factor 1 then keeps the gradients, so that the error can name the bad gradient.
            # `full_like / norm` divides as the host does; `number / tensor` multiplies by the reciprocal, with other last bits.
            factor = torch.clamp(torch.full_like(norm, clip_norm) / (norm + CLIP_EPSILON), max=1.0).nan_to_num(nan=1.0)
        elif norm + CLIP_EPSILON > clip_norm:
            factor = torch.full((), clip_norm / (norm + CLIP_EPSILON), dtype=torch.float64, device=self.device.torch_device)
        else:
            return
        for group in gradients:  # the factor is at least fp32: in bf16 it would have 8 significant bits
            torch._foreach_mul_(group.tensors, factor.to(torch.promote_types(group.tensors[0].dtype, torch.float32)))


AVERAGE = "average"
"""The name of a weight's average among the states of a parameter, in reports of memory and in `states_of`."""


@dataclass(eq=False)
class Averages:
    """The averages over steps of the tensors that this rank's optimizer updates, in the dtypes of these tensors.

    rule: `rule(step, age)` returns the share of the updated weights in their average. name: the name of the rule in the plan.
    first_update: the index of the last update after which the averages were equal to the weights; None if there are no averages
    yet. tensors: the averages, keyed by the updated tensor; empty before the first update.
    """

    rule: Callable[[int, int], float]
    name: str
    first_update: int | None = field(default=None, init=False)
    tensors: dict[nn.Parameter, Tensor] = field(default_factory=dict, init=False)

    def add(self, params: Sequence[OptimizerParam]) -> None:
        """Adds an average for each tensor of `params` that has none, with the current values of the tensor."""
        for entry in params:
            if entry.parameter not in self.tensors:
                self.tensors[entry.parameter] = entry.parameter.detach().clone()

    def update(self, params: Sequence[OptimizerParam], step: int, index: int, is_allowed: Tensor | None) -> None:
        """Moves the averages towards the updated values of `params`. step: the number of the step, from 0. index: the number of
        updates before this one. is_allowed: a bool on the device, or None; False leaves the averages unchanged. Raises RunError
        "averaging-weight" if the rule returns a value that is not from 0 to 1.
        """
        weight = 1.0
        if self.first_update is not None and index > self.first_update:
            weight = self.rule(step, index - self.first_update)
            if not 0.0 <= weight <= 1.0:
                message = f"the weight that `{self.name}` returns must be from 0 to 1, but is {weight} in step {step + 1}"
                raise RunError("averaging-weight", message, hint="report this to the authors of the rule")
        if weight == 1.0:
            self.first_update = index
        if params and weight > 0.0:
            averages = [self.tensors[entry.parameter] for entry in params]
            _move_averages(averages, [entry.parameter.detach() for entry in params], weight, is_allowed)

    @torch.no_grad()
    def swap(self, params: Sequence[OptimizerParam]) -> Callable[[], object]:
        """Exchanges the values of `params` with their averages, bit for bit. Returns a function that undoes the exchange."""
        for entry, average in list_averages(self, params):
            value = entry.parameter.detach().clone()
            entry.parameter.copy_(average)
            average.copy_(value)
        return lambda: self.swap(params)

    def reset(self) -> None:
        """Drops all averages, so that they start again from the weights."""
        self.first_update = None
        self.tensors.clear()


def list_averages(averages: Averages | None, params: Sequence[OptimizerParam]) -> list[tuple[OptimizerParam, Tensor]]:
    """Returns each of `params` that has an average, with its average; [] if `averages` is None."""
    if averages is None:
        return []
    return [(entry, averages.tensors[entry.parameter]) for entry in params if entry.parameter in averages.tensors]


@torch.no_grad()
def _move_averages(averages: list[Tensor], values: list[Tensor], weight: float, is_allowed: Tensor | None) -> None:
    """Moves `averages` towards `values` in place, by the share `weight` of the difference, unless `is_allowed` is False."""
    if is_allowed is not None:
        torch._foreach_lerp_(averages, values, [(weight * is_allowed).to(averages[0].dtype)] * len(averages))
    elif weight == 1.0:
        torch._foreach_copy_(averages, values)
    elif averages[0].device.type != "cpu":
        torch._foreach_lerp_(averages, values, weight)
    else:
        # The CPU kernel of `lerp` rounds the last elements of a tensor differently, so shards would get other bits.
        for average, value in zip(averages, values, strict=True):
            average.add_((value - average).mul_(weight))


MASTER = "master"
"""The name of a master weight among the states of a parameter, in `states_of`."""


class ParamState(NamedTuple):
    """A master weight, average or optimizer state on this rank, of the parameter that the registry calls `name`.

    elements: the elements of the flattened parameter (or of its shard) to which the tensor belongs; None for all. state:
    "master", "average", or the optimizer's key, such as "exp_avg", or the path of a nested state ("factors.0"). A counter, such
    as "step", belongs to all elements.
    """

    name: str
    elements: ElementRange | None
    state: str
    tensor: Tensor


def states_of(update: Update) -> Iterator[ParamState]:
    """Yields this rank's master weights, and after the first step its optimizer states and averages, without copies."""
    for entry in update.masters.local_params:
        if entry.master is not None:
            yield ParamState(entry.name, entry.elements, MASTER, entry.parameter.detach())
    for entry, average in list_averages(update.averages, update.masters.local_params):
        yield ParamState(entry.name, entry.elements, AVERAGE, average)
    for entry in update.masters.optimizer_params:
        for state, tensor in optimizer_states(update, entry):
            yield ParamState(entry.name, entry.elements, state, tensor)


def optimizer_states(update: Update, optimizer_param: OptimizerParam) -> Iterator[tuple[str, Tensor]]:
    """Yields the path and tensor of each optimizer state of one parameter; nothing before the first step."""
    return named_tensors(update.optimizer.state.get(optimizer_param.parameter, {}))


def named_tensors(nested: object) -> Iterator[tuple[str, Tensor]]:
    """Yields the path and value of each tensor in nested dicts, lists and tuples: "factors.0", or "" for a bare tensor."""
    for path, value in tree_flatten_with_path(nested)[0]:
        if isinstance(value, Tensor):
            yield ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), value


def step_buckets(
    optimizer: torch.optim.Optimizer, params: Sequence[OptimizerParam], buckets: Buckets, step: Callable[[], None]
) -> None:
    """Calls `step`, which runs `optimizer`, once for each bucket, with only the bucket's parameters in the optimizer's groups.

    The result equals the result of one call if no parameter's update depends on another parameter. Before each call, the
    optimizer's shared values, such as a count of steps, get their values from before the first call. Raises RunError
    "optimizer-counts-steps" if two calls leave different values, and "optimizer-groups" if a call changes the number of groups.
    """
    all_params = [group["params"] for group in optimizer.param_groups]
    before = deepcopy(optimizers.shared_values(optimizer))  # copied in one call, since several entries may share a tensor
    after: optimizers.SharedValues = {}
    try:
        with closing(buckets(params)) as order:  # type: ignore[type-var]  # a generator
            for bucket in order:
                bucket_ids = {id(entry.parameter) for entry in bucket}
                for group, parameters in zip(optimizer.param_groups, all_params, strict=True):
                    group["params"] = [parameter for parameter in parameters if id(parameter) in bucket_ids]
                if after:
                    optimizers.set_shared_values(optimizer, deepcopy(before))
                step()
                if len(optimizer.param_groups) != len(all_params):
                    message = (
                        f"{type(optimizer).__name__} changes its groups within a step, so it cannot update one bucket at a time"
                    )
                    hint = 'set `when = "idle"`, or create the groups when the optimizer is built'
                    raise RunError("optimizer-groups", message, hint=hint)
                changes = optimizers.changed_values(before, optimizers.shared_values(optimizer))
                for location, value in changes.items():
                    if location in after and optimizers.can_compare(value) and not optimizers.is_equal(value, after[location]):
                        value_name = f"{location[0]} {location[2]!r}"
                        message = f"{type(optimizer).__name__} computes its {value_name} from all parameters of a step"
                        hint = 'set `when = "idle"`, or use an optimizer that stores its values per parameter'
                        raise RunError(
                            "optimizer-counts-steps", f"{message}, so it cannot update one bucket at a time", hint=hint
                        )
                after |= changes
        if after:
            optimizers.set_shared_values(optimizer, before | after)
    finally:
        for group, parameters in zip(optimizer.param_groups, all_params, strict=False):
            group["params"] = parameters
