"""Declares the records and checks of the plugin `isp`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sley_core.hookspecs import hookimpl
from sley_core.records import Problem, Record, SequenceAttentionRecord, WeightCommunicatorRecord
from sley_isp.check import check_launch, check_loss, check_order
from sley_isp.config import AllToAllConfig, CommunicatorConfig
from sley_isp.sequence.check import check_heads

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


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
            build="sley_isp.sequence.all_to_all:AllToAllAttention",
            summary="Each rank attends with some of the heads over the whole sequence; two exchanges per attention.",
        ),
    ]


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    return {"isp.communicator": {"variants": [{}, {"reduce": "step"}]}, "isp.all_to_all": {"variants": [{}]}}


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields the problems that the checks of this package find."""
    yield from check_heads(plan)
    yield from check_loss(plan)
    yield from check_launch(plan)
    yield from check_order(plan)
