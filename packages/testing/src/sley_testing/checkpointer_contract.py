"""Tests what every checkpointer must pass; the tests of a plugin inherit them.

    class TestPickles(CheckpointerContract):
        checkpoint = {"use": "pickles.folder"}

Runs of a small model are stopped and resumed, in their layout and in another, beside one that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.update import states_of
from sley_core.errors import RunError
from sley_core.loop import Row
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import WEIGHTS, Tensors, weights

DP = {"parallel__dp": 2, "gradient_handlers": [{"use": "core.each"}]}
STEPS = 2


class CheckpointerContract:
    """Tests a checkpointer: inherit, set `checkpoint` to the table `[checkpoint]`, and pytest does the rest."""

    checkpoint: ClassVar[dict[str, Any]]

    def _plan(self, **changes: Any) -> Tables:
        return small_plan(checkpoint=self.checkpoint, run__steps=2 * STEPS, **changes)

    def test_resumed_run_is_bit_identical(self, texts: Path, tmp_path: Path) -> None:
        """In rows, weights, masters and optimizer states."""
        plan = self._plan()
        whole = stretch(plan, 2 * STEPS, folder=texts)
        stretch(plan, STEPS, folder=texts, save=tmp_path / "saved")
        assert_same_stretch([whole], [stretch(plan, STEPS, folder=texts, load=tmp_path / "saved")])

    def test_two_ranks_resume_in_same_and_other_layout(self, ranks: Callable[..., Ranks], texts: Path, tmp_path: Path) -> None:
        """Two ranks with the same bits; what they saved one process takes, within the parity of the precision."""
        plan = self._plan()
        two = changed(plan, **DP)
        whole = ranks(2)(stretch, two, 2 * STEPS, folder=texts)
        ranks(2)(stretch, two, STEPS, folder=texts, save=tmp_path / "saved")
        assert_same_stretch(whole, ranks(2)(stretch, two, STEPS, folder=texts, load=tmp_path / "saved"))
        alone = stretch(plan, STEPS, folder=texts, load=tmp_path / "saved")
        assert_goes_on(stretch(plan, 2 * STEPS, folder=texts), [alone], plan["precision"]["compute"])

    def test_auto_loads_newest_checkpoint(self, texts: Path, tmp_path: Path) -> None:
        """And nothing, where the run has not begun."""
        plan = plan_from_dict(self._plan(), texts)
        with assemble(plan, World.alone("cpu"), folder=tmp_path) as run:
            assert run.load_checkpoint("auto") is None
            for _ in range(STEPS):
                run.step()
                run.save_checkpoint()
            left = weights(run)
        with assemble(plan, World.alone("cpu"), folder=tmp_path) as run:
            found = run.load_checkpoint("auto")
            assert found is not None, "the run's own checkpoint is not found again"
            assert (found.step, run.num_steps_done) == (STEPS, STEPS), f"{found.path} is not the newest"
            assert_same_bits(left, weights(run))

    def test_damaged_checkpoint_is_refused(self, texts: Path, tmp_path: Path) -> None:
        """Whichever file of it is cut short, or gone; and then nothing has changed."""
        plan = self._plan()
        stretch(plan, 1, folder=texts, save=tmp_path / "saved")
        files = [path for path in sorted((tmp_path / "saved").rglob("*")) if path.is_file()]
        assert files, "the checkpoint has no files in its folder"
        with assemble(plan_from_dict(plan, texts), World.alone("cpu")) as run:
            before = weights(run)
            for file in files:
                data = file.read_bytes()
                for damaged in (data[: len(data) // 2], None):
                    file.unlink()
                    if damaged is not None:
                        file.write_bytes(damaged)
                    with pytest.raises(RunError):
                        run.load_checkpoint(tmp_path / "saved")
                    assert_same_bits(before, weights(run))
                file.write_bytes(data)
            assert run.load_checkpoint(tmp_path / "saved") is not None

    def test_checkpoint_of_another_model_is_refused(self, texts: Path, tmp_path: Path) -> None:
        stretch(self._plan(), 1, folder=texts, save=tmp_path / "saved")
        other = plan_from_dict(self._plan(model__ffn_hidden=32), texts)
        with assemble(other, World.alone("cpu")) as run, pytest.raises(Exception, match="resume-differs"):
            run.load_checkpoint(tmp_path / "saved")


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
        found.states = {f"{one.name}/{one.state}/{one.elements}": one.tensor.detach().clone().cpu() for one in held}
    return found


def save_at(step: int, path: Path, run: Run) -> None:
    """Makes the run save a checkpoint at `path` after `step`, and go on: for `prepare` of a `stretch`, by `partial`."""

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
    """Asserts that every rank of `others` goes on as the one-process `reference`, within the parity of this precision."""
    limit = WEIGHTS[precision]
    for rank, other in enumerate(others):
        for wanted, found in zip(reference.rows[-len(other.rows) :], other.rows, strict=True):
            assert (wanted["step"], wanted["lr"]) == (found["step"], found["lr"]), f"rank {rank}: {wanted}, {found}"
            for key in ("loss", "grad_norm"):
                assert math.isclose(wanted[key], found[key], rel_tol=limit), f"rank {rank}: {key}, {wanted}, {found}"
        assert_close_gradients({name: reference.weights[name] for name in other.weights}, other.weights, limit)
