"""Defines the tests that every checkpointer must pass, for a plugin's tests to inherit.

    class TestPickles(CheckpointerContract):
        checkpoint = {"use": "pickles.folder"}

Runs of a small model are resumed in the same and in another layout, and compared with an uninterrupted run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import assert_resumed_parity, assert_same_run, assert_same_runs, record, weights
from sley_trainer.assemble import assemble

DP = {"parallel__dp": 2, "gradient_handlers": [{"use": "core.each"}]}
STEPS = 2


class CheckpointerContract:
    """Tests a checkpointer. Subclass it, and set `checkpoint` to the table `[checkpoint]`."""

    checkpoint: ClassVar[dict[str, Any]]

    def _plan(self, **changes: Any) -> Tables:
        return small_plan(checkpoint=self.checkpoint, run__steps=2 * STEPS, **changes)

    def test_resumed_run_is_bit_identical(self, texts: Path, tmp_path: Path) -> None:
        """Compares rows, gradients, weights, master weights and optimizer states with an uninterrupted run."""
        plan = self._plan()
        uninterrupted = record(plan, 2 * STEPS, folder=texts)
        record(plan, STEPS, folder=texts, save=tmp_path / "saved")
        assert_same_run(uninterrupted, record(plan, STEPS, folder=texts, load=tmp_path / "saved"))

    def test_two_ranks_resume_in_same_and_other_layout(self, ranks: Callable[..., Ranks], texts: Path, tmp_path: Path) -> None:
        """Expects two ranks to match an uninterrupted run bit for bit, and one process to match it within the tolerance."""
        plan = self._plan()
        two_rank_plan = changed(plan, **DP)
        uninterrupted = ranks(2)(record, two_rank_plan, 2 * STEPS, folder=texts)
        ranks(2)(record, two_rank_plan, STEPS, folder=texts, save=tmp_path / "saved")
        assert_same_runs(uninterrupted, ranks(2)(record, two_rank_plan, STEPS, folder=texts, load=tmp_path / "saved"))
        resumed = record(plan, STEPS, folder=texts, load=tmp_path / "saved")
        assert_resumed_parity(record(plan, 2 * STEPS, folder=texts), [resumed], plan["precision"]["compute"])

    def test_auto_loads_newest_checkpoint(self, texts: Path, tmp_path: Path) -> None:
        """Expects `auto` to load the newest checkpoint, and to return None before the first."""
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
        """Truncates, then removes each checkpoint file in turn. A load must raise RunError and leave the weights unchanged."""
        plan = self._plan()
        record(plan, 1, folder=texts, save=tmp_path / "saved")
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
        record(self._plan(), 1, folder=texts, save=tmp_path / "saved")
        other_plan = plan_from_dict(self._plan(model__ffn_hidden=32), texts)
        with assemble(other_plan, World.alone("cpu")) as run, pytest.raises(Exception, match="resume-differs"):
            run.load_checkpoint(tmp_path / "saved")
