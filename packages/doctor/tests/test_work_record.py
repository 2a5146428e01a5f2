"""Tests that recorded work and waits add up to the step, belong to the right action, and do not change the run."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_doctor import work_record
from sley_doctor.work_record import Location, Spread, WorkRecord, compute_quartiles, read_records, record_work
from sley_testing.plans import small_plan
from sley_testing.runs import fail_once, running
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

pytestmark = pytest.mark.timeout(120)

SLOW_S = 0.05


class Clock:
    """Replaces `time.perf_counter`, so that a busy machine adds nothing. `sleep` adds SLOW_S, and a reading adds 1 us."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self) -> None:
        self.now_s += SLOW_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.sleep()
        return gradients[0], None


def slow_down(run: Run, layer: str, direction: str, clock: Clock) -> None:
    """Makes the forward or the backward of `layer` sleep."""
    (module,) = [candidate.module for candidate in run.layers if candidate.name == layer]
    if direction == "forward":
        module.register_forward_pre_hook(lambda *_: clock.sleep())
    else:
        module.register_forward_hook(lambda _, args, output: Late.apply(output, clock))  # type: ignore[no-untyped-call]


def one_step_windows() -> AbstractContextManager[Any]:
    return patch.multiple(work_record, WINDOW_SHARE=0.0, MIN_WINDOW_STEPS=1)


def recorded(run: Run, folder: Path) -> AbstractContextManager[None]:
    return record_work(run.parts, run.feed, folder, run.notes)


def record_losses(
    tables: Mapping[str, Any], own: Path, folder: Path, slow: tuple[str, str, Clock] | None = None, steps: int = 5
) -> list[float]:
    """Takes steps and returns their losses. slow: the layer that sleeps, its direction, and the clock."""
    with running(tables, own) as run, one_step_windows():
        if slow:
            slow_down(run, *slow)
        with recorded(run, folder):
            return [run.step()["loss"] for _ in range(steps)]


def record_one_process(*args: Any, **options: Any) -> WorkRecord:
    record_losses(*args, **options)
    (record,) = read_records(args[2])
    return record


def test_work_and_waits_add_up_to_the_step(texts: Path, tmp_path: Path) -> None:
    record = record_one_process(small_plan(), texts, tmp_path)
    assert [(window.first, window.last) for window in record.windows] == [(step, step) for step in range(1, 6)]
    for window in record.windows[:-1]:
        work = sum(spread.median for spread in window.work.values())
        assert work == pytest.approx(window.seconds.median, rel=1e-3, abs=1e-5)
        assert all(spread.median >= 0 for spread in window.work.values()), window.work
        assert {"F0", "B0", "C0", Location.UPDATE, Location.DEVICE, Location.DATA} <= window.work.keys()


@pytest.mark.sample(2)
@pytest.mark.parametrize("slow", ["forward", "backward"])
@pytest.mark.parametrize("layer", ["embed", "blocks.1"])
def test_slow_work_counts_for_its_action(slow: str, layer: str, clock: Clock, texts: Path, tmp_path: Path) -> None:
    """Each of four microbatches sleeps."""
    record = record_one_process(small_plan(), texts, tmp_path, slow=(layer, slow, clock), steps=3)
    for window in record.windows:
        for location, direction in {"F0": "forward", "B0": "backward"}.items():
            assert window.work[location].median == pytest.approx(4 * SLOW_S * (slow == direction), abs=1e-3)


def test_recomputation_counts_for_the_backward(clock: Clock, texts: Path, tmp_path: Path) -> None:
    tables = small_plan(activations={"use": "core.recompute"})
    for window in record_one_process(tables, texts, tmp_path, slow=("blocks.0", "forward", clock), steps=3).windows:
        for location in ("F0", "B0"):
            assert window.work[location].median == pytest.approx(4 * SLOW_S, abs=1e-3)


def test_recording_changes_no_bit_and_leaves_no_callback(texts: Path, tmp_path: Path) -> None:
    with running(small_plan(), texts) as run:
        plain = [run.step()["loss"] for _ in range(5)]
    assert record_losses(small_plan(), texts, tmp_path) == plain
    with running(small_plan(), texts) as run:
        with recorded(run, tmp_path / "again"):
            run.step()
        assert run.groups.progress.step_progress.on_entry is run.groups.progress.on_wait is None


def test_an_evaluation_is_separate_from_work_between_steps(clock: Clock, texts: Path, tmp_path: Path) -> None:
    plan = small_plan(run__steps=3, data__held_out=0.5, evaluation={"every": 1, "steps": 1})
    with one_step_windows(), assemble(plan_from_dict(plan, texts), World.alone("cpu"), folder=tmp_path) as run:
        assert run.held_out is not None
        run.layers[0].module.register_forward_pre_hook(lambda module, _: None if module.training else clock.sleep())
        with recorded(run, tmp_path):
            run.train()
            assert run.parts.groups.progress.step_progress.step == 3, "an evaluation's batches are no steps"
    (record,) = read_records(tmp_path)
    for window in record.windows[1:]:
        assert window.work[Location.EVALUATION].median >= SLOW_S
        assert window.work[Location.BETWEEN].median < SLOW_S


def test_a_step_that_fails_is_not_recorded(texts: Path, tmp_path: Path) -> None:
    with running(small_plan(), texts) as run, recorded(run, tmp_path):
        run.step()
        run.step()
        fail_once(run)
    (record,) = read_records(tmp_path)
    assert [(window.first, window.last) for window in record.windows] == [(1, 2)]


def test_a_failed_write_ends_only_the_recording(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file, not a folder", "utf-8")
    with running(small_plan(), texts) as run:
        with one_step_windows(), recorded(run, tmp_path):
            for _ in range(3):
                run.step()
        (note,) = [note for note in run.notes if "not recorded" in note]
    assert "work/rank-0.jsonl" in note


def test_a_rank_waits_for_a_slow_rank(ranks: Any, texts: Path, tmp_path: Path) -> None:
    """Rank 1 sleeps between two steps."""
    ranks(2)(record_slow_listener, small_plan(parallel={"dp": 2}), texts, tmp_path)
    waiting, slow = read_records(tmp_path)
    assert all(window.work["between"].median > SLOW_S for window in slow.windows[:-1])
    assert min(window.work["between"].median for window in waiting.windows) < SLOW_S
    assert max(window.waits.median for window in waiting.windows) > 0.8 * SLOW_S


def record_slow_listener(tables: Mapping[str, Any], own: Path, folder: Path) -> None:
    with running(tables, own) as run, one_step_windows(), recorded(run, folder):
        if run.world.rank == 1:
            run.listeners.append(lambda _: time.sleep(SLOW_S))
        for _ in range(5):
            run.step()


@pytest.mark.parametrize(
    ("values", "quartiles"), [([3.0], (3, 3, 3)), ([5.0, 1.0, 2.0, 4.0, 3.0], (2, 3, 4)), ([2.0, 1.0], (1, 1, 2))]
)
def test_quartiles(values: list[float], quartiles: tuple[float, ...]) -> None:
    assert compute_quartiles(values) == Spread(*quartiles)
