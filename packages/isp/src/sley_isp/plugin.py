"""Declares the records of the plugin `isp`, and checks their options in a plan. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

from sley_core.hookspecs import hookimpl
from sley_core.records import LossRecord, Problem, Record, SequenceAttentionRecord, WeightCommunicatorRecord
from sley_isp.config import FP8_BYTES, FP8_TOLERANCE, AllToAllConfig, CommunicatorConfig

if TYPE_CHECKING:
    from sley_core.api.plan import Plan

CANONICAL = {
    "reduce": ("micro_batch", "sums microbatches before it sums ranks"),
    "head": ("gather", "sums over slices of the vocabulary, whose matrix products have different shapes"),
    "embedding": ("gather", "sums the tokens of all ranks at once"),
    "gather_precision": ("full", "rounds the weights in blocks that depend on the layout"),
}
"""The value that canonical sums need for each option, and the reason why they exclude the other value."""


@hookimpl
def sley_records() -> list[Record]:
    return [
        WeightCommunicatorRecord(
            name="communicator",
            config=CommunicatorConfig,
            build="sley_isp.communicator:Communicator",
            fixed_order=True,
            tolerance=lambda config: (
                FP8_TOLERANCE if any(table.gather_precision == "fp8" for table in (config, *config.groups)) else 0.0
            ),
            gather_bytes=lambda config, itemsize: FP8_BYTES if config.gather_precision == "fp8" else itemsize,
        ),
        SequenceAttentionRecord(name="all_to_all", config=AllToAllConfig, build="sley_isp.attention:AllToAllAttention"),
    ]


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    return {"isp.communicator": {"variants": [{}, {"reduce": "step"}]}, "isp.all_to_all": {"variants": [{}]}}


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields the problems of this plugin's tables. Module names and shapes are checked when the model is built."""
    if plan.sequence is not None and isinstance(plan.sequence.config, AllToAllConfig):
        yield from _check_heads(plan)
    if plan.weights is None or not isinstance(plan.weights.config, CommunicatorConfig):
        return
    config, loss = plan.weights.config, plan.loss.record
    if config.head == "vocabulary" and not (isinstance(loss, LossRecord) and loss.split_logits):
        message = (
            f'the loss `{plan.loss.name}` needs all logits of a token, but with `head = "vocabulary"` each rank has only some'
        )
        yield Problem(("weights", "head"), message, 'set `head = "gather"`, or use `core.cross_entropy`', "head-loss")
    if plan.model.config.compile and plan.parallel.wp > 1:
        for key in ("head", "embedding"):
            if (value := getattr(config, key)) != "gather":
                message = f'compiled layers gather their weights before each call, so `{key} = "{value}"` is not possible'
                yield Problem(("weights", key), message, "remove it, or remove `[model] compile`", "weights-compiled")
    if plan.parallel.reduction != "canonical" or plan.parallel.wp == 1:
        return
    tables: list[tuple[tuple[str | int, ...], Any]] = [((), config)]
    tables += [(("groups", index), group) for index, group in enumerate(config.groups)]
    for (path, table), (key, (canonical_value, reason)) in product(tables, CANONICAL.items()):
        if (value := getattr(table, key, None)) not in (canonical_value, None):
            message = f'`{key} = "{value}"` {reason}, so `reduction = "canonical"` is not possible'
            hint = f'set {key} = "{canonical_value}", or `[parallel] reduction = "fast"`'
            yield Problem(("weights", *path, key), message, hint, "canonical-unsupported")


def _check_heads(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if `sp` does not divide the number of heads. In a custom model, the first attention checks it."""
    sp, heads = plan.parallel.sp, getattr(plan.model.config, "heads", None)
    if isinstance(heads, int) and heads % sp:
        divisors = [str(divisor) for divisor in range(1, min(heads, sp) + 1) if heads % divisor == 0]
        message = f"the number of heads must be a multiple of sp = {sp}, but is {heads}"
        yield Problem(("parallel", "sp"), message, f"set `sp` = {' or '.join(divisors)}", "sequence-heads")
