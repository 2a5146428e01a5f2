"""Defines the tests that every checkpointer must pass; a plugin's tests inherit them.

    class TestPickles(CheckpointerContract):
        checkpoint = {"use": "pickles.folder"}

Runs of a small model are stopped, resumed in the same and in another layout, and compared with an uninterrupted run.
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
        """Compares rows, weights, master weights and optimizer states with an uninterrupted run."""
        plan = self._plan()
        uninterrupted = stretch(plan, 2 * STEPS, folder=texts)
        stretch(plan, STEPS, folder=texts, save=tmp_path / "saved")
        assert_same_stretch([uninterrupted], [stretch(plan, STEPS, folder=texts, load=tmp_path / "saved")])

    def test_two_ranks_resume_in_same_and_other_layout(self, ranks: Callable[..., Ranks], texts: Path, tmp_path: Path) -> None:
        """Expects equal bits on two ranks. One process resumes their checkpoint within the tolerance of the precision."""
        plan = self._plan()
        two_rank_plan = changed(plan, **DP)
        uninterrupted = ranks(2)(stretch, two_rank_plan, 2 * STEPS, folder=texts)
        ranks(2)(stretch, two_rank_plan, STEPS, folder=texts, save=tmp_path / "saved")
        assert_same_stretch(uninterrupted, ranks(2)(stretch, two_rank_plan, STEPS, folder=texts, load=tmp_path / "saved"))
        resumed = stretch(plan, STEPS, folder=texts, load=tmp_path / "saved")
        assert_resumed_parity(stretch(plan, 2 * STEPS, folder=texts), [resumed], plan["precision"]["compute"])

    def test_auto_loads_newest_checkpoint(self, texts: Path, tmp_path: Path) -> None:
        """Expects None before the first checkpoint."""
        plan = plan_from_dict(self._plan(), texts)
        with assemble(plan, World.alone("cpu"), folder=tmp_path) as run:
            assert run.load_checkpoint("auto") is None
            for _ in range(STEPS):
                run.step()
                run.save_checkpoint()
            saved_weights = weights(run)
        with assemble(plan, World.alone("cpu"), folder=tmp_path) as run:
            checkpoint = run.load_checkpoint("auto")
            assert checkpoint is not None, "`auto` does not find the run's own checkpoint"
            assert (checkpoint.step, run.num_steps_done) == (STEPS, STEPS), f"{checkpoint.path} is not the newest"
            assert_same_bits(saved_weights, weights(run))

    def test_damaged_checkpoint_is_refused(self, texts: Path, tmp_path: Path) -> None:
        """Truncates and removes each checkpoint file in turn. A refusal must leave the weights unchanged."""
        plan = self._plan()
        stretch(plan, 1, folder=texts, save=tmp_path / "saved")
        files = [path for path in sorted((tmp_path / "saved").rglob("*")) if path.is_file()]
        assert files, "the checkpoint has no files in its folder"
        with assemble(plan_from_dict(plan, texts), World.alone("cpu")) as run:
            initial_weights = weights(run)
            for file in files:
                data = file.read_bytes()
                for damaged_data in (data[: len(data) // 2], None):
                    file.unlink()
                    if damaged_data is not None:
                        file.write_bytes(damaged_data)
                    with pytest.raises(RunError):
                        run.load_checkpoint(tmp_path / "saved")
                    assert_same_bits(initial_weights, weights(run))
                file.write_bytes(data)
            assert run.load_checkpoint(tmp_path / "saved") is not None

    def test_checkpoint_of_another_model_is_refused(self, texts: Path, tmp_path: Path) -> None:
        stretch(self._plan(), 1, folder=texts, save=tmp_path / "saved")
        other_plan = plan_from_dict(self._plan(model__ffn_hidden=32), texts)
        with assemble(other_plan, World.alone("cpu")) as run, pytest.raises(Exception, match="resume-differs"):
            run.load_checkpoint(tmp_path / "saved")


@dataclass
class Stretch:
    """Holds one rank's results of a series of steps. rows: the metrics of each step. weights: the final full weights. states:
    this rank's master weights and optimizer states. notes: the notes of the load.
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
    """Takes `num_steps` steps on this rank. load: the checkpoint to resume from. save: the path of a final checkpoint."""
    result = Stretch()
    with World.join(tables["run"].get("device", "cpu")) as world, assemble(plan_from_dict(tables, folder), world) as run:
        if prepare is not None:
            prepare(run)
        if load is not None:
            restored = run.load_checkpoint(load)
            assert restored is not None, load
            result.notes = restored.notes
        result.rows = [run.step() for _ in range(num_steps)]
        if save is not None:
            run.save_checkpoint(save)
        result.weights = weights(run)
        own_states = states_of(run.stepper.update)
        result.states = {
            f"{state.name}/{state.state}/{state.elements}": state.tensor.detach().clone().cpu() for state in own_states
        }
    return result


def save_at(step: int, path: Path, run: Run) -> None:
    """Makes the run save a checkpoint to `path` after `step`. Use it with `partial` as `prepare` of a `stretch`."""

    def save(row: Row) -> None:
        if row["step"] == step:
            run.save_checkpoint(path)

    run.listeners.append(save)


def assert_same_stretch(reference: Sequence[Stretch], stretches: Sequence[Stretch]) -> None:
    """Asserts that the last rows, weights, master weights and optimizer states of every rank are bit-identical."""
    for expected, actual in zip(reference, stretches, strict=True):
        for expected_row, actual_row in zip(expected.rows[-len(actual.rows) :], actual.rows, strict=True):
            keys = ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped")
            assert [repr(expected_row.get(key)) for key in keys] == [repr(actual_row.get(key)) for key in keys], (
                expected_row,
                actual_row,
            )
        assert_same_bits(expected.weights, actual.weights)
        assert expected.states.keys() == actual.states.keys()
        assert_same_bits(expected.states, actual.states)


def assert_resumed_parity(reference: Stretch, stretches: Sequence[Stretch], precision: str) -> None:
    """Asserts that every rank of `stretches` matches the one-process `reference` within the tolerance of this precision."""
    limit = WEIGHTS[precision]
    for rank, resumed in enumerate(stretches):
        for expected, actual in zip(reference.rows[-len(resumed.rows) :], resumed.rows, strict=True):
            assert (expected["step"], expected["lr"]) == (actual["step"], actual["lr"]), f"rank {rank}: {expected}, {actual}"
            for key in ("loss", "grad_norm"):
                assert math.isclose(expected[key], actual[key], rel_tol=limit), f"rank {rank}: {key}, {expected}, {actual}"
        assert_close_gradients({name: reference.weights[name] for name in resumed.weights}, resumed.weights, limit)
