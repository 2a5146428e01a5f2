"""Runs plans that stop at a checkpoint and go on from it, in the same layout or another, beside one that was never stopped.

    path = ranks(2)(stretch, tables, 3, folder=texts, save=path)         # three steps, then a checkpoint
    after = ranks(4)(stretch, other, 3, folder=texts, load=path)         # three more, in another layout
    assert_goes_on(stretch(tables, 6, folder=texts), after, "fp32")

Since core 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.update import states_of
from sley_core.loop import Row
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import WEIGHTS, Tensors, weights


@dataclass
class Stretch:
    """What one rank saw of some steps. rows: of these. weights: after the last, whole. states: masters and optimizer states, as
    this rank holds them. notes: of the load.
    """

    rows: list[dict[str, float | int]] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    states: Tensors = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def stretch(
    tables: Mapping[str, Any],
    num_steps: int,
    *,
    folder: Path | None = None,
    load: Path | None = None,
    save: Path | None = None,
    prepare: Callable[[Run], None] | None = None,
) -> Stretch:
    """Loads the checkpoint `load`, takes `num_steps` steps on this rank, and saves one to `save`, if these are given."""
    found = Stretch()
    with World.join(tables["run"].get("device", "cpu")) as world, assemble(plan_from_dict(tables, folder), world) as run:
        if prepare is not None:
            prepare(run)
        if load is not None:
            restored = run.load_checkpoint(load)
            assert restored is not None, load
            found.notes = restored.notes
        found.rows = [run.step() for _ in range(num_steps)]
        if save is not None:
            run.save_checkpoint(save)
        found.weights = weights(run)
        held = states_of(run.stepper.update)
        found.states = {f"{one.name}/{one.state}/{one.span}": one.tensor.detach().clone().cpu() for one in held}
    return found


def saving_at(step: int, path: Path) -> Callable[[Run], None]:
    """Returns what lets a run save a checkpoint to `path` behind that step, and go on: for `prepare` of a `stretch`."""
    return partial(_let_save, step, path)


def _let_save(step: int, path: Path, run: Run) -> None:
    """Makes the run save a checkpoint at `path` after `step`."""

    def save(row: Row) -> None:
        if row["step"] == step:
            run.save_checkpoint(path)

    run.listeners.append(save)


def assert_same_stretch(reference: Sequence[Stretch], others: Sequence[Stretch]) -> None:
    """Asserts that every rank's last rows, weights, masters and optimizer states are equal bit for bit."""
    for wanted, found in zip(reference, others, strict=True):
        for one, other in zip(wanted.rows[-len(found.rows) :], found.rows, strict=True):
            keys = ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped")
            assert [repr(one.get(key)) for key in keys] == [repr(other.get(key)) for key in keys], (one, other)
        assert_same_bits(wanted.weights, found.weights)
        assert wanted.states.keys() == found.states.keys()
        assert_same_bits(wanted.states, found.states)


def assert_goes_on(reference: Stretch, others: Sequence[Stretch], precision: str) -> None:
    """Asserts that every rank of `others` goes on as the undisturbed one-process `reference`, within the parity of this
    precision.
    """
    limit = WEIGHTS[precision]
    for rank, other in enumerate(others):
        for wanted, found in zip(reference.rows[-len(other.rows) :], other.rows, strict=True):
            assert (wanted["step"], wanted["lr"]) == (found["step"], found["lr"]), f"rank {rank}: {wanted}, {found}"
            for key in ("loss", "grad_norm"):
                assert math.isclose(wanted[key], found[key], rel_tol=limit), f"rank {rank}: {key}, {wanted}, {found}"
        assert_close_gradients(_of(reference.weights, other.weights), other.weights, limit)


def _of(tensors: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensors:
    return {name: tensors[name] for name in other}
