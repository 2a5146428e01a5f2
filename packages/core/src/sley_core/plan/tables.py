"""Core's own tables of a plan: what a run does, how large its batches are, and how it is laid out.

The tables of models, data, losses and so on belong to the records that they name; `kinds` lists them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from sley_core.table import Array, FactoryPath, PlanFolder, Positive, PositiveFloat, Table, Words

FORMAT = 1
"""The format of plans that this core reads."""

EXTENDS = "A base plan, of which this plan holds only the differences; a relative path is relative to this file."
SOURCE_FOLDER = "Where relative paths start and factories are looked for; left out, the folder of the plan."
"""What the key of this name means; the resolved plan of a run, which lies elsewhere, has it."""

ComputeType = Literal["fp32", "bf16", "fp16", "fp64"]
GradientType = Literal["fp32", "bf16", "fp64"]

RunName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"), Words("a name of up to 100 letters, digits, `.`, `_` and `-`")
]
Seed = Annotated[int, Field(ge=0, lt=2**63), Words("an integer of at least 0")]


MAX_SKIPS = 10
"""The default number of steps in a row that may be skipped."""


def _max_skips(chosen: dict[str, Any]) -> int | None:
    return MAX_SKIPS if chosen.get("on_nan") == "skip" else None


class RunTable(Table):
    """What is run, for how long, and where its results go."""

    name: RunName
    """The run's name and that of its folder."""

    steps: Positive
    """Optimizer steps to take."""

    seed: Seed = 0
    """Fixes the initial weights, the order of the data and the random numbers of every forward, in any layout."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; `"auto"` takes CUDA where there is a device."""

    folder: PlanFolder = "runs"
    """The folder of run folders; a relative path starts in the current directory."""

    peak_tflops: PositiveFloat | None = None
    """What one device can do in `precision.compute`, in 10^12 dense FLOP/s, of which `mfu` is a share; left out, what the
    datasheet of a known GPU says, and no `mfu` of other devices.
    """

    log_every: Positive = 10
    """Steps between two lines of progress if no progress bar can be drawn."""

    on_nan: Literal["stop", "skip"] = "stop"
    """Whether a step whose loss or gradient norm is not finite ends the run, or is skipped: no weight and no state changes."""

    stop_signals: Array[Literal["SIGUSR1", "SIGUSR2", "SIGXCPU"]] = ("SIGUSR1", "SIGUSR2", "SIGXCPU")
    """Warnings of a batch system at which a run finishes its step, saves itself and ends, as at SIGTERM but without its time
    limit; others have the system's effect.
    """

    max_skips: Positive | None = Field(default_factory=_max_skips)
    """How many steps in a row may be skipped; one more ends the run. Only with `on_nan = "skip"`; left out, 10."""

    final_weights: Literal["working", "full", "none"] = "working"
    """What `weights/` of the run folder holds at the end: weights in `precision.compute`, in full precision, or nothing."""

    keep_freed_memory: bool = True
    """On the CPU, keep memory that the process frees for the next step: for all its code, and for good; glibc only."""


class BatchTable(Table):
    """How many samples a step sees. `global_size = dp x micro_size x accumulation`."""

    global_size: Positive
    """Samples per optimizer step, over all ranks."""

    micro_size: Positive
    """Samples per forward on one rank."""


class LossScaleTable(Table):
    """How fp16's loss scale moves; the rule and its names are torch.amp.GradScaler's."""

    init_scale: PositiveFloat = 65536.0
    """What the loss is multiplied by in the first step."""

    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    """By how much the scale grows after `growth_interval` steps in a row without overflow."""

    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """By how much it shrinks after a step that overflowed, which is skipped."""

    growth_interval: Positive = 2000
    """Steps in a row without overflow that it takes to grow."""

    min_scale: PositiveFloat = 1.0
    """The scale never gets smaller; a step that overflows even then ends the run."""


def _loss_scale(chosen: dict[str, Any]) -> LossScaleTable | None:
    return LossScaleTable() if chosen.get("compute") == "fp16" else None


def _gradients(chosen: dict[str, Any]) -> GradientType:
    return "fp64" if chosen.get("compute") == "fp64" else "fp32"


