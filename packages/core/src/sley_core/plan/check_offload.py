"""Checks that a plan's offload managers do not move the same memory, and that the optimizer can be stepped in their way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sley_core.optim.scope import scope_of
from sley_core.records import OffloadManagerRecord, Problem

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

WIDTH = {"elementwise": 0, "per_matrix": 1, "global": 2, "unknown": 3}
"""Rank of an optimizer's scope: how much of the gradients an update may depend on, from least to most."""


def check_offload(plan: Plan) -> Iterator[Problem]:
    """Yields the problems of `[[offload]]`. Codes: "offload-twice", "offload-optimizer"."""
    mover: dict[str, str] = {}
    for number, component in enumerate(plan.offload):
        record = component.record
        assert isinstance(record, OffloadManagerRecord), component.name
        for part in record.parts(component.config):
            if part in mover:
                message = f"`{mover[part]}` and `{component.name}` both move the run's {part.replace('_', ' ')}"
                yield Problem(("offload", number, "use"), message, "keep one of them", "offload-twice")
                break
            mover[part] = component.name
        yield from _scope(plan, number, component.name, record)


def _scope(plan: Plan, number: int, name: str, record: OffloadManagerRecord) -> Iterator[Problem]:
    """Yields a problem for an optimizer whose updates depend on more than a manager's way of stepping provides."""
    allowed, found = record.scope(plan.offload[number].config), scope_of(plan.optimizer)
    if allowed == "global" or WIDTH[found] <= WIDTH[allowed]:
        return
    looks = "may look at all gradients at once" if found == "unknown" else "looks at all gradients at once"
    message = f"`{name}` steps the optimizer with some weights at a time, but `{plan.optimizer.name}` {looks}"
    hint = "use an optimizer such as `core.adamw`"
    if found == "unknown":
        hint += ', or say `scope = "elementwise"` in [optimizer] where an element is updated by its own gradients alone'
    yield Problem(("offload", number, "use"), message, hint, "offload-optimizer")
