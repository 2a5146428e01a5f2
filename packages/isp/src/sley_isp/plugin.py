"""Declares the records of the plugin `isp`, and checks their options in a plan; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sley_core.hookspecs import hookimpl
from sley_core.records import LossRecord, Problem, Record, SequenceAttentionRecord, WeightCommunicatorRecord
from sley_isp.config import ANYWHERE, AllToAllConfig, CommunicatorConfig

if TYPE_CHECKING:
    from sley_core.api.plan import Plan

CANONICAL = {
    "reduce": ("micro_batch", "sums micro-batches before ranks"),
    "head": ("gather", "sums over slices of the vocabulary, whose products have other shapes"),
    "embedding": ("gather", "sums the tokens of all ranks at once"),
}
"""By option: the value whose sums can be canonical, and why no other one can."""


@hookimpl
def sley_records() -> list[Record]:
    return [
        WeightCommunicatorRecord(
            name="communicator",
            config=CommunicatorConfig,
            build="sley_isp.communicator:Communicator",
            fixed_order=True,
            summary="Linears and embeddings, sharded; gathered ahead, gradients reduced during the backward.",
        ),
        SequenceAttentionRecord(
            name="all_to_all",
            config=AllToAllConfig,
            build="sley_isp.attention:AllToAllAttention",
            summary="Each rank attends with some of the heads over the whole sequence; two exchanges per attention.",
        ),
    ]


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    return {"isp.communicator": {"variants": [{}, {"reduce": "step"}]}, "isp.all_to_all": {"variants": [{}]}}


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields the problems of this plugin's tables. Names of modules and shapes are checked when the model is built."""
    if plan.sequence is not None and isinstance(plan.sequence.config, AllToAllConfig):
        yield from _check_heads(plan)
    if plan.weights is None or not isinstance(plan.weights.config, CommunicatorConfig):
        return
    config, loss = plan.weights.config, plan.loss.record
    if config.head == "vocabulary" and not (isinstance(loss, LossRecord) and loss.split_logits):
        message = f"the loss `{plan.loss.name}` takes all logits of a token, and with `vocabulary` no rank has them"
        yield Problem(("weights", "head"), message, 'use `head = "gather"`, or `core.cross_entropy`', "head-loss")
    if config.unit == "module" and config.launch != ANYWHERE:
        message = f'`launch = "{config.launch}"` says where in a layer gathers start; with `unit = "module"` each module does'
        yield Problem(("weights", "launch"), message, 'leave it out, or use `unit = "layer"`', "launch-unit")
    for key, (only, reason) in CANONICAL.items() if plan.parallel.reduction == "canonical" and plan.parallel.wp > 1 else ():
        value = getattr(config, key)
        if value != only:
            message = f'`{key} = "{value}"` {reason}, and sums of the plan are canonical'
            hint = f'use {key} = "{only}", or `[parallel] reduction = "fast"`'
            yield Problem(("weights", key), message, hint, "canonical-unsupported")


def _check_heads(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if the heads cannot be divided evenly over `sp`. Custom models are checked at their first attention."""
    size, heads = plan.parallel.sp, getattr(plan.model.config, "heads", None)
    if isinstance(heads, int) and heads % size:
        fitting = [str(number) for number in range(1, min(heads, size) + 1) if heads % number == 0]
        message = f"heads = sp x heads per rank fails: {heads} is no multiple of {size}"
        yield Problem(("parallel", "sp"), message, f"with {heads} heads `sp` can be {', '.join(fitting)}", "sequence-heads")
