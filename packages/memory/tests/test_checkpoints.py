"""Tests that a checkpoint of a run with offloaded memory equals that of a run without offload, and that loads restore it."""

import pytest
import torch
from odd_parts import PLAN
from parking import BETWEEN, EVERYTHING, running, state_digest

from sley_checkpoint.reader import read
from sley_core.errors import RunError, StateError

BF16 = {**PLAN, "precision": {"compute": "bf16"}}
ON_HOST = [{"use": "memory.host_optimizer"}]
OFFLOADS = {
    "everything": EVERYTHING,
    "between steps": BETWEEN,
    "on the host": ON_HOST,
    "on the host, without weights": [*ON_HOST, {"use": "memory.weights"}],
}

pytestmark = pytest.mark.timeout(120)


@pytest.mark.sample(1)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_checkpoints_of_offloaded_memory_resume_bit_for_bit(own, tmp_path, offload):
    with running(BF16) as run:
        run.step()
        run.step()
        run.save_checkpoint(tmp_path / "here")
    tables = {**BF16, "offload": OFFLOADS[offload]}
    with running(tables) as run:
        run.step()
        run.step()
        run.memory.offload().wait()
        before, where = sum(one.copied_in for one in run.memory.report.values()), dict(run.memory.where)
        run.save_checkpoint(tmp_path / "away")
        assert sum(one.copied_in for one in run.memory.report.values()) == before, "nothing comes to the device for it"
        assert run.memory.where == where
        run.memory.onload()
        run.step()
        wanted = state_digest(run)
    here, away = read(tmp_path / "here"), read(tmp_path / "away")
    assert set(here) == set(away)
    is_same_run = OFFLOADS[offload][0] not in ON_HOST  # the odd parameters of this model are stepped by other kernels there
    if is_same_run:
        assert all(here[name].equal(away[name]) for name in here)
    for path in ("here", "away") if is_same_run else ("away",):
        with running(tables) as run:
            run.load_checkpoint(tmp_path / path)
            run.step()
            assert state_digest(run) == wanted
        with running(tables) as run:
            run.step()
            run.load_checkpoint(tmp_path / path)
            run.step()
            assert state_digest(run) == wanted, "loading after a step"


def test_an_offload_does_not_change_a_background_save(own, tmp_path):
    """The memory is offloaded while it is being written."""
    tables = {**BF16, "offload": EVERYTHING, "checkpoint": {"every_steps": 1, "folder": str(tmp_path / "all")}}
    with running(BF16) as run:
        run.step()
        run.save_checkpoint(tmp_path / "still")
    with running(tables) as run:
        run.step()
        run.memory.offload().wait()
        run.memory.onload().wait()
        run.step()
    still, found = read(tmp_path / "still"), read(tmp_path / "all" / "step-00000001")
    assert all(still[name].equal(found[name]) for name in still)


def by_copy(parameter, value):
    with torch.no_grad():
        parameter.copy_(value)


def by_data(parameter, value):
    parameter.data = torch.full_like(parameter.data, value)


@pytest.mark.parametrize("write", [by_copy, by_data])
@pytest.mark.parametrize("offload", ["everything", "on the host, without weights"])
def test_writes_before_an_offload_are_saved(own, tmp_path, offload, write):
    with running({**BF16, "offload": OFFLOADS[offload]}) as run:
        run.step()
        write(run.registry["second.across"].parameter, 0.25)
        run.memory.offload().wait()
        assert dict(run.memory.host("masters"))["second.across"].eq(0.25).all()
        run.save_checkpoint(tmp_path / "away")
        assert read(tmp_path / "away")["weights/second.across"].eq(0.25).all()
        with pytest.raises(StateError, match="loading a checkpoint needs the run's weights"):
            run.load_checkpoint(tmp_path / "away")


@pytest.mark.parametrize("write", [by_copy, by_data])
def test_writes_while_masters_are_away_are_detected(own, tmp_path, write):
    """The master weights have the written values only after they are onloaded."""
    with running({**BF16, "offload": EVERYTHING}) as run:
        run.step()
        run.memory.offload("masters").wait()
        write(run.registry["second.across"].parameter, 0.25)
        run.memory.offload("weights").wait()
        with pytest.raises(RunError, match="after a program has written weights"):
            run.save_checkpoint(tmp_path / "away")
        with pytest.raises(StateError, match="after a program has written weights"):
            run.memory.host("masters")
        run.memory.onload()
        assert dict(run.memory.host("masters"))["second.across"].eq(0.25).all()
