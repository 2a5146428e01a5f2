"""Times each distinct layer of a plan, one at a time, for the table `[[layers]]` of a machine file.

the plan's own ──> its micro-batches under other policies ──> other sizes, under all policies ──> ...until the time is over
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from sley_core.assemble import DTYPES, draft_model, dtypes
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import check_plan
from sley_core.records import ActivationPolicyRecord
from sley_estimate.bench.layer_bench import LayerBench
from sley_estimate.bench.layer_calls import Handed
from sley_estimate.calibrate.echo import Echo, NotImaginedError, imagined
from sley_estimate.layers.distinct import layer_keys
from sley_estimate.layers.variants import Variant, with_variant
from sley_estimate.search.choices import choices_of
from train_cli.on_meta import meta_micro_batch

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.model.layers import Layer
    from sley_core.plan.plan import Plan
    from sley_core.protocols import SequenceCommunicator
    from sley_estimate.search.choices import Choice

REPETITIONS = 15
"""Of each layer as the plan has it: a machine file is made once, and read often."""

REPETITIONS_OF_OTHERS = 7
"""Of each layer under another policy, or on other micro-batches: there are many."""

STEP = 4
"""From one size of a micro-batch that is timed to the next."""

LATE = "the time was over"


def measure_layers(plan: Plan, device: Device) -> list[dict[str, Any]]:
    """Times the distinct layers of the plan's model, each alone on `device` on a micro-batch of the plan's data; returns a
    `[[layers]]` table for each.

    Layers of one key are timed once. Of a plan that slices sequences they are those of the first slice: their attention sees as
    many positions as in a run, and what it would exchange is not among their seconds. Raises what the plan's data and layers
    raise, and PlanError "calibrate-slice" for an attention that asks what only other ranks can answer.
    """
    timing = LayerTiming(plan, device)
    timing.take(timing.own, REPETITIONS)
    return timing.tables


def measure_variants(plan: Plan, device: Device, until_s: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Times the plan's layers, then those under every policy that a search may try, on micro-batches of a few sizes. Returns
    the `[[layers]]` tables, and for each variant that was left out its words and the reason.

    until_s: when `time.monotonic` passes it no other variant is begun; the plan's own are timed in any case. Raises what the
    plan's own data and layers raise, and PlanError "calibrate-slice" for an attention that asks what only other ranks can
    answer.
    """
    timing = LayerTiming(plan, device)
    timing.take(timing.own, REPETITIONS)
    left_out = []
    for variant in other_variants(plan):
        words = f"`{variant.policy}` on micro-batches of {variant.micro_size}"
        if why := timing.tried(variant, REPETITIONS_OF_OTHERS, until_s):
            left_out.append(f"{words}: {why}")
    return timing.tables, left_out


def other_variants(plan: Plan) -> Iterator[Variant]:
    """Yields the variants of the plan's layers that a search may try beside the plan's own, the most useful first: other
    policies, then other sizes of micro-batches. Policies that the plan's checks refuse, and those that copy to the host, are
    left out.
    """
    policies = [choice for choice in choices_of(plan).policies if _is_allowed(plan, choice)]
    own, sp = plan.batch.micro_size, plan.parallel.sp
    sizes = [own, *other_sizes(own, plan.batch.global_size)]
    variants = (Variant(policy, size, sp) for size in sizes for policy in policies)
    yield from islice(variants, 1, None)


