"""Core's types of the `[optimizer]` and `[learning_rate]` tables, and the scopes of updates. Imports no torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from sley_core.records import OptimizerRecord, Record, Scope
from sley_core.table import Array, FactoryPath, Fraction, Table

BelowOne = Annotated[float, Field(ge=0, lt=1)]


class GroupConfig(Table):
    """Options for the parameters whose names match a pattern. If several groups match a name, the first group applies."""

    match: Annotated[str, Field(min_length=1)]
    """A pattern for parameter names, such as `blocks.0.*` or `*.bias`. `*` matches any text, including dots."""

    lr: PositiveFloat | None = None
    """The learning rate of these parameters. The default is the optimizer's learning rate."""

    weight_decay: NonNegativeFloat | None = None
    """The weight decay of these parameters, including norms and biases. The default is the optimizer's weight decay for
    matrices, and 0 for norms and biases.
    """

    freeze: bool = False
    """Whether these parameters are frozen, i.e. get no gradients and no updates."""

    @field_validator("freeze")
    @classmethod
    def _frozen_has_no_options(cls, freeze: bool, info: ValidationInfo) -> bool:
        """Raises ValueError if a frozen group has other options, which would have no effect."""
        ignored = [key for key in ("lr", "weight_decay") if info.data.get(key) is not None]
        if freeze and ignored:
            raise ValueError(f"`{ignored[0]}` has no effect in a group with `freeze = true`")
        return freeze


class OptimizerConfig(Table):
    """The keys of all optimizer tables. The config of an optimizer record is a subclass."""

    lr: PositiveFloat
    """The peak learning rate. `[learning_rate]` scales it in each step."""

    weight_decay: NonNegativeFloat = 0.0
    """The weight decay of matrices. Norms and biases have none unless a group sets it."""

    clip_norm: PositiveFloat | None = None
    """The largest gradient norm of the whole model, to which a larger norm is scaled down. By default, there is no clipping."""

    clip_kind: Annotated[float, Field(ge=1)] | Literal["inf"] = 2.0
    """The norm for clipping and the metric `grad_norm`: a number p for the p-norm, `"inf"` for the largest absolute value."""

    groups: Array[GroupConfig] = ()
    """Options by parameter name. The first group that matches a name applies."""


class AdamWConfig(OptimizerConfig):
    """AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    weight_decay: NonNegativeFloat = 0.1
    """The weight decay of matrices: each step subtracts lr x weight_decay x weight. For norms and biases, use `groups`."""

    betas: Annotated[Array[BelowOne], Field(min_length=2, max_length=2)] = (0.9, 0.95)
    """The decay rates of the running means of the gradient and its square."""

    eps: PositiveFloat = 1e-8
    """The term added to the denominator for numerical stability."""


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    momentum: BelowOne = 0.0
    """The momentum: the fraction of the running gradient sum that each step keeps."""

    dampening: BelowOne = 0.0
    """The dampening: the fraction of each new gradient that is not added to the sum."""

    nesterov: bool = False
    """Whether to use Nesterov momentum, which requires `momentum` and no `dampening`."""

    @field_validator("nesterov")
    @classmethod
    def _nesterov_needs_momentum(cls, nesterov: bool, info: ValidationInfo) -> bool:
        if nesterov and (not info.data.get("momentum", 1.0) or info.data.get("dampening", 0.0)):
            raise ValueError("`nesterov` needs a `momentum` above 0 and a `dampening` of 0")
        return nesterov


class FactoryOptimizerConfig(OptimizerConfig):
    """Any subclass of torch.optim.Optimizer, such as `factory = "torch.optim:NAdam"`."""

    factory: FactoryPath
    """The class, as `"package.module:Name"`. It is called with the parameter groups, `lr` and `options`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the class."""

    scope: Literal["elementwise", "matrix", "global"] | None = None
    """The gradients on which the update of an element depends: only its own gradient ("elementwise"), all gradients of its
    parameter ("matrix"), or all gradients ("global"). You need not set it for torch.optim classes.
    """


class LearningRateConfig(Table):
    """The common keys of core's learning-rate tables."""

    warmup_steps: NonNegativeInt = 0
    """The number of steps over which the rate rises to its full value, from 1/warmup_steps of it in the first step."""


class ConstantConfig(LearningRateConfig):
    """A constant rate after the warm-up."""


class DecayConfig(LearningRateConfig):
    """The common keys of decaying learning rates."""

    min_ratio: Fraction = 0.1
    """The fraction of the full rate in the last step. With 0, the last step does not change the weights."""

    decay_steps: PositiveInt | None = None
    """The number of steps of the decay. The default is all steps after the warm-up."""


class LinearConfig(DecayConfig):
    """Linear decay from the full rate to `min_ratio` of it."""


class CosineConfig(DecayConfig):
    """Cosine decay from the full rate to `min_ratio` of it (Loshchilov and Hutter, 2017)."""


class WarmupStableDecayConfig(DecayConfig):
    """A constant rate, followed by a decay over the last `decay_steps` steps (Hu et al., 2024, MiniCPM, section 4)."""

    decay_steps: PositiveInt | None = None
    """The number of steps of the decay at the end of the run. The default is a tenth of the run."""

    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """The shape of the decay. `sqrt` decays fastest at first (Hägele et al., 2024, 1-sqrt)."""


ELEMENTWISE = frozenset({"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"})
"""The torch.optim classes that update an element only from the gradient and states of this element and the step count."""

PER_MATRIX = frozenset({"Adafactor", "Muon"})
"""The torch.optim classes that update an element from the gradients of all elements of the parameter."""


def scope_of(record: Record | None, config: Table) -> Scope | Literal["unknown"]:
    """Returns the optimizer scope that `record` or, without a record, the factory's table `config` declares; if neither does,
    the known scope of a torch.optim class, or "unknown" for any other class.

    An update needs all gradients in its scope on one rank. If a layout leaves some of them on other ranks, the result is wrong.
    """
    if isinstance(record, OptimizerRecord):
        return record.scope
    assert isinstance(config, FactoryOptimizerConfig), config
    if config.scope is not None:
        return "per_matrix" if config.scope == "matrix" else config.scope
    module, _, name = config.factory.partition(":")
    if module != "torch.optim" and not module.startswith("torch.optim."):
        return "unknown"
    return "elementwise" if name in ELEMENTWISE else "per_matrix" if name in PER_MATRIX else "unknown"
