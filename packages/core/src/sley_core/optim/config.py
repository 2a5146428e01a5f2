"""The tables `[optimizer]` and `[learning_rate]` of core, and the scope of an update. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from sley_core.records import OptimizerRecord, Record, Scope
from sley_core.table import Array, FactoryPath, Fraction, Table

BelowOne = Annotated[float, Field(ge=0, lt=1)]


class GroupConfig(Table):
    """Options for the parameters whose name matches; the first matching group of the list applies."""

    match: Annotated[str, Field(min_length=1)]
    """A pattern on parameter names, in which `*` matches anything, dots too: `blocks.0.*`, `*.bias`."""

    lr: PositiveFloat | None = None
    """The learning rate of these parameters; left out, the optimizer's."""

    weight_decay: NonNegativeFloat | None = None
    """The decay of all these parameters, norms and biases too; left out, the optimizer's, on matrices alone."""

    freeze: bool = False
    """Leave these parameters as they are: no gradient, no update."""

    @field_validator("freeze")
    @classmethod
    def _frozen_has_no_options(cls, freeze: bool, info: ValidationInfo) -> bool:
        """Raises ValueError for a frozen group with options, which would have no effect."""
        useless = [key for key in ("lr", "weight_decay") if info.data.get(key) is not None]
        if freeze and useless:
            raise ValueError(f"a frozen group is never updated, so `{useless[0]}` has no effect")
        return freeze


class OptimizerConfig(Table):
    """What every optimizer's table has; the config of an optimizer record is a subclass."""

    lr: PositiveFloat
    """The highest learning rate; `[learning_rate]` scales it from step to step."""

    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of the matrices; norms and biases have none unless a group says so."""

    clip_norm: PositiveFloat | None = None
    """Scale the gradients down if their norm over the whole model exceeds this; left out, never."""

    clip_kind: Annotated[float, Field(ge=1)] | Literal["inf"] = 2.0
    """Which norm `grad_norm` and clipping use: p for the p-norm, `"inf"` for the largest element."""

    groups: Array[GroupConfig] = ()
    """Options by parameter name; the first group that matches a name applies."""


class AdamWConfig(OptimizerConfig):
    """AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of the matrices; each step subtracts lr x weight_decay of them. Norms and biases: see `groups`."""

    betas: Annotated[Array[BelowOne], Field(min_length=2, max_length=2)] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment before dividing."""


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    momentum: BelowOne = 0.0
    """The share of the running sum of gradients that each step keeps."""

    dampening: BelowOne = 0.0
    """The share of a new gradient that is left out of that sum."""

    nesterov: bool = False
    """Look one momentum step ahead; needs `momentum` and no `dampening`."""

    @field_validator("nesterov")
    @classmethod
    def _nesterov_needs_momentum(cls, nesterov: bool, info: ValidationInfo) -> bool:
        if nesterov and (not info.data.get("momentum", 1.0) or info.data.get("dampening", 0.0)):
            raise ValueError("`nesterov` needs a `momentum` above 0 and a `dampening` of 0")
        return nesterov


class FactoryOptimizerConfig(OptimizerConfig):
    """Any subclass of torch.optim.Optimizer, by its path: `factory = "torch.optim:NAdam"`."""

    factory: FactoryPath
    """The class, `"package.module:Name"`; it is called with the parameter groups, `lr` and `options`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the class, as it names them."""

    scope: Literal["elementwise", "matrix", "global"] | None = None
    """Which gradients an element's update depends on: its own, its parameter's or all; left out, torch.optim's are known."""


class LearningRateConfig(Table):
    """What core's learning-rate tables have in common."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises to its full value; the first of them has 1/warmup_steps of it, not 0."""


class ConstantConfig(LearningRateConfig):
    """The full rate after the warm-up."""


class DecayConfig(LearningRateConfig):
    """What the falling learning rates have in common."""

    min_ratio: Fraction = 0.1
    """The last step's share of the full rate; at 0 the last step changes nothing."""

    decay_steps: PositiveInt | None = None
    """Steps below the full rate; left out, all after the warm-up."""


class LinearConfig(DecayConfig):
    """Falls in a straight line from the full rate to `min_ratio` of it."""


class CosineConfig(DecayConfig):
    """Falls along half a cosine from the full rate to `min_ratio` of it (Loshchilov and Hutter, 2017)."""


class WarmupStableDecayConfig(DecayConfig):
    """Holds the full rate and falls over the last `decay_steps` (Hu et al., 2024, MiniCPM, section 4)."""

    decay_steps: PositiveInt | None = None
    """Steps of the fall at the end of the run; left out, a tenth of the run."""

    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """How it falls; `sqrt` is steep first (Hägele et al., 2024, 1-sqrt)."""


ELEMENTWISE = frozenset({"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"})
"""torch.optim's classes of which an element's update takes nothing but its own gradient, its own states and the step."""

PER_MATRIX = frozenset({"Adafactor", "Muon"})
"""Those that look at rows, columns or a root mean square of a whole parameter."""


def scope_of(record: Record | None, config: Table) -> Scope | Literal["unknown"]:
    """Returns the scope that the record or the factory's table declares; else that of torch.optim's own classes.

    "unknown" for another class without a declaration.

    A layout that gives a rank only a part of each matrix, or of the model, would change the result if an update looks
    further.
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
