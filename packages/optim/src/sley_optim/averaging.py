"""The rules of averages: the weight of new weights in their average, by step. Imports no torch.

`records.AveragingRecord` describes the arguments of a rule.
"""

from __future__ import annotations

from collections.abc import Callable

from sley_optim.config import EMAConfig, MeanConfig

Rule = Callable[[int, int], float]


def ema(config: EMAConfig, num_steps: int) -> Rule:
    """Returns the rule of `torch.optim.swa_utils.get_ema_multi_avg_fn`, optionally with a warm-up of the decay."""

    def rule(step: int, age: int) -> float:
        count, remainder = divmod(age, config.every)
        if remainder:
            return 0.0
        return 1 - (min(config.decay, (1 + count) / (10 + count)) if config.warmup else config.decay)

    return rule


def mean(config: MeanConfig, num_steps: int) -> Rule:
    """Returns the rule of `torch.optim.swa_utils.get_swa_multi_avg_fn` from the first step of the mean on."""
    start = config.start(num_steps)

    def rule(step: int, age: int) -> float:
        if step <= start:
            return 1.0
        count, remainder = divmod(age, config.every)
        return 0.0 if remainder else 1 / (count + 1)

    return rule
