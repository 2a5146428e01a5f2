"""Calls layers, and applies activation policies, which decide which activations are saved.

    activation policy ──> wait for the layer's weights ──> seed its generators ──> layer
                              `Waits`                       (seed, step, micro, layer)

Recomputation, by torch's non-reentrant checkpoint, runs all steps after the policy again, and is reported to scheduler hooks
with phase `recompute`. Generators are seeded before every call, so their states are not saved. Nothing may depend on code that
runs after the layer, since a recomputation stops as soon as it has its tensors.

A layer may put its results into a dict, list or object among its arguments, so its second run gets copies of these containers,
made before the first run, with the same tensors. torch's checkpoint detects writes in place to tensor arguments, but not to
tensors in tuples and dicts. So this module compares the version counters of all tensors in the arguments, and in the first step
also their bits, since some writes do not change a counter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sley_core.actions.action import Action
from sley_core.comm.device import Device
from sley_core.comm.exchanges import ActionProgress
from sley_core.engine.agreement import WriteWatch
from sley_core.engine.boundary import copy_containers, tensors_in
from sley_core.engine.parts import MicroStep, Phase, Waits
from sley_core.errors import PlanError, RunError, note_origin
from sley_core.generators import derive_seed, find_module_generators, seed_generators
from sley_core.model.attention import load_varlen_kernel
from sley_core.model.layers import ForwardPatch, Layer
from sley_core.model.tensors import dtype_hint, sum_of_bits, version_of
from sley_core.plan.tables import CompileConfig
from sley_core.plugin import KeepConfig, RecomputeConfig
from sley_core.protocols import ActivationPolicy, SchedulerHook, SequenceCommunicator


class Keep(ActivationPolicy):
    """Calls layers unchanged, so autograd saves their activations."""

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        return layer(*args, **fields)


class Recompute(ActivationPolicy):
    """Recomputes the layers in `names`: they save only inputs, and run again when the backward needs their activations."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._num_steps = 0

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Counts training steps: `call` compares the bits of inputs only in the first step."""
        self._num_steps += phase is Phase.TRAIN

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        """Calls `layer`, through torch's checkpoint if `names` contains `name`. Raises RunError `recompute-in-place` if a layer
        has written to the inputs in place, since the recomputation would start from other values.
        """
        if name not in self.names:
            return layer(*args, **fields)
        saved = copy_containers((args, dict(fields)))
        read_versions = partial(_read_versions, with_bits=self._num_steps == 1)
        versions = read_versions(saved)
        first_inputs = [(args, fields)]  # dropped in the first run, which may put its output, and so its graph, into them

        def check(saved: Any) -> None:
            if read_versions(saved) != versions:
                message = f"a layer writes in place to the input of layer {name!r}, which the recomputation needs"
                hint = "return new tensors instead (`h = h * 2`, `inplace=False`), or reduce the `fraction` of `core.recompute`"
                raise RunError("recompute-in-place", message, hint=hint)

        def run(saved: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Any:
            if first_inputs:
                args, fields = first_inputs.pop()
            else:
                check(saved)  # a later layer may have written in place
                args, fields = copy_containers(saved)
            return layer(*args, **fields)

        # The checkpoint keeps the tensors in the tuple `saved` without autograd, which cannot save tensors of inference mode.
        output = checkpoint(run, saved, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts)
        check(saved)
        return output

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Returns the contexts of a layer's forward and of its recomputation, for one layer call. Here, they do nothing."""
        return nullcontext(), nullcontext()


def _read_versions(inputs: Any, *, with_bits: bool) -> list[tuple[int, int]]:
    """Returns the version counter of each tensor in `inputs` and, if `with_bits`, a hash of its values, else 0."""
    versions_and_hashes = [(version_of(tensor), sum_of_bits(tensor) if with_bits else None) for tensor in tensors_in((inputs,))]
    return [(version, 0 if bits is None else int(bits)) for version, bits in versions_and_hashes]


def build_keep(config: KeepConfig, layer_names: Sequence[str]) -> ActivationPolicy:
    """Builds `core.keep`, the policy that saves all activations."""
    return Keep()


def build_recompute(config: RecomputeConfig, layer_names: Sequence[str]) -> ActivationPolicy:
    """Builds `core.recompute`, which recomputes the first `config.fraction` of the blocks (all layers but the first and the
    last). The number of recomputed blocks is rounded half up.
    """
    blocks = layer_names[1:-1]
    # The decimal number in the plan: the float 0.285 is slightly less, so 0.285 x 100 would round to 28.
    share = Decimal(str(config.fraction)) * len(blocks)
    return Recompute(frozenset(blocks[: int(share.to_integral_value(ROUND_HALF_UP))]))


GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio. Its multiples are far apart, even in their low 32 bits, the only bits of a seed that
torch's CPU generator uses (Steele et al., Fast Splittable Pseudorandom Number Generators, 2014).
"""


@dataclass(eq=False)
class LayerCaller:
    """Calls layers under the activation policy. Before each call, waits for the layer's weights (`waits`) and seeds generators.
    seed: the run's seed. hooks: the scheduler hooks, to which recomputations are reported. slice_index: the index of this
    rank's slice of its sequences; slices of one sample draw different random numbers. step_progress: receives the name of each
    called layer. write_watch: checks whether layers write weights and buffers. sequence: the attention over split sequences,
    which may check the calls of layers.
    """

    device: Device
    seed: int
    policy: ActivationPolicy
    hooks: Sequence[SchedulerHook] = ()
    slice_index: int = 0
    waits: Waits = field(default_factory=Waits)
    step_progress: ActionProgress = field(default_factory=ActionProgress)
    write_watch: WriteWatch | None = None
    sequence: SequenceCommunicator | None = None

    def __post_init__(self) -> None:
        self._keeps_all = type(self.policy) is Keep  # not a subclass, which may do more
        self._slice = ("slice", self.slice_index) if self.slice_index else ()
        self._step = -1
        self._step_seed = 0
        self._layer_seeds: dict[str, int] = {}
        self._generators: dict[str, list[Any]] = {}

    def __call__(self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep) -> Any:
        """Returns `layer.module(*args, **fields)`, called under the policy unless the phase is an evaluation. args: the
        previous layer's output; () for the first layer. fields: the batch fields that the layer reads.
        """
        call_layer = self._run_layer if self._keeps_all or micro.phase is Phase.EVALUATE else self._call_with_policy
        if self.sequence is not None and micro.phase is Phase.TRAIN:
            return self.sequence.call_layer(
                layer,
                args,
                fields,
                lambda args, fields: call_layer(layer, args, fields, micro),
                lambda args, fields: self._run_layer(layer, args, fields, micro),
            )
        return call_layer(layer, args, fields, micro)

    def seed_generators_for_loss(self, micro: MicroStep) -> None:
        """Seeds all generators for the loss of `micro`, with the same seed on all ranks that share its sequences."""
        self.device.seed((derive_seed(self.seed, "loss", micro.step) + micro.global_micro * GOLDEN_RATIO_64) % (1 << 63))

    def _call_with_policy(self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep) -> Any:
        """Lets the policy run the layer. Reports the second and later runs of the layer to the hooks as recomputations."""
        num_runs = 0

        def run_layer(*args: Any, **fields: Any) -> Any:
            nonlocal num_runs
            num_runs += 1
            if num_runs > 1:
                if self.write_watch is not None:
                    self.write_watch.check_rerun(layer)
                recomputation = replace(micro, phase=Phase.RECOMPUTE, layer=layer.name)
                call_hooks(self.hooks, "before_forward", recomputation, args[0] if args else None)
            return self._run_layer(layer, args, fields, micro)

        return self.policy.call(layer.name, run_layer, args, fields, micro)

    def _run_layer(self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep) -> Any:
        """Waits for weights, seeds generators and calls the layer. Raises PlanError "model-random" if the call creates a
        generator.
        """
        self.step_progress.layer = layer.name
        self.waits.wait_for(layer.name)
        is_first_call = layer.name not in self._generators
        watch = None if micro.phase is Phase.EVALUATE else self.write_watch
        snapshot = None if watch is None else watch.begin_call(layer, micro)
        try:
            seed = self._seed(layer.name, micro)
            self.device.seed(seed)
            if is_first_call:
                self._generators[layer.name] = find_module_generators(layer.module, layer.name)
            seed_generators(self._generators[layer.name], seed)
            output = layer.module(*args, **fields)
        except Exception as error:
            note_origin(error, _describe_call(layer, args, fields, micro), layer.module)
            if hint := dtype_hint(error):
                error.add_note(hint)
            raise
        if watch is not None:
            watch.check(layer, snapshot)
        if is_first_call:  # which call would be the first to use a generator made in the forward depends on the layout
            seeded = {id(generator) for generator in self._generators[layer.name]}
            if any(id(generator) not in seeded for generator in find_module_generators(layer.module, layer.name)):
                message = (
                    f"the forward of the layer {layer.name!r} creates a generator, so its numbers would depend on the layout"
                )
                hint = "create the generator in the module's constructor; Sley then seeds it for each microbatch"
                raise PlanError("model-random", message, path=("model",), hint=hint)
        return output

    def _seed(self, layer: str, micro: MicroStep) -> int:
        """Returns the seed of a call. Hashes once per layer and once per step, since a hash takes as long as a small layer."""
        if layer not in self._layer_seeds:
            self._layer_seeds[layer] = derive_seed(self.seed, "layer", layer, *self._slice)
        if micro.step != self._step:
            self._step, self._step_seed = micro.step, derive_seed(self.seed, "forward", micro.step)
        return (self._step_seed + micro.global_micro * GOLDEN_RATIO_64) % (1 << 63) ^ self._layer_seeds[layer]


@contextmanager
def note_function(label: str, micro: MicroStep, function: Any) -> Iterator[None]:
    """Adds a note with `label`, such as "the loss", to an exception in the block, in which the caller calls `function`."""
    try:
        yield
    except Exception as error:
        note_origin(error, f"{label} on microbatch {micro.micro}", function)
        raise


def call_hooks(hooks: Sequence[SchedulerHook], event: str, *arguments: Any) -> None:
    """Calls the method `event` of each scheduler hook with `arguments`. An exception gets a note that names the hook."""
    for hook in hooks:
        try:
            getattr(hook, event)(*arguments)
        except Exception as error:
            note_origin(error, f"`{event}` of the scheduler hook {type(hook).__name__}", hook)
            raise


def _describe_call(layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep) -> str:
    """Returns a text such as `layer `2` (Linear) in microbatch 0, called with float32 [2, 16, 64]`."""

    def shape(value: Any) -> str:
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            return type(value).__name__
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"

    descriptions = [shape(value) for value in args] + [f"{name} {shape(value)}" for name, value in fields.items()]
    name = type(layer.module).__name__
    return f"layer `{layer.name}` ({name}) in microbatch {micro.micro}, called with {', '.join(descriptions) or 'nothing'}"


def compile_layers(layers: Sequence[Layer], config: CompileConfig, policy: ActivationPolicy, undo: ExitStack) -> None:
    """Until `undo` closes, replaces the forwards of `layers`, as `policy` wraps them, with compiled functions. Layers of one
    class and shape share one graph. A module that overrides `compile` chooses which of its submodules are compiled.
    """
    from torch._dynamo import config as compiler_config  # loads the compiler

    load_varlen_kernel()  # imported now: compiled code cannot import it
    options: dict[str, Any] = {"mode": config.mode, "dynamic": config.dynamic, "options": config.options or None}
    compiler_options: dict[str, Any] = {
        # The layers of a class may all differ in shape, and each has a graph for training and one for evaluation. Beyond
        # torch's limit of 8 graphs, they would run uncompiled.
        "recompile_limit": max(compiler_config.recompile_limit, 4 * len(layers)),
        # A forward that changes an attribute, such as a module's counter, does so once, and not again in the backward.
        "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
    }
    undo.enter_context(compiler_config.patch(compiler_options))
    key = "_compiled_call_impl"  # where `nn.Module.compile` stores the call
    for layer in layers:
        if type(layer.module).compile is nn.Module.compile:  # only the forward is compiled, not a communicator's code around it
            forward = policy.compiled_forward(layer.name, layer.module.forward)
            is_wrapped = forward != layer.module.forward  # a graph must not break within a checkpoint
            undo.callback(ForwardPatch(layer.module, torch.compile(forward, fullgraph=is_wrapped, **options)).undo)
            continue
        calls = [(module, vars(module).get(key)) for module in layer.module.modules()]
        layer.module.compile(**options)
        for module, call in calls:
            attributes = vars(module)
            if attributes.get(key) is not call:
                undo.callback(attributes.pop, key) if call is None else undo.callback(attributes.update, {key: call})
                forward = policy.compiled_forward(layer.name, module._call_impl)
                if forward != module._call_impl:
                    attributes[key] = torch.compile(forward, fullgraph=True, **options)


def count_graphs() -> int:
    """Returns the number of graphs that torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters  # loads the compiler

    return int(counters["stats"]["unique_graphs"])


def recompile_reasons() -> dict[str, str]:
    """Returns the guards that failed in recent recompilations, by compile id. Omits guards of the grad mode."""
    from torch._dynamo.utils import get_compilation_metrics

    reasons = ((str(metrics.compile_id), metrics.recompile_reason) for metrics in get_compilation_metrics())
    return {compile_id: reason for compile_id, reason in reasons if reason and "grad_mode" not in reason}
