"""Defines the tests that every offload manager and checkpointer must pass, for a plugin's tests to inherit.

    class TestMine(OffloadManagerContract):
        offload = {"use": "mine.manager"}

    class TestPickles(CheckpointerContract):
        checkpoint = {"use": "pickles.folder"}

Offload managers are tested with a small bf16 decoder with master weights in one process, on a device that copies at random
times (`drawn_copies`). The target of a copy contains NaN until the copy happens, and a missing wait always raises an error.
Checkpointers resume runs of a small model in the same and in another layout, which are compared with an uninterrupted run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sley_core.comm.world import World
from sley_core.errors import RunError, StateError
from sley_core.memory import COPIED_PARTS, OffloadManager, Part, Where
from sley_core.plan.load import plan_from_dict
from sley_testing.drawn_copies import DrawnDevice
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import RunRecord, assert_resumed_parity, assert_same_run, assert_same_runs, fail_once, record, weights
from sley_trainer.assemble import assemble
from sley_trainer.loop import Row
from sley_trainer.run import Run

NUM_STEPS = 2  # optimizer steps of a run; checkpoints are saved after this number of steps
PLAN = small_plan(model__num_layers=1, batch__micro_size=4, precision__compute="bf16")  # a plan with two microbatches


class OffloadManagerContract:
    """Tests an offload manager. Subclass it, and set `offload` to an `[[offload]]` table. orders: the number of copy orders."""

    offload: ClassVar[Tables]
    orders: ClassVar[int] = 2

    def test_round_trip_preserves_all_bits(self, texts: Path) -> None:
        """Offloads and reloads all movable parts after each step, in random copy orders. One step fails. Parts on the host must
        be bit-identical to parts on the device, and the run must be bit-identical to a run without the manager.
        """
        with assemble(plan_from_dict(PLAN, texts), World.alone("cpu")) as run:
            rows = _train(run, lambda: None)
            expected = _copy_tensors(run, COPIED_PARTS)
        for order in range(self.orders):
            with self._run(texts, order) as run:
                offloaded_rows = _train(run, partial(self._round_trip, run))
                for key in ("loss", "grad_norm"):
                    values, offloaded_values = ([row[key] for row in run_rows] for run_rows in (rows, offloaded_rows))
                    assert offloaded_values == values, f"order {order}: {key} is {offloaded_values}, not {values}"
                assert_same_bits(expected, _copy_tensors(run, COPIED_PARTS))

    def test_use_of_offloaded_part_is_refused(self, texts: Path) -> None:
        """Expects a step to raise StateError `memory-away`, which names the offloaded part, and to succeed after a reload."""
        with self._run(texts) as run:
            run.step()
            for part in self._movable_parts(run):
                run.memory.offload(part).wait()
                with pytest.raises(StateError, match=part.replace("_", " ")) as caught:
                    run.step()
                assert caught.value.diagnostics[0].code == "memory-away", caught.value
                run.memory.onload(part)
            run.step()

    def test_manager_reports_its_moves(self, texts: Path) -> None:
        """Checks the reported location, copied bytes and freed device bytes of each part. A repeated move must copy nothing."""
        with self._run(texts) as run:
            run.step()
            (manager,) = run.memory.managers
            for part in self._movable_parts(run):
                num_bytes = run.memory.bytes[part]
                bits_before = _copy_tensors(run, [part]) if part in COPIED_PARTS else {}
                for move, expected in ((run.memory.offload, Where.AWAY), (run.memory.onload, Where.HERE)):
                    move(part).wait()
                    location, num_copied = run.memory.where[part], _num_copied(manager, part)
                    assert location is expected, f"after {move.__name__}, {part} are reported as {location.value}"
                    move(part).wait()
                    num_copied_again = _num_copied(manager, part) - num_copied
                    assert not num_copied_again, f"{part}: a second {move.__name__} copies {num_copied_again} bytes"
                num_copied, num_freed = manager.moved(part).copied_out, manager.moved(part).given_back
                assert num_freed >= num_bytes, f"{part} had {num_bytes} bytes, but {num_freed} are reported as given back"
                is_copied = part not in COPIED_PARTS or num_copied >= num_bytes
                assert is_copied, f"{part}: {num_copied} of {num_bytes} bytes are reported as copied"
                assert_same_bits(bits_before, _copy_tensors(run, [part]) if part in COPIED_PARTS else {})

    def test_run_closes_while_memory_is_offloaded(self, texts: Path) -> None:
        """Expects `close` of a run to reload the weights of its modules with the same bits."""
        with self._run(texts) as run:
            run.step()
            expected = weights(run)
            if self._movable_parts(run):
                run.memory.offload()
            run.close()
            freed_names = [param.name for param in run.registry if not param.parameter.untyped_storage().nbytes()]
            assert not freed_names, f"after the run these weights have no memory: {freed_names[:3]}"
            changed_names = [param.name for param in run.registry if not torch.equal(param.parameter, expected[param.name])]
            assert not changed_names, f"after the run these weights have different bits: {changed_names[:3]}"

    @contextmanager
    def _run(self, texts: Path, order: int = 0) -> Iterator[Run]:
        """Yields a run in this process with the tested manager. order: the random seed of the device's copies."""
        device, plan = DrawnDevice(copy_seed=order), plan_from_dict(changed(PLAN, offload=[self.offload]), texts)
        with device.watching(), World.alone(device) as world, assemble(plan, world) as run:
            yield run

    def _movable_parts(self, run: Run) -> list[Part]:
        """Returns the parts on the device that the manager can move. Omits empty parts, and pools, which are only trimmed."""
        (manager,) = run.memory.managers
        return [
            part
            for part, location in run.memory.where.items()
            if location is Where.HERE and part in manager.parts and part != "pools" and run.memory.bytes[part]
        ]

    def _round_trip(self, run: Run) -> None:
        """Offloads and reloads all movable parts. Asserts that the offload frees device memory, and that no bit changes."""
        parts = self._movable_parts(run)
        if not parts:
            return
        copied_parts = [part for part in parts if part in COPIED_PARTS]
        bits_before = _copy_tensors(run, copied_parts)
        run.memory.offload(*parts).wait()
        for part in parts:
            num_bytes = run.memory.bytes[part]
            assert not num_bytes, f"{part} are offloaded, but {num_bytes} bytes of them are still on the device"
        assert_same_bits(bits_before, _copy_tensors(run, copied_parts))
        run.memory.onload(*parts)
        run.memory.require("the contract", parts)
        assert_same_bits(bits_before, _copy_tensors(run, copied_parts))


