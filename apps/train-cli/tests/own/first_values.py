"""Where runs start, on ranks: not beside the tests, whose file imports transformers, which most ranks do not need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.runs import weights


def first_values(plans: Mapping[str, Any], texts: Path) -> dict[str, dict[str, Tensor]]:
    """Returns for each plan this rank's first weights, and the attribute `shift` of layers."""
    found = {}
    for name, tables in plans.items():
        with World.join("cpu") as world, assemble(plan_from_dict(tables, texts), world) as run:
            shifts = {f"{layer.name}.shift": layer.module.shift for layer in run.layers if hasattr(layer.module, "shift")}
            found[name] = weights(run) | shifts
    return found


def starts(plans: Sequence[dict[str, Any]], texts: Path) -> list[tuple[dict[str, Tensor], list[float], list[str]]]:
    """Returns for each plan the first weights, the losses of three steps, and the trained parameters."""
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, texts), world) as run:
            first = weights(run)
            losses = [float(run.step()["loss"]) for _ in range(3)]
            found.append((first, losses, [param.name for param in run.registry.trainable]))
    return found
