"""A run that compiles nothing starts without torch's compiler, and its optimizers step as torch's do."""

from __future__ import annotations

import pickle
import subprocess
import sys
from copy import deepcopy

import pytest
import torch

from sley_core.optim.build import compiler_free_class

TRAINS = """
import sys
from pathlib import Path
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan, write_texts

write_texts(Path())
with World.alone("cpu") as world, assemble(plan_from_dict(small_plan()), world) as run:
    run.step()
print(*(name for name in ("torch._dynamo", "sympy") if name in sys.modules))
"""


def test_a_step_imports_no_compiler(tmp_path):
    """In a new process: 850 modules are a second of every start."""
    found = subprocess.run([sys.executable, "-c", TRAINS], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout.split()) == (0, []), found.stdout + found.stderr


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
