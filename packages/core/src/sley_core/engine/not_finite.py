"""Explains why a step was not taken: finds, over all ranks, what is not finite, or that no label counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sley_core.comm.collectives import gather_objects
from sley_core.comm.compare import differing
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.parts import Parts
    from sley_core.engine.totals import PendingTotals, StepResult

SHOWN = 16
"""How many samples a message names."""


class RankReport(NamedTuple):
    """Holds what one rank knows. loss: its part of the sum. bad: place in the backward's order, and name, of the first
    parameter whose gradient is not finite on this rank, if there is any. samples: their numbers.
    """

    loss: float
    bad: tuple[int, str] | None
    samples: tuple[int, ...]


def is_refused(result: StepResult) -> bool:
    """Returns whether the step with this `result` was not taken because of an error; a skip by fp16's loss scale is no
    error.
    """
    return result.ranks_differ or (not result.skipped and not (result.is_finite and result.weight > 0))


def is_no_number(result: StepResult) -> bool:
    """Returns whether the step was not taken only because its loss or gradient norm is not finite, which `on_nan = "skip"`
    allows.

    False for a step that fp16's loss scale skips, and for one with another error.
    """
    return not result.is_finite and not (result.ranks_differ or result.skipped) and result.weight > 0


def refusal(
    parts: Parts,
    number: int,
    result: StepResult,
    totals: PendingTotals,
    samples: Sequence[int],
    *,
    is_latest: bool,
    num_skipped: int = 0,
) -> RunError:
    """Returns the error of the refused step `number`, the same on all ranks. A blocking collective on `control`: all ranks call
    it.

    "not-finite": the loss or the norm is not finite. "nothing-counts": the loss weight of the global batch is 0, so there is no
    mean (torch's own cross-entropy gives NaN if all labels are ignored). "ranks-differ": some ranks exchanged other weights or
    gradients than the others.

    samples: this rank's in that step, empty if a program brought them. is_latest: whether the store has its gradients.
    num_skipped: how many steps just before it were skipped.
    """
    if is_latest:
        parts.store.state.was_taken = False
    if result.ranks_differ:
        return differing(f"step {number}", totals.own_exchanges, parts.groups["control"])
    own = RankReport(
        float(totals.own_loss), _first_bad(parts.store) if is_latest else None, tuple(samples[: SHOWN + 1])
    )
    # All ranks have the same totals, so all come here, in the same step.
    seen = [
        RankReport(*one) for one in gather_objects(own, parts.groups["control"], what="losses that are not finite")
    ]  # it sends JSON
    if result.is_finite:
        return RunError(
            "nothing-counts",
            f"step {number}: the loss weight of the batch is {result.weight:g}, so there is no mean to take a step by"
            + _samples(range(len(seen)), seen),
            hint="look at the data of this step: all of its labels are ignored",
        )
    before = f"; the {num_skipped} before it were skipped" if num_skipped else ""
    return RunError(
        "not-finite",
        f"step {number}: loss {result.loss}, gradient norm {result.grad_norm}{before}{_where(parts, seen)}",
        hint="lower the learning rate, add [optimizer] clip_norm, or look at the data of this step; no weight was changed",
    )


def _first_bad(store: GradientStore) -> tuple[int, str] | None:
    """Returns place and name of the first parameter, in backward order, whose gradient is not finite: the one nearest to the
    cause.
    """
    for place, entry in enumerate(store.entries):
        if not bool(torch.isfinite(store.part(entry)).all()):
            return place, entry.name
    return None


def _where(parts: Parts, seen: Sequence[RankReport]) -> str:
    """Returns in words the ranks (of several) whose loss is not finite, the parameter of the last stage with such gradients
    whose gradient went bad first, and the samples that these ranks had.
    """
    bad = [rank for rank, one in enumerate(seen) if not math.isfinite(one.loss)]
    text = ""
    if bad:
        whose = f"rank {bad[0]}" if len(bad) == 1 else f"ranks {', '.join(map(str, bad))}"
        what = " or ".join(dict.fromkeys("NaN" if math.isnan(seen[rank].loss) else "infinite" for rank in bad))
        text += f"; the loss of {whose} is {what}" if len(seen) > 1 else ""
    size = parts.topology.ranks_per_stage
    for stage in reversed(range(parts.topology.pp)):
        # each rank of a stage may have its own part of every gradient
        if found := [one.bad for one in seen[stage * size : (stage + 1) * size] if one.bad is not None]:
            _, name = min(map(tuple, found))
            text += f"; first in the gradient of {name!r}" + (f" (stage {stage})" if parts.topology.pp > 1 else "")
            break
    return text + _samples(bad or range(len(seen)), seen)


def _samples(ranks: Sequence[int], seen: Sequence[RankReport]) -> str:
    """Returns in words the first samples that `ranks` had in the step; "" if none is known."""
    numbers = list(dict.fromkeys(number for rank in ranks for number in seen[rank].samples))
    if not numbers:
        return ""
    more = ", ..." if len(numbers) > SHOWN else ""
    return f"; samples {', '.join(map(str, numbers[:SHOWN]))}{more}"
