"""A layer that is to run again finds its inputs as they were."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sley_core.engine.activations import Recompute
from sley_core.engine.step_state import MicroStep, Phase
from sley_core.errors import RunError

MICRO = MicroStep(0, 0, Phase.TRAIN, 0, 0)


@dataclass
class State:
    hidden: Any


FORMS = {
    "tensor": (lambda h: h, lambda s: s),
    "tuple": (lambda h: (None, h), lambda s: s[1]),
    "dict": (lambda h: {"a": [h, 1]}, lambda s: s["a"][0]),
    "ordered": (lambda h: OrderedDict(a=h), lambda s: s["a"]),
    "dataclass": (State, lambda s: s.hidden),
    "view": (lambda h: (h, h[..., :2]), lambda s: s[1]),
}


@pytest.fixture
def inner():
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_that_writes_on_what_it_is_given_is_refused_by_name(form, inner):
    """torch looks at tensors alone: in a tuple or a dict the second forward would begin with what the first one wrote."""
    pack, take = FORMS[form]
    state = pack(torch.ones(3, 2, requires_grad=True) + 1)
    with pytest.raises(RunError, match=r"the input of layer 'blocks\.1' is written on") as caught:
        Recompute(frozenset({"blocks.1"})).call(
            "blocks.1", lambda one: inner(take(one).mul_(0.5)).tanh(), (state,), {}, MICRO
        )
    assert caught.value.diagnostics[0].code == "recompute-in-place"


@pytest.mark.parametrize("form", FORMS)
def test_what_a_layer_makes_itself_it_may_write_on(form, inner):
    pack, take = FORMS[form]
    found = []
    for policy in (Recompute(frozenset({"a"})), Recompute(frozenset())):
        leaf = torch.ones(3, 2, requires_grad=True)

        def layer(state, scale, take=take):
            return inner(take(state) * scale).mul_(2).relu_()

        policy.call("a", layer, (pack(leaf + 1),), {"scale": torch.tensor(0.5)}, MICRO).sum().backward()
        found.append((leaf.grad, inner.weight.grad))
        inner.weight.grad = None
    torch.testing.assert_close(*found)


def test_a_batch_field_is_an_input_too(inner):
    with pytest.raises(RunError, match="the input of layer 'a' is written on"):
        Recompute(frozenset({"a"})).call(
            "a", lambda tokens: inner(tokens.add_(1)), (), {"tokens": torch.ones(2)}, MICRO
        )


def test_what_a_later_layer_writes_on_is_refused_when_it_is_needed(inner):
    state = {"hidden": torch.ones(3, 2, requires_grad=True) + 1}
    output = Recompute(frozenset({"a"})).call("a", lambda one: inner(one["hidden"]).tanh(), (state,), {}, MICRO)
    state["hidden"].mul_(2)
    with pytest.raises(RunError, match="the input of layer 'a' is written on"):
        output.sum().backward()
