"""Core's own tables of a plan, such as [run], [batch] and [parallel]. `kinds` lists the tables that name records."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from sley_core.table import Array, FactoryPath, PlanFolder, Table, ValueDescription

FORMAT = 1
"""The number of the plan format that this version of core reads."""

SOURCE_FOLDER = "The folder in which relative paths start and factories are searched; by default the folder of the plan."
"""The description of the `source_folder` key, which the resolved plan of a run has."""

ComputeDType = Literal["fp32", "bf16", "fp16", "fp64"]
GradientDType = Literal["fp32", "bf16", "fp64"]
AttentionKernel = Literal["auto", "cudnn", "flash", "efficient", "math"]

RunName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"),
    ValueDescription("a name of up to 100 letters, digits, `.`, `_` and `-`"),
]
Seed = Annotated[int, Field(ge=0, lt=2**63), ValueDescription("an integer of at least 0")]


class RunTable(Table):
    """The name, length, device and output of a run."""

    name: RunName
    """The name of the run and of its folder."""

    steps: PositiveInt
    """The number of optimizer steps."""

    seed: Seed = 0
    """The seed of the initial weights, the order of the data and the random numbers of every forward, in any layout."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The type of device. `"auto"` uses CUDA if there is a CUDA device, and otherwise the CPU."""

    folder: PlanFolder = "runs"
    """The parent folder of the run folder; a relative path starts in the current directory."""

    peak_tflops: PositiveFloat | None = None
    """The peak speed of a device in `precision.compute`, in 10^12 dense FLOP/s, from which the metric `mfu` is computed. For
    known GPUs, the default is the datasheet's value; for other devices, there is no `mfu` by default.
    """

    log_every: PositiveInt = 10
    """The number of steps between two lines of progress. Only used if no progress bar can be drawn."""

    on_nan: Literal["stop", "skip"] = "stop"
    """What happens in a step whose loss or gradient norm is not finite: "stop" ends the run; "skip" skips the step, so that
    weights and states do not change.
    """

    stop_signals: Array[Literal["SIGUSR1", "SIGUSR2", "SIGXCPU"]] = ("SIGUSR1", "SIGUSR2", "SIGXCPU")
    """The signals by which a batch system warns the run. At such a signal, the run finishes its step, saves a checkpoint and
    ends. Unlike SIGTERM, these signals set no time limit. A signal that is not in the list keeps the effect that it has on any
    process.
    """

    max_skips: PositiveInt = 10
    """The number of consecutive steps that may be skipped before the run ends. Only used if `on_nan` is "skip"."""

    final_weights: Literal["working", "full", "none"] = "working"
    """The weights that the run writes into `weights/` at its end: "working" weights in the dtype `precision.compute`, "full"
    precision weights, or "none".
    """

    keep_freed_memory: bool = True
    """Whether the process keeps freed host memory for the next step, and does not return it to the system (only with glibc)."""


class BatchTable(Table):
    """The number of samples per step. In each step, a rank runs `global_size / (dp x micro_size)` microbatches."""

    global_size: PositiveInt
    """The number of samples per optimizer step, over all ranks."""

    micro_size: PositiveInt
    """The number of samples per forward on one rank."""


