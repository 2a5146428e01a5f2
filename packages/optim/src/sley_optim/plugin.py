"""The plan tables and records of the plugin `optim`. Imports no torch."""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from sley_core.api.plan import Array, GroupConfig, OptimizerConfig, Plan, Table
from sley_core.hookspecs import hookimpl
from sley_core.records import AveragingRecord, OptimizerRecord, Problem, Record

DecayRate = Annotated[float, Field(ge=0, lt=1)]
Algorithm = Literal["muon", "adamw"]


class AveragingConfig(Table):
    """The common keys of `optim.ema` and `optim.mean`."""

    every: PositiveInt = 1
    """The number of updates from one time that the weights enter the average to the next; 1 means after every update."""


class EMAConfig(AveragingConfig):
    """The exponential moving average of the weights: `average = decay * average + (1 - decay) * weights`."""

    decay: DecayRate = 0.999
    """The factor of the old average. The average covers about the last `1 / (1 - decay)` weights that entered it."""

    warmup: bool = False
    """Whether the decay is at most `(1 + n) / (10 + n)` for the n-th weights, so that the first weights are soon forgotten."""


class MeanConfig(AveragingConfig):
    """The mean of the weights of the last steps, each with the same share (stochastic weight averaging)."""

    last: PositiveInt
    """The number of steps at the end of the run whose weights enter the mean. Until then, the average equals the weights."""


class MuonGroupConfig(GroupConfig):
    """Options for the parameters that match a pattern. The first matching group in the list applies."""

    optimizer: Algorithm | None = None
    """The optimizer of these parameters: "adamw", or "muon", which requires matrices or stacks of matrices (such as experts).
    By default, Muon updates the matrices of hidden layers, and AdamW updates all other parameters.
    """

    @field_validator("optimizer")
    @classmethod
    def _check_not_frozen(cls, optimizer: Algorithm | None, info: ValidationInfo) -> Algorithm | None:
        if optimizer is not None and info.data.get("freeze"):
            raise ValueError("`optimizer` has no effect in a group with `freeze = true`")
        return optimizer


class MuonAdamWConfig(Table):
    """The options of AdamW for the parameters that Muon does not update."""

    lr: PositiveFloat
    """The peak learning rate. In each step, `[learning_rate]` scales it by the same factor as the learning rate of Muon."""

    weight_decay: NonNegativeFloat = 0.1
    """The weight decay of embeddings and of the output layer. For norms and biases, it is 0 unless a group sets it."""

    betas: Annotated[Array[DecayRate], Field(min_length=2, max_length=2)] = (0.9, 0.95)
    """The decay rates of the running means of the gradient and its square."""

    eps: PositiveFloat = 1e-8
    """The term added to the denominator for numerical stability."""


class MuonConfig(OptimizerConfig):
    """torch.optim.Muon for the matrices of hidden layers, and AdamW for embeddings, the output layer, norms and biases."""

    weight_decay: NonNegativeFloat = 0.1
    """The weight decay of Muon's matrices: each step subtracts lr x weight_decay x weight."""

    momentum: DecayRate = 0.95
    """The decay rate of the running mean of the gradient."""

    nesterov: bool = True
    """Whether to use Nesterov momentum."""

    ns_coefficients: Annotated[Array[float], Field(min_length=3, max_length=3)] = (3.4445, -4.7750, 2.0315)
    """The coefficients of the Newton-Schulz polynomial."""

    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """The number of Newton-Schulz iterations, which torch computes in bf16."""

    eps: PositiveFloat = 1e-7
    """The smallest norm by which an update is divided before the iterations."""

    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    """The factor of the learning rate of a matrix: "original" is sqrt(max(1, rows / columns)), and "match_rms_adamw" is
    0.2 sqrt(max(rows, columns)), with which learning rates for AdamW suit Muon.
    """

    adamw: MuonAdamWConfig
    """The options of AdamW for all other parameters."""

    groups: Array[MuonGroupConfig] = ()
    """Options by parameter name. The first group that matches a name applies."""


AveragingRule = Callable[[int, int], float]
"""A function `(step, age)` that returns the share of the new weights in their average. step: the step, from 0. age: the number
of updates since the average equalled the weights.
"""


def build_ema(config: EMAConfig, num_steps: int) -> AveragingRule:
    """Returns the rule of `torch.optim.swa_utils.get_ema_multi_avg_fn`, with a warm-up of the decay if the config sets it."""

    def compute_weight(step: int, age: int) -> float:
        count, remainder = divmod(age, config.every)
        if remainder:
            return 0.0
        return 1 - (min(config.decay, (1 + count) / (10 + count)) if config.warmup else config.decay)

    return compute_weight


def build_mean(config: MeanConfig, num_steps: int) -> AveragingRule:
    """Returns the rule of `torch.optim.swa_utils.get_swa_multi_avg_fn` for the last steps of a run of `num_steps` steps."""

    def compute_weight(step: int, age: int) -> float:
        if step <= num_steps - config.last:
            return 1.0
        count, remainder = divmod(age, config.every)
        return 0.0 if remainder else 1 / (count + 1)

    return compute_weight


@hookimpl
def sley_records() -> list[Record]:
    return [
        AveragingRecord(name="ema", config=EMAConfig, build="sley_optim.plugin:build_ema"),
        AveragingRecord(name="mean", config=MeanConfig, build="sley_optim.plugin:build_mean"),
        OptimizerRecord(
            name="muon",
            config=MuonConfig,
            build="sley_optim.muon:build",
            scope="per_matrix",
            roles="sley_optim.muon:assign_roles",
        ),
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if the mean covers more steps than the run has."""
    config = None if plan.averaging is None else plan.averaging.config
    if isinstance(config, MeanConfig) and config.last > plan.run.steps:
        message = f"`last = {config.last}` needs more steps than `run.steps = {plan.run.steps}`"
        yield Problem(("averaging", "last"), message, f"use last = {plan.run.steps} or less", "averaging-steps")
