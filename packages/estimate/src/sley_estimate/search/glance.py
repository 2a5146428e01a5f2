"""Says what a search can price at a glance: what records say of themselves. All else is refused by name, and never guessed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from sley_core.errors import PlanError
from sley_core.records import (
    ActivationPolicyRecord,
    GradientHandlerRecord,
    OffloadManagerRecord,
    SequenceAttentionRecord,
    WeightCommunicatorRecord,
)

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_estimate.search.choices import Choice
    from sley_estimate.search.layouts import Shape

CODE = "not-at-a-glance"


def check_plan_at_a_glance(plan: Plan) -> None:
    """Raises PlanError "not-at-a-glance" for a plan with canonical sums: they are in all of its layouts, and a search cannot
    price them.
    """
    if plan.parallel.reduction == "canonical":
        message = "a search has no quick price for canonical sums"
        hint = 'search with `--set parallel.reduction="fast"`, then ask `train-cli estimate --machine` of what is found'
        raise PlanError.many([plan.diagnostic(CODE, message, ("parallel", "reduction"), hint)])


def check_shape(shape: Shape) -> None:
    """Raises PlanError "not-at-a-glance" for a shape whose activation policy, offload, attention or weight communicator does
    not say what it does, so that its seconds cannot be told.
    """
    policy, attention, offload = shape.activations.record, shape.attention, shape.offload
    if not isinstance(policy, ActivationPolicyRecord):
        raise refused(f"what `{shape.activations.name}` keeps and does again")
    if offload and not (isinstance(offload.record, OffloadManagerRecord) and _tells(offload.record, offload.config)):
        raise refused(f"copies of `{offload.name}`")
    if attention and not (isinstance(attention.record, SequenceAttentionRecord) and attention.record.swaps):
        raise refused(f"exchanges of `{attention.name}`")
    if shape.weights and reduces(shape.weights) is None:
        raise refused(f"gathers of `{shape.weights}`")


def check_reducer(reducer: Choice | None) -> None:
    """Raises PlanError "not-at-a-glance" for a reducer that does not say that its sums are plain."""
    if reducer is None:
        return
    record = reducer.record
    if not isinstance(record, GradientHandlerRecord) or not record.plain_sums(reducer.config):
        raise refused(f"sums of `{reducer}`")


def leaves_shards(reducer: Choice | None) -> bool:
    """Returns whether this reducer leaves each rank a part of the gradients' sums, so that it steps that part of the weights
    alone.
    """
    record = reducer.record if reducer else None
    return isinstance(record, GradientHandlerRecord) and record.result == "shard"


def reduces(weights: Choice | None) -> Literal["micro_batch", "step"] | None:
    """Returns how often a weight communicator reduces gradients: for each micro-batch, or once a step. None if its record does
    not tell, or there is none.
    """
    record = weights.record if weights else None
    return record.reduces(weights.config) if weights and isinstance(record, WeightCommunicatorRecord) else None


def _tells(record: OffloadManagerRecord, config: Any) -> bool:
    """Returns whether a manager's record says what it does in a step: it steps on the host, or says whether it swaps states."""
    return record.steps_on_host or record.swaps(config) is not None


def refused(what: str) -> PlanError:
    """Returns the error "not-at-a-glance" of a layout with `what`, which cannot be priced."""
    return PlanError(CODE, f"a search has no quick price for {what}")