class LossScaleTable(Table):
    """The dynamic loss scale of fp16, with the keys and rules of torch.amp.GradScaler."""

    init_scale: PositiveFloat = 65536.0
    """The scale of the loss in the first step."""

    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    """The factor by which the scale grows after `growth_interval` consecutive steps without overflow."""

    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The factor by which the scale shrinks after a step with an overflow, which is skipped."""

    growth_interval: PositiveInt = 2000
    """The number of consecutive steps without overflow after which the scale grows."""

    min_scale: PositiveFloat = 1.0
    """The smallest scale. An overflow at this scale ends the run."""


class PrecisionTable(Table):
    """The dtypes of a run."""

    compute: ComputeDType = "fp32"
    """The dtype of weights and activations in forward and backward."""

    gradients: GradientDType = Field(default_factory=lambda values: "fp64" if values.get("compute") == "fp64" else "fp32")
    """The dtype in which gradients are accumulated and reduced; by default fp64 if `compute` is fp64, else fp32. `"bf16"` is
    allowed only if `compute` is bf16. It halves the memory and traffic of gradients, but rounds each sum to 8 bits; the update
    makes fp32 copies of the gradients that it uses.
    """

    accumulation: Literal["auto", "autograd", "direct"] = "auto"
    """How the weight gradients of linears are accumulated: "autograd" computes each gradient and then adds it; "direct" lets
    the matrix product add to the sum. "auto" chooses.
    """

    keep: Array[str] = ()
    """Patterns that match the names of parameters that stay in fp32 if `compute` is narrower, such as `"*.router.*"`. Buffers
    keep the dtype in which the model created them, except that fp32 buffers become fp64 if `compute` is fp64.
    """

    loss_scale: LossScaleTable | None = Field(
        default_factory=lambda values: LossScaleTable() if values.get("compute") == "fp16" else None
    )
    """The loss scale; allowed only if `compute` is fp16."""


class ParallelTable(Table):
    """The number of ranks per axis. A run has `pp x dp x sp` ranks; `wdp = dp x sp / wp` of a stage hold the same shard."""

    dp: PositiveInt | Literal["auto"] = "auto"
    """The number of ranks that split the samples. `"auto"` derives it from the number of ranks that the run is started with."""

    pp: PositiveInt = 1
    """The number of pipeline stages."""

    sp: PositiveInt = 1
    """The number of ranks that split each sequence."""

    wp: PositiveInt = 1
    """The number of ranks that shard each weight."""

    reduction: Literal["fast", "canonical"] = "fast"
    """The order in which gradients are summed. The order of "fast" depends on the layout. "canonical" sums all microbatches in
    one fixed tree, so that results have the same bits in every layout with the same `micro_size`; it needs more memory and
    time.
    """

    cross_memory_attach: bool = True
    """Whether CPU ranks on one host read each other's weights, gradients and slices of sequences directly, if the system allows
    it. If false, they use gloo's sockets.
    """


class FactoryTable(Table):
    """The keys of a table that names your own code."""

    factory: FactoryPath
    """The function or class, as `"package.module:name"`. Modules may also be in the folder of the plan."""

    options: dict[str, Any] = Field(default_factory=dict)
    """The keyword arguments with which the function or class is called."""


class MetricFactory(FactoryTable):
    """Your own metric: a function that returns a function `(output, batch) -> {name: (sum, count)}`. An evaluation calls the
    inner function for each microbatch; the metric is the total sum divided by the total count.
    """

    sequence: Literal["whole", "slices"] = "whole"
    """The input of the metric if ranks split each sequence (`parallel.sp`). "whole" passes whole sequences, which every rank
    gathers at a cost in memory. "slices" passes this rank's slice, for a metric that is a sum over positions.
    """


def metric_row_key(metric: str, set_name: str = "") -> str:
    """Returns the key of `metric` ("loss") in a metrics row. set_name: an evaluation set, or "" for the held-out split."""
    if set_name:
        return f"held_out/{set_name}/{metric}"
    return "held_out_loss" if metric == "loss" else f"held_out/{metric}"


def parse_metric(row_key: str) -> str:
    """Returns the metric (such as "loss") of a key in a metrics row. Inverse of `metric_row_key`."""
    return "loss" if row_key == metric_row_key("loss") else row_key.rpartition("/")[2]


BEST_MODES: dict[str, Literal["min", "max"]] = {"loss": "min", "perplexity": "min", "accuracy": "max"}
"""For each of core's own metrics, whether the smallest or the largest value is the best."""


class KeepBestTable(Table):
    """The metric that selects the best checkpoint."""

    metric: str
    """The key in a metrics row: `"held_out_loss"`, `"held_out/accuracy"`, or `"held_out/NAME/loss"` for the set NAME."""

    mode: Literal["min", "max"] | None = None
    """Whether the smallest or the largest value is the best. By default "max" for an accuracy and "min" for a loss or
    perplexity; required for your own metric.
    """

    @model_validator(mode="after")
    def _check_mode(self) -> "KeepBestTable":
        if self.mode is None and parse_metric(self.metric) not in BEST_MODES:
            raise ValueError(f'set `mode` to "min" or "max", for the smallest or largest `{self.metric}`')
        return self

    @property
    def is_max(self) -> bool:
        """Whether the largest value of the metric is the best."""
        return (self.mode or BEST_MODES[parse_metric(self.metric)]) == "max"


class EvaluationSetTable(Table):
    """The keys that `[evaluation.sets.NAME]` has in addition to the keys of its data."""

    split: Literal["all", "held_out"] = "all"
    """The samples to evaluate: "all", or only the "held_out" samples that a run on the same data would not train on."""

    steps: PositiveInt | None = None
    """The largest number of batches of `global_size` samples; by default all samples are evaluated. Required for a stream."""


