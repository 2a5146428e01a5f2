"""Small optimizer states lie together once they have left, so that few copies move them, with the same bits."""

from __future__ import annotations

import pytest
import torch
from odd_parts import PLAN
from parking import BETWEEN, EVERYTHING, running, sha

from sley_core.comm.copies import HostStream
from sley_core.engine.update import states_of

pytestmark = pytest.mark.timeout(120)

MANY = {**PLAN, "model": {"factory": "odd_parts:many"}}
STATES = [{"use": "memory.optimizer_states"}]


def counted(monkeypatch, offload, moves):
    """The digest of two steps of 501 parameters, and the copies of the last cycle or step."""
    copies = []
    copy = HostStream.copy
    monkeypatch.setattr(HostStream, "copy", lambda stream, *args: (copies.append(1), copy(stream, *args)))
    with running({**MANY, "offload": offload}, guards=False) as run:  # of some thousand tensors
        for _ in range(2):
            copies.clear()
            run.step()
            moves(run)
        return sha(run), len(copies)


def test_500_small_parameters_have_few_copies_in_each_direction(monkeypatch):
    """One for the small states of a bucket, one for each large state; 2004 where each leaves by itself."""

    def around(run):
        run.memory.offload().wait()
        run.memory.onload().wait()

    plain, _ = counted(monkeypatch, [], lambda run: None)
    found, copies = counted(monkeypatch, STATES, around)
    assert found == plain
    assert copies == 2 * (1 + 2)
    small = [{**STATES[0], "bucket_mb": 0.1}]  # of the states' 256 KB, in places of 256 bytes
    found, copies = counted(monkeypatch, small, around)
    assert found == plain
    assert copies == 2 * (3 + 2)
    found, copies = counted(monkeypatch, [{**BETWEEN[0], "bucket_mb": 64.0}], lambda run: None)
    assert found == plain
    assert copies == 2 * (1 + 2)


def test_a_state_of_which_a_program_has_a_view_stays_where_it_is():
    """What looks at it goes on to see the optimizer's numbers, while they are here."""
    with running({**PLAN, "offload": EVERYTHING}) as run:
        run.step()
        states = [one.tensor for one in states_of(run.stepper.update) if one.tensor.dim()]
        view = states[0].view(-1)
        whole = sum(tensor.nbytes for tensor in states)
        objects = list(map(id, states))
        for _ in range(3):
            run.memory.offload()
            run.memory.onload()
            run.step()
            assert view.data_ptr() == states[0].data_ptr()
        storages = {tensor.untyped_storage().data_ptr() for tensor in states}
        assert len(storages) == 2, "one for the state with a view, one for all others"
        assert [id(one.tensor) for one in states_of(run.stepper.update) if one.tensor.dim()] == objects
        assert whole <= run.memory.bytes["optimizer_states"] <= whole + 256 * len(states)
        assert torch.equal(view, states[0].view(-1))
