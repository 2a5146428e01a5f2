"""Learning rates: pure functions from the step (0, 1, ...) to a fraction of the full rate. Imports no torch.

A warm-up of w steps gives 1/w, 2/w, ..., 1, so no step has a rate of 0. A decay starts after the last step at the full rate. At
its end, by default the run's last step, it reaches exactly `min_ratio`, and stays there.

       1 ┤  ╭───────╮           core.warmup_stable_decay;
         │ ╱         ╲          linear and cosine have no level stretch
     min ┤╱           ╰──
         └┴──┴───────┴─┴──> step
          0  w-1    last at the full rate
"""

import math
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import TYPE_CHECKING

from sley_core.errors import PlanError, SleyError
from sley_core.optim.config import ConstantConfig, CosineConfig, LinearConfig, WarmupStableDecayConfig
from sley_core.records import Problem

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

Factor = Callable[[int], float]
"""A function from a step to the fraction of the full rate."""

Shape = Callable[[float], float]
"""A function from the progress of a decay, in [0, 1], to the part of the decay that remains: it falls from 1 at 0 to 0 at 1."""

SHAPES: dict[str, Shape] = {  # by their names in the `shape` key
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def constant_factor(config: ConstantConfig, _num_steps: int) -> Factor:
    """Returns a function that rises to 1 in the warm-up and then stays 1."""
    return lambda step: _warmup(step, config.warmup_steps)


def decay_factor(config: LinearConfig | CosineConfig, num_steps: int) -> Factor:
    """Returns a function that falls from 1 to `min_ratio` after the warm-up, by default until the last of `num_steps` steps."""
    last_full_step = max(config.warmup_steps - 1, 0)
    decay_steps = config.decay_steps or max(num_steps - 1 - last_full_step, 1)
    shape = SHAPES["cosine" if isinstance(config, CosineConfig) else "linear"]
    return _make_factor(shape, config.warmup_steps, last_full_step, decay_steps, config.min_ratio)


def warmup_stable_decay_factor(config: WarmupStableDecayConfig, num_steps: int) -> Factor:
    """Returns a function that is 1 after the warm-up and falls to `min_ratio` over the last `decay_steps` of `num_steps` steps.
    Raises PlanError "learning-rate-steps" if warm-up and decay are longer than the run.
    """
    decay_steps = config.decay_steps or math.ceil(num_steps / 10)
    if config.warmup_steps + decay_steps > num_steps:
        raise PlanError(
            "learning-rate-steps",
            f"warm-up and decay are longer than the run: {config.warmup_steps} + {decay_steps} > {num_steps} steps",
            path=("learning_rate", "decay_steps" if config.decay_steps else "warmup_steps"),
            hint="use fewer `warmup_steps` or `decay_steps`, or more `run.steps`",
        )
    last_full_step = num_steps - 1 - decay_steps
    return _make_factor(SHAPES[config.shape], config.warmup_steps, last_full_step, decay_steps, config.min_ratio)


def _make_factor(shape: Shape, warmup_steps: int, last_full_step: int, decay_steps: int, min_ratio: float) -> Factor:
    """Returns a function that is 1 from the warm-up to `last_full_step`, and falls to `min_ratio` in the next `decay_steps`."""

    def factor(step: int) -> float:
        if step <= last_full_step:
            return _warmup(step, warmup_steps)
        if step >= last_full_step + decay_steps:
            return min_ratio
        return min_ratio + (1.0 - min_ratio) * shape((step - last_full_step) / decay_steps)

    return factor


def _warmup(step: int, warmup_steps: int) -> float:
    """Returns the fraction of the full rate at `step` (from 0) during the warm-up, or 1 after it."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def learning_rate_factor(plan: "Plan") -> Factor:
    """Returns the plan's learning rate as a function from the step to the fraction of the full rate.

    Raises PlanError "learning-rate" if the plan's factory does not return a function. The returned function raises the same
    error if the factory's function returns a negative or infinite number, NaN, or no number.
    """
    factor: Factor = plan.learning_rate.build(plan.run.steps)
    if plan.learning_rate.record is not None:
        return factor
    name = plan.learning_rate.name

    def checked_factor(step: int) -> float:
        result = factor(step)
        try:
            value = float(result)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise _rate_error(
                plan, f"`{name}` must return a finite factor that is not negative, but returned {result!r} at step {step}"
            )
        return value

    if not callable(factor):
        raise _rate_error(
            plan,
            f"`{name}` must return a function that maps the step to a factor of `lr`, but returned a {type(factor).__name__}",
        )
    return checked_factor


def _rate_error(plan: "Plan", message: str) -> SleyError:
    return plan.add_locations(PlanError("learning-rate", message, path=("learning_rate", "factory")))


def factor_digest(factor: Factor, num_steps: int) -> str:
    """Returns the SHA-256 digest of the results of `factor` at up to 65 steps of the run. Ranks compare their digests."""
    steps = sorted({num_steps * part // 64 for part in range(65)})
    return sha256(repr([factor(step) for step in steps]).encode()).hexdigest()


def check_learning_rate(plan: "Plan") -> Iterable[Problem]:
    """Yields a problem if warm-up and decay of `core.warmup_stable_decay` are longer than the run."""
    config = plan.learning_rate.config
    if isinstance(config, WarmupStableDecayConfig):
        try:
            warmup_stable_decay_factor(config, plan.run.steps)
        except PlanError as error:
            for problem in error.diagnostics:
                yield Problem(problem.path, problem.message, problem.hint, problem.code)
