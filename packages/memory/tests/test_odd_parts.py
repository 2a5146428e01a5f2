"""Tests that offloads keep parameters, buffers, hooks and owners of every kind."""

import pytest
import torch
from odd_parts import PLAN
from parking import BETWEEN, EVERYTHING, offload_and_onload, running, state_digest

pytestmark = pytest.mark.timeout(120)


def train_digest(offload, moves, num_steps=4):
    """Returns the digest of a run in which one weight is trained from the third step on, and the properties of its
    parameters.
    """
    with running({**PLAN, "precision": {"compute": "bf16"}, "offload": offload}) as run:
        for step in range(num_steps):
            if step == 2:
                run.layers[0].module.late.requires_grad_(True)
            run.step()
            if moves:
                offload_and_onload(run)
        shapes = [
            (param.name, one.shape, one.stride(), one.requires_grad, one.is_leaf, type(one))
            for param in run.registry
            for one in [param.parameter]
        ]
        first, second = (layer.module for layer in run.layers)
        assert first.linear.weight is second.tied
        assert first.one is first.same
        return state_digest(run), shapes


def test_parameters_and_buffers_of_every_kind():
    """Parameters are tied, frozen, unfrozen in step 3, empty, scalar or transposed. Buffers include integers and shared
    tensors.
    """
    plain = train_digest([], moves=False)
    assert train_digest(EVERYTHING, moves=True) == plain
    assert train_digest(BETWEEN, moves=False) == plain


def test_foreign_memory_stays_with_a_warning():
    """The memory belongs to numpy, or is shared between processes."""
    numpy = pytest.importorskip("numpy")

    def run_steps(moves):
        with running({**PLAN, "offload": EVERYTHING}) as run:
            first = run.layers[0].module
            first.frozen.data = torch.from_numpy(numpy.arange(6, dtype="float32"))
            first.unsaved.share_memory_()
            run.step()
            if moves:
                with pytest.warns(RuntimeWarning, match=r"stays on the device, since torch does not own its memory"):
                    run.memory.offload().wait()
                assert run.memory.bytes["weights"] == 24
                assert run.memory.bytes["buffers"] == 24
                run.memory.onload()
            run.step()
            return state_digest(run)

    assert run_steps(True) == run_steps(False)


def test_states_that_a_program_replaces_while_they_are_away():
    """The new tensors count, not the offloaded ones, as after an optimizer's `load_state_dict`."""
    with running({**PLAN, "offload": EVERYTHING}) as run:
        run.step()
        (parameter,) = [one.parameter for one in run.stepper.update.masters.local_params if one.name == "second.across"]
        state = run.stepper.update.optimizer.state[parameter]
        run.memory.offload("optimizer_states")
        state["exp_avg"] = torch.full(state["exp_avg"].shape, 0.25)
        run.memory.onload()
        offload_and_onload(run)
        assert (state["exp_avg"] == 0.25).all()
        assert state["exp_avg_sq"].isfinite().all()
