"""The plan tables of the plugin `optim`. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from sley_core.api.plan import Table


class AveragingConfig(Table):
    """The common keys of `optim.ema` and `optim.mean`."""

    every: PositiveInt = 1
    """The number of updates between two weights that enter the average."""


class EMAConfig(AveragingConfig):
    """The exponential moving average of the weights: `average = decay * average + (1 - decay) * weights`."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """The decay. The average covers about the last `1 / (1 - decay)` weights that entered it."""

    warmup: bool = False
    """Whether the decay of the n-th weights is at most `(1 + n) / (10 + n)`, so that the first weights are forgotten soon."""


class MeanConfig(AveragingConfig):
    """The mean of the weights of the last steps, all with the same share (stochastic weight averaging)."""

    last: PositiveInt | None = None
    """The number of steps at the end of the run whose weights enter the mean."""

    from_step: PositiveInt | None = None
    """The first step whose weights enter the mean, counted from 1, instead of `last`. Before it, the average is equal to the
    weights.
    """

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if (self.last is None) == (self.from_step is None):
            raise ValueError("set either `last` or `from_step`")
        return self

    def start(self, num_steps: int) -> int:
        """Returns the number of the first step that enters the mean, from 0; negative if `last` exceeds the run."""
        return num_steps - self.last if self.last is not None else (self.from_step or 1) - 1