def other_sizes(own: int, most: int) -> list[int]:
    """Returns up to three sizes of micro-batches, none `own` and none above `most`: with the largest power of two that is at
    most `own`, four times that, a quarter of it, and sixteen times it.
    """
    near = 1 << (own.bit_length() - 1)
    found = dict.fromkeys((STEP * near, max(1, near // STEP), STEP**2 * near))
    return [size for size in found if size != own and size <= most]


def _is_allowed(plan: Plan, choice: Choice) -> bool:
    """Returns whether a policy may be timed: the plan's own, or one that computes alone and that its checks do not refuse."""
    own = plan.activations
    if (choice.name, choice.config) == (own.name, own.config):
        return True
    if not isinstance(choice.record, ActivationPolicyRecord) or choice.copies:
        return False
    world = plan.world()
    try:
        known = {(one.code, one.message) for one in check_plan(plan, world)}
        found = check_plan(with_variant(plan, policy=choice), world)
    except SleyError:
        return False
    return all((one.code, one.message) in known for one in found)


class _LateError(Exception):
    """The time is over."""


class LayerTiming:
    """Times layers of `plan` variant by variant, and those that are alike once. tables: what was found.

    own: the variant that the plan is.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        self.plan = plan
        self.device = device
        self.own = Variant(choices_of(plan).policies[0], plan.batch.micro_size, plan.parallel.sp)
        self.tables: list[dict[str, Any]] = []
        self._keys: set[str] = set()
        self._handed: dict[str, Handed] = {}
        self._size = 0
        self._took: dict[str, tuple[float, int]] = {}

    def tried(self, variant: Variant, repetitions: int, until_s: float) -> str | None:
        """Times a variant if that will be done before `time.monotonic` passes `until_s`; returns None, or words that say why
        not all of it was timed. What was timed before that stays in `tables`.
        """
        if time.monotonic() > until_s:
            return LATE
        try:
            self.take(variant, repetitions, until_s)
        except _LateError:
            return LATE
        except (MemoryError, torch.OutOfMemoryError):
            return "its layers do not fit into memory"
        except SleyError as error:
            return error.diagnostics[0].message
        return None

    def take(self, variant: Variant, repetitions: int, until_s: float = inf) -> None:
        """Times those layers of a variant whose keys are not in `tables` yet, and adds them there.

        Raises what the plan's data and layers raise, PlanError "calibrate-slice" for an attention that asks what only other
        ranks can answer, and _LateError where `until_s` would pass.
        """
        plan = with_variant(self.plan, policy=variant.policy, micro_size=variant.micro_size)
        try:
            self._take(plan, variant, repetitions, until_s)
        except NotImaginedError as error:
            assert plan.sequence is not None, variant
            attention = f'the attention of `[sequence] use = "{plan.sequence.name}"`'
            message = f"{attention} {error}, and a slice is timed where there is no other rank"
            hint = (
                "let the attention exchange by `group.transport()`, or by functions of `sley_core.api.comm` that send "
                "before they receive; a machine file without these layers is made by leaving out `--plan`"
            )
            raise PlanError.many([plan.diagnostic("calibrate-slice", message, ("sequence", "use"), hint)]) from error

    def _take(self, plan: Plan, variant: Variant, repetitions: int, until_s: float) -> None:
        """Times the new layers of `plan`, which is the plan under `variant`, in the order of the model: each gets what the one
        before it hands on. Raises as `take`, but NotImaginedError for an attention that needs other ranks.
        """
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        model = draft_model(plan, dataset.info)
        policy = plan.activations.build([layer.name for layer in model.layers])
        keys = layer_keys(plan, model, policy, meta_micro_batch(plan, dataset))
        if self._keys >= set(keys):
            return
        if variant.micro_size != self._size:  # what others are given has another shape
            self._size, self._handed = variant.micro_size, {}
        echo = Echo(plan.parallel.sp, self.device)
        attention: SequenceCommunicator | None = None
        if plan.sequence is not None and plan.parallel.sp > 1:
            attention = plan.sequence.build(imagined("sp", echo, plan.parallel.sp))
        value: Handed | None = None
        with self.device.random_state_kept():
            gradients = DTYPES[plan.precision.gradients]
            working = dtypes(plan)[0]
            bench = LayerBench(plan, self.device, model, dataset, working, gradients, repetitions, echo.spans, attention)
            for layer, key in zip(model.layers, keys, strict=True):
                if key not in self._handed:
                    self._time(bench, layer, key, value, variant, until_s)
                value = self._handed[key]

    def _time(self, bench: LayerBench, layer: Layer, key: str, value: Handed | None, variant: Variant, until_s: float) -> None:
        """Times one layer, keeps what it hands on under its key, and adds a table if the key is new. value: what the layer
        before handed on; None for the first.

        Raises _LateError where `until_s` would pass, if each repetition takes as long per sample as it did for this layer
        before.
        """
        one_s, size = self._took.get(layer.name, (0.0, variant.micro_size))
        began_s = time.monotonic()
        if began_s + one_s * max(1.0, variant.micro_size / size) * bench.repetitions > until_s:
            raise _LateError
        times, self._handed[key] = bench.time(layer, value, split=True)
        self._took[layer.name] = (time.monotonic() - began_s) / bench.repetitions, variant.micro_size
        if key not in self._keys:
            self._keys.add(key)
            output_bytes = sum(leaf.num_bytes for leaf in self._handed[key][0].leaves)
            how = {"activations": str(variant.policy), "micro_size": variant.micro_size, "sp": variant.sp}
            seconds = {name: value for name, value in asdict(times).items() if value or not name.startswith("host_")}
            self.tables.append({"key": key, "name": layer.name, "output_bytes": output_bytes, **seconds, **how})