class PrecisionTable(Table):
    """The number formats of a run."""

    compute: ComputeType = "fp32"
    """The format of weights and activations while they are used."""

    gradients: GradientType = Field(default_factory=_gradients)
    """The format in which gradients are accumulated and reduced; left out, fp64 if `compute` is, else fp32. `"bf16"`, if
    `compute` is, halves their bytes in memory and between ranks: each of their sums is rounded to 8 bits, and the update makes
    fp32 copies of what a rank steps.
    """

    accumulation: Literal["auto", "autograd", "direct"] = "auto"
    """How weight gradients of linears are accumulated: by autograd and a copy, or multiplied straight into the sums."""

    keep: Array[str] = ()
    """Parameters that stay in fp32 where `compute` is narrower, by patterns of their names (`"*.router.*"`); buffers keep the
    format that the factory gave them in any case, but fp32 ones become fp64 if `compute` is.
    """

    loss_scale: LossScaleTable | None = Field(default_factory=_loss_scale)
    """How the loss is scaled if `compute` is fp16; only allowed then."""


class ParallelTable(Table):
    """How many ranks each axis has. `world = pp x dp x sp`, and `wdp = dp x sp / wp` follows."""

    dp: Positive | Literal["auto"] = "auto"
    """Ranks that split the samples; `"auto"` takes the ranks that the other axes leave over, a number fixes the world size."""

    pp: Positive = 1
    """Pipeline stages."""

    sp: Positive = 1
    """Ranks that split each sequence."""

    wp: Positive = 1
    """Ranks that split each weight."""

    reduction: Literal["fast", "canonical"] = "fast"
    """The order in which gradients are summed: the fastest for the layout; or one tree over all micro-batches, which gives the
    same bits in every layout with the same `micro_size`, for more memory and time.
    """

    cross_memory_attach: bool = True
    """Whether ranks on one host's CPUs read each other's weights, gradients and slices of sequences, if the system allows it;
    false: gloo's sockets.
    """


class Factory(Table):
    """The keys of code of your own."""

    factory: FactoryPath
    """The function or class, `"package.module:name"`; the folder of the plan is searched too."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments to call it with."""


class MetricFactory(Factory):
    """A metric of your own: a function that gives a function `(output, batch) -> {name: (sum, count)}`, called for each
    micro-batch of an evaluation; a row has the sum by the count, of all micro-batches and ranks.
    """

    sequence: Literal["whole", "slices"] = "whole"
    """What it is given if ranks split each sequence (`parallel.sp`): whole sequences, gathered on every rank, which needs the
    memory; or this rank's slice, for sums over positions.
    """


def row_name(number: str, of_set: str = "") -> str:
    """Returns the name in a row of a number ("loss") of a set, or of the held-out split of [data]."""
    if of_set:
        return f"held_out/{of_set}/{number}"
    return "held_out_loss" if number == "loss" else f"held_out/{number}"


def number_of(name: str) -> str:
    """Returns the number ("loss") of which `name` is a name in a row."""
    return "loss" if name == row_name("loss") else name.rpartition("/")[2]


BETTER: dict[str, Literal["min", "max"]] = {"loss": "min", "perplexity": "min", "accuracy": "max"}
"""The numbers of an evaluation that are core's own, and which value of each is the best."""


class BestTable(Table):
    """The number of an evaluation that says which weights are the best."""

    metric: str
    """Its name in a row: `"held_out_loss"`, `"held_out/accuracy"`, `"held_out/NAME/loss"` of the set NAME."""

    mode: Literal["min", "max"] | None = None
    """Whether the lowest value is the best, or the highest; left out, "max" for an accuracy, "min" for a loss and a perplexity.
    A metric of your own needs it.
    """

    @model_validator(mode="after")
    def _has_mode(self) -> BestTable:
        if self.mode is None and number_of(self.metric) not in BETTER:
            raise ValueError(f'`mode` is needed: whether the "min" or the "max" of `{self.metric}` is the best')
        return self

    @property
    def is_max(self) -> bool:
        return (self.mode or BETTER[number_of(self.metric)]) == "max"


class SetTable(Table):
    """The keys of `[evaluation.sets.NAME]` besides those of its data."""

    split: Literal["all", "held_out"] = "all"
    """Which of the data's samples are evaluated: all, none held out; or those that training on this table would hold out."""

    steps: Positive | None = None
    """At most so many batches of `global_size` samples; left out, every sample once. A stream needs it."""


