"""Where runs start, on ranks: beside the tests of it, whose file imports transformers, which ranks have no need of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.runs import weights


def starts(plans: list[dict[str, Any]], texts: Path) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Of each plan: first weights, and the losses of three steps."""
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, texts), world) as run:
            first = weights(run)
            found.append((first, [float(run.step()["loss"]) for _ in range(3)]))
    return found
