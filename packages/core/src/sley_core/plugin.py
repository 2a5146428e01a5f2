"""The plugin `core`, with core's own records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core import config, records
from sley_core.hookspecs import hookimpl
from sley_core.optim.config import AdamWConfig, ConstantConfig, CosineConfig, LinearConfig, SGDConfig, WarmupStableDecayConfig
from sley_core.optim.learning_rate import check_learning_rate

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


@hookimpl
def sley_records() -> list[records.Record]:
    loss = "sley_core.losses.cross_entropy:CrossEntropy"
    rates, activations = "sley_core.optim.learning_rate", "sley_core.engine.call"
    return [
        records.LossRecord(name="cross_entropy", config=config.CrossEntropyConfig, build=loss, split_logits=True),
        records.OptimizerRecord(name="adamw", config=AdamWConfig, build="sley_core.optim.build:adamw"),
        records.OptimizerRecord(name="sgd", config=SGDConfig, build="sley_core.optim.build:sgd"),
        records.LRScheduleRecord(name="constant", config=ConstantConfig, build=f"{rates}:constant"),
        records.LRScheduleRecord(name="linear", config=LinearConfig, build=f"{rates}:decay"),
        records.LRScheduleRecord(name="cosine", config=CosineConfig, build=f"{rates}:decay"),
        records.LRScheduleRecord(
            name="warmup_stable_decay", config=WarmupStableDecayConfig, build=f"{rates}:warmup_stable_decay"
        ),
        records.ActivationPolicyRecord(name="keep", config=config.KeepConfig, build=f"{activations}:build_keep"),
        records.ActivationPolicyRecord(name="recompute", config=config.RecomputeConfig, build=f"{activations}:build_recompute"),
        records.MetricsWriterRecord(name="jsonl", config=config.JsonlConfig, build="sley_core.metrics.jsonl:JsonlWriter"),
    ]


@hookimpl
def sley_gradient_handlers() -> list[records.GradientHandlerRecord]:
    home = "sley_core.engine"
    return [
        records.GradientHandlerRecord(
            name="each", config=config.EachConfig, build=f"{home}.handlers:Each", role="reducer", fixed_order=True
        ),
        records.GradientHandlerRecord(
            name="gradient_norms",
            config=config.GradientNormsConfig,
            build=f"{home}.handlers:GradientNorms",
            role="observer",
            accepts_shards=True,
        ),
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[records.Problem]:
    return [*check_learning_rate(plan), *config.check_chunks(plan), *config.check_metrics(plan)]