class EvaluationTable(Table):
    """Measures the loss, and of tokens perplexity and accuracy, on held-out data during the run and at its end; left out,
    never.
    """

    every: Positive
    """Optimizer steps from one evaluation to the next."""

    steps: Positive = 10
    """Batches of `global_size` samples of the held-out split of `[data]` in an evaluation."""

    held_out: bool = True
    """Whether the held-out split of `[data]` is evaluated; false leaves the `sets`."""

    sets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """More data to evaluate on, by names of your own: each `[evaluation.sets.NAME]` is a table as `[data]`, with the keys
    `split` ("all", the default, or "held_out") and `steps` too. Every sample counts once, unless `steps` says how many batches
    are enough.
    """

    metric: MetricFactory | None = None
    """A metric of your own, of the held-out split and of each set."""

    keep_best: str | BestTable | None = None
    """The number, by its name in a row, whose best checkpoint is kept beside those that `[checkpoint]` keeps: a loss, such as
    `"held_out_loss"`, is best at its lowest, an accuracy at its highest; `{ metric = "...", mode = "max" }` says it of others.
    """

    patience: Positive | None = None
    """After how many evaluations in a row without a better `keep_best` the run ends; left out, it takes all of its steps."""

    @model_validator(mode="after")
    def _possible(self) -> EvaluationTable:
        if not self.held_out and not self.sets:
            raise ValueError("without `held_out` and without `sets` there is nothing to evaluate on")
        if self.patience is not None and self.keep_best is None:
            raise ValueError('`patience` waits for a better `keep_best`; name one, as keep_best = "held_out_loss"')
        if isinstance(self.keep_best, str) and number_of(self.keep_best) not in BETTER:
            raise ValueError(f'write keep_best = {{ metric = "{self.keep_best}", mode = "max" }}, or "min"')
        return self

    @property
    def best(self) -> BestTable | None:
        """The number of `keep_best`, as a table."""
        return BestTable(metric=self.keep_best) if isinstance(self.keep_best, str) else self.keep_best


class ProfileTable(Table):
    """Records a Chrome trace per rank, with each action of a step; left out, none."""

    steps: Annotated[Array[Positive], Field(min_length=2, max_length=2)]
    """The first and the last step to record, counted from 1 as in `metrics.jsonl`."""


Seconds = Annotated[float, Field(gt=0, le=1e8)]
"""Seconds of a wait: at most three years, which torch can still represent."""


class LimitsTable(Table):
    """How long a run waits before it reports a hang."""

    start_timeout_s: Seconds = 120.0
    """Seconds for all ranks to meet."""

    collective_timeout_s: Seconds = 600.0
    """Seconds for any one exchange between ranks."""

    data_timeout_s: Seconds = 600.0
    """Seconds for the dataset to give a batch."""

    estimate_timeout_s: Seconds = 600.0
    """Seconds for the steps of one stage on tensors without values, in `estimate`, `search` and `show`."""


class ModelConfig(Table):
    """What every model's table has; the config of a model record is a subclass."""

    compile: bool = False
    """Compile the layers with torch.compile."""

    def without_weights(self) -> Self:
        """Returns the table of the same model that starts from random weights."""
        return self.model_copy(update={"weights": None}) if "weights" in type(self).model_fields else self


class SequenceConfig(Table):
    """What the table of every attention over split sequences has; the config of its record is a subclass."""

    positions: bool = True
    """Whether the model counts positions, and so must take the field `positions`; false for a model without positions."""


class CheckpointConfig(Table):
    """What the table of every checkpointer has; the config of its record is a subclass."""

    folder: PlanFolder | None = None
    """Path or URL (fsspec's) of the checkpoint folder, used by this run alone; left out, `checkpoints` in the run's folder."""

    on_interrupt: bool = True
    """Whether a run that is asked to stop saves a checkpoint first."""


TABLES: dict[str, type[Table]] = {
    "run": RunTable,
    "batch": BatchTable,
    "precision": PrecisionTable,
    "parallel": ParallelTable,
    "limits": LimitsTable,
}
"""Core's own tables that every resolved plan has, in its order."""

OPTIONAL: dict[str, type[Table]] = {"evaluation": EvaluationTable, "profile": ProfileTable}
