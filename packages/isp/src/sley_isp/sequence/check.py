"""Checks a plan's sizes for attention by heads, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sley_core.records import Problem
from sley_isp.config import AllToAllConfig

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


def check_heads(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if the heads cannot be divided evenly over `sp`. Custom models are checked at their first attention."""
    size = plan.parallel.sp
    heads = getattr(plan.model.config, "heads", None)
    if plan.sequence is None or not isinstance(plan.sequence.config, AllToAllConfig) or not isinstance(heads, int):
        return
    if heads % size:
        fitting = [str(number) for number in range(1, min(heads, size) + 1) if heads % number == 0]
        message = f"heads = sp x heads per rank fails: {heads} is no multiple of {size}"
        hint = f"with {heads} heads `sp` can be {', '.join(fitting)}"
        yield Problem(("parallel", "sp"), message, hint, "sequence-heads")
