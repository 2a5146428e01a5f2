"""A layer that is to run again finds its inputs as they were."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sley_core.engine.call import Recompute, build_recompute
from sley_core.engine.parts import MicroStep, Phase
from sley_core.errors import RunError
from sley_core.plugin import RecomputeConfig

MICRO = MicroStep(0, 0, Phase.TRAIN, 0, 0)


@dataclass
class State:
    hidden: Any


FORMS = {
    "tensor": (lambda h: h, lambda s: s),
    "tuple": (lambda h: (None, h), lambda s: s[1]),
    "dict": (lambda h: {"a": [h, 1]}, lambda s: s["a"][0]),
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
    with pytest.raises(RunError, match=r"in place to the input of layer 'blocks\.1'") as caught:
        Recompute(frozenset({"blocks.1"})).call("blocks.1", lambda one: inner(take(one).mul_(0.5)).tanh(), (state,), {}, MICRO)
    assert caught.value.diagnostics[0].code == "recompute-in-place"


def test_what_a_later_layer_writes_on_is_refused_when_it_is_needed(inner):
    state = {"hidden": torch.ones(3, 2, requires_grad=True) + 1}
    output = Recompute(frozenset({"a"})).call("a", lambda one: inner(one["hidden"]).tanh(), (state,), {}, MICRO)
    state["hidden"].mul_(2)
    with pytest.raises(RunError, match="in place to the input of layer 'a'"):
        output.sum().backward()


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


def _put_key(state, value):
    state["hidden"] = value


def _output(hidden):
    utils = pytest.importorskip("transformers.utils")

    @dataclass
    class Output(utils.ModelOutput):
        hidden: Any = None

    return Output(hidden=hidden)


def _nested(hidden):
    inner = {"hidden": hidden}
    return {"a": (inner, [inner])}  # one dict in two places


WRITTEN = {
    "dict": (lambda h: {"hidden": h}, lambda s: s["hidden"], _put_key),
    "list": (lambda h: [h], lambda s: s[0], lambda s, value: s.insert(0, value)),
    "dataclass": (State, lambda s: s.hidden, lambda s, value: setattr(s, "hidden", value)),
    "slots": (Slots, lambda s: s.hidden, lambda s, value: setattr(s, "hidden", value)),
    "output": (_output, lambda s: s.hidden, lambda s, value: setattr(s, "hidden", value)),
    "nested": (_nested, lambda s: s["a"][0]["hidden"], lambda s, value: _put_key(s["a"][1][0], value)),
    "object of a dict": (lambda h: State({"hidden": h}), lambda s: s.hidden["hidden"], lambda s, v: _put_key(s.hidden, v)),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_a_layer_may_put_its_result_into_what_it_was_given(form, inner):
    """Its second run begins with what was there before the first, and so does a third."""
    pack, take, put = WRITTEN[form]
    found = []
    for names in ({"a", "b"}, set()):
        policy, leaf = Recompute(frozenset(names)), torch.linspace(-1, 1, 6).reshape(3, 2).requires_grad_()

        def layer(state, take=take, put=put):
            put(state, inner(take(state)).tanh())
            return state

        state = policy.call("a", layer, (pack(leaf + 1),), {}, MICRO)
        loss = take(policy.call("b", layer, (state,), {}, MICRO)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append((leaf.grad, inner.weight.grad))
        inner.zero_grad()
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h.data.mul_(0.5),
        lambda h: h.unsafe_chunk(2, -1)[1].tanh_(),
        lambda h: torch.from_numpy(h.detach().numpy()).add_(1),
    ],
    ids=["data", "unsafe_chunk", "numpy"],
)
def test_a_write_that_no_counter_counts_is_refused_in_the_first_step(write, inner):
    policy = Recompute(frozenset({"a"}))
    policy.begin([], Phase.TRAIN)

    def layer(h):
        write(h)
        return inner(h).tanh()

    with pytest.raises(RunError, match="in place to the input of layer 'a'"):
        policy.call("a", layer, (torch.ones(3, 2, requires_grad=True) + 1,), {}, MICRO)


def test_the_fraction_is_rounded_to_whole_blocks_as_the_plan_writes_it():
    """Halves up, also where the float is a little less than what is written."""
    for fraction, count, due in [(0.0, 9, 0), (0.5, 3, 2), (0.285, 100, 29), (0.145, 100, 15), (0.14, 10, 1), (1.0, 7, 7)]:
        names = ["embed", *(f"blocks.{at}" for at in range(count)), "head"]
        assert build_recompute(RecomputeConfig(fraction=fraction), names).names == frozenset(names[1 : 1 + due]), fraction
