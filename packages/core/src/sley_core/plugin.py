"""The plugin `core`, with core's own records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core.config import (
    CrossEntropyConfig,
    EachConfig,
    GradientNormsConfig,
    JsonlConfig,
    KeepConfig,
    RecomputeConfig,
    check_metrics,
)
from sley_core.hookspecs import hookimpl
from sley_core.optim.config import AdamWConfig, ConstantConfig, CosineConfig, LinearConfig, SGDConfig, WarmupStableDecayConfig
from sley_core.optim.learning_rate import check_learning_rate
from sley_core.records import (
    ActivationPolicyRecord,
    GradientHandlerRecord,
    LossRecord,
    LRScheduleRecord,
    MetricsWriterRecord,
    OptimizerRecord,
    Problem,
    Record,
)

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


@hookimpl
def sley_records() -> list[Record]:
    loss = "sley_core.losses.cross_entropy:CrossEntropy"
    rates, activations = "sley_core.optim.learning_rate", "sley_core.engine.call"
    return [
        LossRecord(name="cross_entropy", config=CrossEntropyConfig, build=loss, split_logits=True),
        OptimizerRecord(name="adamw", config=AdamWConfig, build="sley_core.optim.build:adamw"),
        OptimizerRecord(name="sgd", config=SGDConfig, build="sley_core.optim.build:sgd"),
        LRScheduleRecord(name="constant", config=ConstantConfig, build=f"{rates}:constant"),
        LRScheduleRecord(name="linear", config=LinearConfig, build=f"{rates}:linear"),
        LRScheduleRecord(name="cosine", config=CosineConfig, build=f"{rates}:cosine"),
        LRScheduleRecord(name="warmup_stable_decay", config=WarmupStableDecayConfig, build=f"{rates}:warmup_stable_decay"),
        ActivationPolicyRecord(name="keep", config=KeepConfig, build=f"{activations}:keep"),
        ActivationPolicyRecord(name="recompute", config=RecomputeConfig, build=f"{activations}:recompute"),
        MetricsWriterRecord(name="jsonl", config=JsonlConfig, build="sley_core.metrics.jsonl:JsonlWriter"),
    ]


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    home = "sley_core.engine"
    return [
        GradientHandlerRecord(name="each", config=EachConfig, build=f"{home}.handlers:Each", role="reducer", fixed_order=True),
        GradientHandlerRecord(
            name="gradient_norms",
            config=GradientNormsConfig,
            build=f"{home}.handlers:GradientNorms",
            role="observer",
            accepts_shards=True,
        ),
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[Problem]:
    return [*check_learning_rate(plan), *check_metrics(plan)]
