"""The one function through which every layer is called.

    wait for what the layer needs ──> seed its generators ──> activation policy ──> layer
        `Waits`                        (seed, step, micro, layer)

Recomputation passes through it again, with phase `recompute`: that is how scheduler hooks see it. Nothing necessary may depend
on code that runs after the layer, since recomputation stops as soon as it has what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sley_core.comm.progress import Standing
from sley_core.engine.activations import Keep
from sley_core.engine.parts import Waits
from sley_core.engine.step_state import MicroStep, Phase
from sley_core.errors import PlanError, RunError, note_origin
from sley_core.generators import IN_USE, own_generators, seed_own
from sley_core.model.formats import formats_hint
from sley_core.model.seeds import derive

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.engine.position_probe import PositionProbe
    from sley_core.engine.written import WriteWatch
    from sley_core.model.layers import Layer
    from sley_core.protocols import ActivationPolicy, SchedulerHook

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: its multiples are far apart, also in their low 32 bits, which are all that torch's CPU
generator uses of a seed (Steele et al., Fast Splittable Pseudorandom Number Generators, 2014).
"""


class LayerCaller:
    """Calls layers under the activation policy. Before each call, recomputation included, it waits for what the layer needs
    (`waits`).

    slice_index: which slice of its sequences this rank has; slices of one sample draw different random numbers. standing: is
    told which layer was called last. data_timeout_s: how long a layer waits for a data set that draws from the same generators.
    writes: watches what layers write. probe: asks whether layers mix positions.
    """

    def __init__(
        self,
        device: Device,
        seed: int,
        policy: ActivationPolicy,
        hooks: Sequence[SchedulerHook] = (),
        slice_index: int = 0,
        waits: Waits | None = None,
        standing: Standing | None = None,
        data_timeout_s: float = 600.0,
        writes: WriteWatch | None = None,
        probe: PositionProbe | None = None,
    ) -> None:
        self.writes = writes
        self.probe = probe
        self.data_timeout_s = data_timeout_s
        self.device = device
        self.seed = seed
        self.policy = policy
        self.hooks = hooks
        self.waits = waits or Waits()
        self.standing = standing or Standing()
        self._keeps_all = type(policy) is Keep  # exactly: a subclass may do more
        self._slice = ("slice", slice_index) if slice_index else ()
        self._step = -1
        self._step_seed = 0
        self._layer_seeds: dict[str, int] = {}
        self._own: dict[str, list[Any]] = {}

    def __call__(self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep) -> Any:
        """Returns `layer(*args, **fields)`, called under the activation policy. args: the previous layer's output, or
        () for the first layer.
        """
        calls = self._run if self._keeps_all or micro.phase is Phase.EVALUATE else self._under_policy
        if self.probe is not None and self.probe.wants(layer, micro):
            output = self.probe.call(
                layer,
                args,
                fields,
                lambda args, fields: calls(layer, args, fields, micro),
                lambda args, fields: self._run(layer, args, fields, micro),
            )
        else:
            output = calls(layer, args, fields, micro)
        if (follow := self.standing.follow_output) is not None:
            follow(layer.name, output)
        return output

    def seed_loss(self, micro: MicroStep) -> None:
        """Seeds torch's generators for a loss of whole sequences, alike on all ranks that have slices of them."""
        self.device.seed((derive(self.seed, "loss", micro.step) + micro.global_micro * GOLDEN) % (1 << 63))

    def _under_policy(self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep) -> Any:
        """Calls the layer through the activation policy; a second run of it, the recomputation, is reported to the scheduler
        hooks.
        """
        runs = 0

        def run(*args: Any, **fields: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs > 1:
                if self.writes is not None:
                    self.writes.runs_again(layer)
                self._report_recomputation(layer, args, micro)
            return self._run(layer, args, fields, micro)

        return self.policy.call(layer.name, run, args, fields, micro)

    def _run(self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep) -> Any:
        """Waits for the layer's weights, seeds the generators, and calls it. Recomputation runs this again with the same
        seed.
        """
        self.standing.calls(layer.name)
        self.waits.wait_for(layer.name)
        is_new = layer.name not in self._own
        before = None if self.writes is None or micro.phase is Phase.EVALUATE else self.writes.before(layer, micro)
        self.take_turn(layer.name)
        try:
            self.seed_for(layer, micro)
            output = layer.module(*args, **fields)
        except Exception as error:
            note_origin(error, _words(layer, args, fields, micro), layer.module)
            if hint := formats_hint(error):
                error.add_note(hint)
            raise
        finally:
            IN_USE.release()
        if self.writes is not None:
            self.writes.check(layer, micro, before)
        if is_new:
            self._check_own(layer)
        return output

    def seed_for(self, layer: Layer, micro: MicroStep) -> None:
        """Seeds all generators from which a call of `layer` may draw."""
        seed = self._seed(layer.name, micro)
        self.device.seed(seed)
        if layer.name not in self._own:
            self._own[layer.name] = own_generators(layer.module, layer.name)
        seed_own(self._own[layer.name], seed)

    def take_turn(self, what: str) -> None:
        """Acquires `IN_USE` for `what`, a layer or the loss: waits while a data set that draws from the same generators reads
        a sample. Raises RunError "data-timeout".
        """
        if not IN_USE.acquire(timeout=self.data_timeout_s):
            raise RunError(
                "data-timeout",
                f"`{what}` waited {self.data_timeout_s:g} s for the data set, which draws from the generators "
                "of the forward while it reads a sample",
                hint="let the data set draw from a generator of its own, or raise [limits] data_timeout_s",
            )

    def _check_own(self, layer: Layer) -> None:
        """Raises PlanError "model-random" if the layer's first forward made a generator and kept it: that call drew from a
        state that depends on the layout.
        """
        known = {id(generator) for generator in self._own[layer.name]}
        if any(id(generator) not in known for generator in own_generators(layer.module, layer.name)):
            raise PlanError(
                "model-random",
                f"the forward of the layer {layer.name!r} makes a generator and keeps it: its first numbers would depend on "
                "the layout",
                path=("model",),
                hint="make it when the module is made; each micro-batch seeds it anew",
            )

    def _seed(self, layer: str, micro: MicroStep) -> int:
        """Returns the seed of a layer in a micro-batch. Hashes only once per layer and once per step: a hash takes as long as a
        call.
        """
        if layer not in self._layer_seeds:
            self._layer_seeds[layer] = derive(self.seed, "layer", layer, *self._slice)
        if micro.step != self._step:
            self._step, self._step_seed = micro.step, derive(self.seed, "forward", micro.step)
        return (self._step_seed + micro.global_micro * GOLDEN) % (1 << 63) ^ self._layer_seeds[layer]

    def _report_recomputation(self, layer: Layer, args: tuple[Any, ...], micro: MicroStep) -> None:
        again = replace(micro, phase=Phase.RECOMPUTE, layer=layer.name)
        tell_hooks(self.hooks, "before_forward", again, args[0] if args else None)


def tell_hooks(hooks: Sequence[SchedulerHook], event: str, *arguments: Any) -> None:
    """Calls the method `event` of each scheduler hook. An exception gets a note that says which hook raised it."""
    for hook in hooks:
        try:
            getattr(hook, event)(*arguments)
        except Exception as error:
            note_origin(error, f"`{event}` of the scheduler hook {type(hook).__name__}", hook)
            raise


def _words(layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep) -> str:
    """Returns a text that identifies a call of a layer: `layer `2` (Linear) of micro-batch 0, given float32 [2, 16, 64]`."""
    given = [_shape(value) for value in args] + [f"{name} {_shape(value)}" for name, value in fields.items()]
    kind = type(layer.module).__name__
    return f"layer `{layer.name}` ({kind}) of micro-batch {micro.micro}, given {', '.join(given) or 'nothing'}"


def _shape(value: Any) -> str:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
