"""The plugin `core`: core's own records, their tables (except for optimizers and learning rates), and the checks of these
tables. Imports no torch.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from sley_core import records
from sley_core.hookspecs import hookimpl
from sley_core.optim.config import AdamWConfig, ConstantConfig, CosineConfig, LinearConfig, SGDConfig, WarmupStableDecayConfig
from sley_core.optim.learning_rate import check_learning_rate
from sley_core.plan.plan import Plan
from sley_core.table import Fraction, Table


class EachConfig(Table):
    """`core.each`: one all-reduce per parameter. It is the default, and the reference in tests of other reducers."""


class GradientNormsConfig(Table):
    """`core.gradient_norms`: adds the norm of each parameter's gradient to every metrics row, as `gradient_norm/NAME`."""


class KeepConfig(Table):
    """`core.keep`: every layer saves the tensors that its backward needs."""


class RecomputeConfig(Table):
    """`core.recompute`: each layer saves only its inputs, and the backward recomputes it."""

    fraction: Fraction = 1.0
    """The fraction of the blocks (all layers except the first and the last) that are recomputed, starting with the first block.
    The number of recomputed blocks is rounded to the nearest integer, halves up.
    """


class CrossEntropyConfig(Table):
    """Cross-entropy over the last dim of the model's output, summed over all labels that are not ignored."""

    labels: str = "labels"
    """The batch field with the class of every position. For next-token prediction, the dataset must shift the labels."""

    copying: bool = False
    """Whether all labels of a batch may equal the tokens at the same positions. If false, the run rejects a first batch of this
    kind, because its labels were not shifted.
    """

    ignore_index: int = -100
    """The label of positions without a target. This label and negative labels count neither in the loss nor in its weight."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The fraction of the target probability that is spread evenly over all classes."""

    chunk_tokens: PositiveInt | Literal["auto"] | None = None
    """The number of tokens whose logits are in memory at the same time. The last layer's linear and the loss are computed chunk
    by chunk. "auto" limits the logits of a chunk to 128 MiB. By default, all logits are computed at once.
    """


def check_chunks(plan: Plan) -> Iterable[records.Problem]:
    """Yields a problem if `[loss] chunk_tokens` is set, but the loss needs all logits at the same time."""
    config, record = plan.loss.config, plan.loss.record
    if not isinstance(config, CrossEntropyConfig) or config.chunk_tokens is None:
        return
    if not (isinstance(record, records.LossRecord) and record.split_logits):
        message = f"the loss `{plan.loss.name}` needs all logits at the same time"
        yield records.Problem(
            ("loss", "chunk_tokens"), message, "remove `chunk_tokens`, or use `core.cross_entropy`", "head-loss"
        )


class JsonlConfig(Table):
    """Writes one JSON object per optimizer step into `metrics.jsonl` in the run's folder."""


def check_metrics(plan: Plan) -> Iterable[records.Problem]:
    """Yields a problem for each `core.jsonl` in the list after the first."""
    indices = [index for index, writer in enumerate(plan.metrics) if isinstance(writer.config, JsonlConfig)]
    for index in indices[1:]:
        name = plan.metrics[index].name
        yield records.Problem(("metrics", index), f"`{name}` is listed twice", "remove one of them", "metrics-twice")


@hookimpl
def sley_records() -> list[records.Record]:
    rates, activations, handlers = "sley_core.optim.learning_rate", "sley_core.engine.call", "sley_core.engine.gradients"
    cross_entropy = "sley_core.losses.cross_entropy:CrossEntropy"
    return [
        records.LossRecord(name="cross_entropy", config=CrossEntropyConfig, build=cross_entropy, split_logits=True),
        records.OptimizerRecord(name="adamw", config=AdamWConfig, build="sley_core.optim.optimizers:build_adamw"),
        records.OptimizerRecord(name="sgd", config=SGDConfig, build="sley_core.optim.optimizers:build_sgd"),
        records.LRScheduleRecord(name="constant", config=ConstantConfig, build=f"{rates}:constant_factor"),
        records.LRScheduleRecord(name="linear", config=LinearConfig, build=f"{rates}:decay_factor"),
        records.LRScheduleRecord(name="cosine", config=CosineConfig, build=f"{rates}:decay_factor"),
        records.LRScheduleRecord(
            name="warmup_stable_decay", config=WarmupStableDecayConfig, build=f"{rates}:warmup_stable_decay_factor"
        ),
        records.ActivationPolicyRecord(name="keep", config=KeepConfig, build=f"{activations}:build_keep"),
        records.ActivationPolicyRecord(name="recompute", config=RecomputeConfig, build=f"{activations}:build_recompute"),
        records.MetricsWriterRecord(name="jsonl", config=JsonlConfig, build="sley_core.run_folder:JsonlWriter"),
        records.GradientHandlerRecord(
            name="each", config=EachConfig, build=f"{handlers}:Each", role="reducer", fixed_order=True
        ),
        records.GradientHandlerRecord(
            name="gradient_norms",
            config=GradientNormsConfig,
            build=f"{handlers}:GradientNorms",
            role="observer",
            accepts_shards=True,
        ),
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[records.Problem]:
    return [*check_learning_rate(plan), *check_chunks(plan), *check_metrics(plan)]
