"""The optimizers of a run that compiles nothing step as torch's do."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch

from sley_core.optim.build import compiler_free_class


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9, "foreach": True})]
)
def test_it_steps_as_torchs_own_with_hooks_and_closure(kind, options):
    found = []
    for each in (kind, compiler_free_class(kind)):
        parameter = torch.nn.Parameter(torch.arange(4.0))
        optimizer, called = each([parameter], lr=0.1, **options), []
        optimizer.register_step_pre_hook(lambda *_, called=called: called.append("before"))
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("after"))

        def closure(parameter=parameter, optimizer=optimizer):
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert called == ["before", "after"] * 3
        assert type(deepcopy(optimizer)) is type(pickle.loads(pickle.dumps(optimizer.__class__([parameter])))) is kind
        found.append((losses, parameter.detach().clone(), optimizer.state_dict()["state"][0], type(optimizer).__name__))
    (losses, weights, state, name), (our_losses, our_weights, our_state, our_name) = found
    assert (our_losses, our_name) == (losses, name)
    assert torch.equal(our_weights, weights)
    assert our_state.keys() == state.keys()
    assert all(torch.equal(our_state[key], state[key]) for key in state if isinstance(state[key], torch.Tensor))