class EvaluationTable(Table):
    """Evaluates the model on held-out data during the run and at its end: measures the loss, and for tokens also the perplexity
    and accuracy. By default, there are no evaluations.
    """

    every: PositiveInt
    """The number of optimizer steps between two evaluations."""

    steps: PositiveInt = 10
    """The number of batches of `global_size` samples in an evaluation of the held-out split of `[data]`."""

    held_out: bool = True
    """Whether the held-out split of `[data]` is evaluated; false evaluates only the `sets`."""

    sets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Additional evaluation data, each with a name of your choice. Each `[evaluation.sets.NAME]` has the keys of `[data]`, and
    also `split` ("all", the default, or "held_out") and `steps`, the largest number of batches. Without `steps`, all samples
    are evaluated.
    """

    metric: MetricFactory | None = None
    """Your own metric, for the held-out split and every set."""

    keep_best: str | KeepBestTable | None = None
    """The key of a metric in the metrics rows, such as `"held_out_loss"`. The run keeps the checkpoint with its best
    value in addition to the checkpoints of `[checkpoint]`. The best loss is the smallest, and the best accuracy is the
    largest. For other metrics, use `{ metric = "...", mode = "max" }`.
    """

    patience: PositiveInt | None = None
    """The run ends after this number of evaluations in a row without an improvement of `keep_best`. Default: no limit."""

    @model_validator(mode="after")
    def _check_keys(self) -> "EvaluationTable":
        if not self.held_out and not self.sets:
            raise ValueError("with `held_out = false` and no `sets` there is no data to evaluate")
        if self.patience is not None and self.keep_best is None:
            raise ValueError('`patience` needs `keep_best`; set, for example, keep_best = "held_out_loss"')
        if isinstance(self.keep_best, str) and parse_metric(self.keep_best) not in BEST_MODES:
            raise ValueError(f'write keep_best = {{ metric = "{self.keep_best}", mode = "max" }}, or "min"')
        return self

    @property
    def best(self) -> KeepBestTable | None:
        """The value of `keep_best` as a table; None if it is not set."""
        return KeepBestTable(metric=self.keep_best) if isinstance(self.keep_best, str) else self.keep_best


class ProfileTable(Table):
    """Records a Chrome trace of all actions in `steps` on each rank. Without this table, nothing is recorded."""

    steps: Annotated[Array[PositiveInt], Field(min_length=2, max_length=2)]
    """The first and the last step to record, counted from 1 as in `metrics.jsonl`."""


Seconds = Annotated[float, Field(gt=0, le=1e8)]
"""A time limit in seconds. The maximum is about three years, because torch cannot represent much longer limits."""


class LimitsTable(Table):
    """The time limits after which a run reports a hang."""

    start_timeout_s: Seconds = 120.0
    """The time in seconds within which all ranks must connect."""

    collective_timeout_s: Seconds = 600.0
    """The maximum time in seconds of each exchange between ranks."""

    data_timeout_s: Seconds = 600.0
    """The time in seconds within which the dataset must return a batch."""


class CompileConfig(Table):
    """The arguments of torch.compile."""

    mode: str | None = None
    """A mode such as `"reduce-overhead"` or `"max-autotune"`."""

    dynamic: bool | None = None
    """Whether one graph is compiled for all shapes; by default, torch decides when it sees a second shape."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the compiler, which must not be combined with a mode."""


class ModelConfig(Table):
    """The base class of every model record's config."""

    compile: bool | CompileConfig = False
    """Whether to compile the layers with torch.compile, or a table of its arguments: `mode`, `dynamic` and `options`."""

    attention: AttentionKernel = "auto"
    """The kernel of torch's `scaled_dot_product_attention`. `"auto"` lets torch choose, for each call, the fastest kernel that
    supports the call. Any other kernel is used for every call; if it does not support a call, the run ends with an error.
    """

    def without_weights(self) -> Self:
        """Returns the table of the same model with random instead of loaded initial weights."""
        return self.model_copy(update={"weights": None}) if "weights" in type(self).model_fields else self


class SequenceConfig(Table):
    """The base class of the config of every sequence-attention record."""

    positions: bool = True
    """Whether the model uses positions. If true, the run requires that the model reads the `positions` field."""


class CheckpointConfig(Table):
    """The base class of every checkpointer record's config."""

    folder: PlanFolder | None = None
    """The path or fsspec URL of the run's own checkpoint folder; by default `checkpoints` in the run's folder."""

    on_interrupt: bool = True
    """Whether a run that is asked to stop saves a checkpoint first."""


TABLES: dict[str, type[Table]] = {
    "run": RunTable,
    "batch": BatchTable,
    "precision": PrecisionTable,
    "parallel": ParallelTable,
    "limits": LimitsTable,
}
"""The tables of core that every resolved plan has, in this order."""

OPTIONAL_TABLES: dict[str, type[Table]] = {"evaluation": EvaluationTable, "profile": ProfileTable}
"""The tables of core that a plan may lack."""