def _train(run: Run, between_steps: Callable[[], None]) -> list[Row]:
    """Takes NUM_STEPS steps, with a failing step before the last. Returns the rows of the NUM_STEPS steps."""
    rows = []
    for number in range(NUM_STEPS):
        if number == NUM_STEPS - 1:
            fail_once(run)
            between_steps()
        rows.append(run.step())
        between_steps()
    return rows


def _num_copied(manager: OffloadManager, part: Part) -> int:
    stats = manager.moved(part)
    return stats.copied_out + stats.copied_in


def _copy_tensors(run: Run, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    return {f"{part} {name}": value.clone() for part in parts for name, value in run.memory.host(part)}


def _record_and_save(plan: Tables, texts: Path, path: Path) -> RunRecord:
    """Returns the record of an uninterrupted run on this rank. Then takes NUM_STEPS steps in another run, and saves it."""
    uninterrupted = record(plan, 2 * NUM_STEPS, folder=texts)
    record(plan, NUM_STEPS, folder=texts, save=path)
    return uninterrupted


class CheckpointerContract:
    """Tests a checkpointer. Subclass it, and set `checkpoint` to the `[checkpoint]` table."""

    checkpoint: ClassVar[Tables]

    def _plan(self, **changes: Any) -> Tables:
        return small_plan(checkpoint=self.checkpoint, run__steps=2 * NUM_STEPS, **changes)

    def test_resumed_run_is_bit_identical(self, texts: Path, tmp_path: Path) -> None:
        """Compares rows, gradients, weights, master weights and optimizer states with an uninterrupted run."""
        plan = self._plan()
        uninterrupted = record(plan, 2 * NUM_STEPS, folder=texts)
        record(plan, NUM_STEPS, folder=texts, save=tmp_path / "saved")
        assert_same_run(uninterrupted, record(plan, NUM_STEPS, folder=texts, load=tmp_path / "saved"))

    def test_two_ranks_resume_in_same_and_other_layout(self, ranks: Callable[..., Ranks], texts: Path, tmp_path: Path) -> None:
        """Expects two ranks that resume to match an uninterrupted run bit for bit, and one process that resumes to be close."""
        plan = self._plan()
        two_rank_plan = changed(plan, parallel__dp=2, gradient_handlers=[{"use": "core.each"}])
        uninterrupted = ranks(2)(_record_and_save, two_rank_plan, texts, tmp_path / "saved")
        assert_same_runs(uninterrupted, ranks(2)(record, two_rank_plan, NUM_STEPS, folder=texts, load=tmp_path / "saved"))
        resumed = record(plan, NUM_STEPS, folder=texts, load=tmp_path / "saved")
        assert_resumed_parity(record(plan, 2 * NUM_STEPS, folder=texts), [resumed], plan["precision"]["compute"])

    def test_auto_loads_newest_checkpoint(self, texts: Path, tmp_path: Path) -> None:
        """Expects `load_checkpoint("auto")` to load the newest checkpoint, and to return None if there is none."""
        plan = plan_from_dict(self._plan(), texts)
        with assemble(plan, World.alone("cpu"), folder=tmp_path) as run:
            assert run.load_checkpoint("auto") is None
            for _ in range(NUM_STEPS):
                run.step()
                run.save_checkpoint()
            saved_weights = weights(run)
        with assemble(plan, World.alone("cpu"), folder=tmp_path) as run:
            checkpoint = run.load_checkpoint("auto")
            assert checkpoint is not None, "`auto` does not find the run's own checkpoint"
            assert (checkpoint.step, run.num_steps_done) == (NUM_STEPS, NUM_STEPS), f"{checkpoint.path} is not the newest"
            assert_same_bits(saved_weights, weights(run))

    def test_damaged_checkpoint_is_refused(self, texts: Path, tmp_path: Path) -> None:
        """Truncates each checkpoint file, then removes it. A load must raise RunError and leave the weights unchanged."""
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
