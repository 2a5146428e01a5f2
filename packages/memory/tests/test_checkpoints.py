"""A checkpoint of a run whose memory is away is the one of a run whose memory is here, and a load puts it where it belongs."""

from __future__ import annotations

import pytest
from odd_parts import PLAN
from parking import BETWEEN, EVERYTHING, running, sha

from sley_core.checkpoint import read
from sley_core.errors import StateError

BF16 = {**PLAN, "precision": {"compute": "bf16"}}
OFFLOADS = {"everything": EVERYTHING, "between steps": BETWEEN, "on the host": [{"use": "memory.host_optimizer"}]}

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_what_is_away_is_saved_where_it_lies_and_goes_on_bit_for_bit(own, tmp_path, offload):
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
        wanted = sha(run)
    here, away = read(tmp_path / "here"), read(tmp_path / "away")
    assert set(here) == set(away)
    is_same_run = offload != "on the host"  # the odd parameters of this model are stepped by other kernels there
    if is_same_run:
        assert all(here[name].equal(away[name]) for name in here)
    for path in ("here", "away") if is_same_run else ("away",):
        with running(tables) as run:
            run.load_checkpoint(tmp_path / path)
            run.step()
            assert sha(run) == wanted
        with running(tables) as run:
            run.step()
            run.load_checkpoint(tmp_path / path)
            run.step()
            assert sha(run) == wanted, "loading after a step"


def test_states_lie_in_memory_as_their_parameters_do(own, tmp_path):
    """One of these is transposed: a fused optimizer would step it with the moments of other elements."""
    with running(PLAN) as run:
        run.step()
        run.save_checkpoint(tmp_path / "saved")
        run.step()
        wanted = sha(run)
    with running(PLAN) as run:
        run.load_checkpoint(tmp_path / "saved")
        run.step()
        assert sha(run) == wanted


def test_a_save_beside_training_outlives_an_offload(own, tmp_path):
    """Memory leaves while it is being written."""
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


def test_weights_that_were_written_and_left_are_told(own, tmp_path):
    """Their masters do not know of it yet."""
    with running({**BF16, "offload": EVERYTHING}) as run:
        run.step()
        run.book.trainable[0].parameter.detach().add_(1.0)
        run.memory.offload("weights").wait()
        with pytest.raises(Exception, match="weights"):
            run.save_checkpoint(tmp_path / "away")
        with pytest.raises(StateError, match="loading a checkpoint needs the run's weights"):
            run.load_checkpoint(tmp_path / "away")
