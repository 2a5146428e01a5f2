"""What no rank put values into refuses to be read, by name, in the forward that reads it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sley_core.data.dataset import DataInfo, Field
from sley_core.engine.refusals import refuse_left_over
from sley_core.errors import RunError
from sley_core.model.build import build_on_meta
from sley_core.model.values import HostModel
from sley_testing.habits import Embed


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.scale = self.linear.weight.norm()

    def forward(self, tokens):
        return F.linear(tokens, self.linear.weight)


class Second(First):
    def __init__(self, first):
        super().__init__()
        self.others = [first]

    def forward(self, hidden):
        return self.others[0].linear(hidden)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.scale = self.linear.weight.norm()

    def forward(self, hidden):
        return self.linear(hidden) * self.scale


def layers(data):
    return [Embed(data.vocab_size, 8), Scaled()]


class Given:
    name = "given"

    def build(self, data):
        first = First()
        return [("first", first), ("second", Second(first))]


def rank_of(owned):
    model = build_on_meta(Given(), DataInfo({"tokens": Field("float32")}), 0)
    host = HostModel(model)
    host.drop_others(host.place(owned, dtype=torch.float32, device=torch.device("cpu")), owned)
    refuse_left_over(model, [layer for layer in model.layers if layer.name in owned])
    return model


def test_a_hidden_module_of_another_rank_refuses_to_be_read():
    """torch's product of a tensor with one on meta has any numbers at all, without an error."""
    second = rank_of({"second"})["second"].module
    with pytest.raises(RunError, match=r"'first.linear.weight' of a layer of another rank") as raised:
        second(torch.ones(2, 4))
    assert raised.value.diagnostics[0].code == "weight-unregistered"
    assert raised.value.diagnostics[0].hint
    with pytest.raises(RunError, match=r"first.linear.weight"):
        torch.stack([second.others[0].linear.weight])


def test_one_of_the_same_rank_is_the_one_that_is_trained():
    model = rank_of({"first", "second"})
    x = torch.ones(2, 4)
    assert torch.equal(model["second"].module(x), model["first"].module(x))


def test_a_result_with_a_graph_refuses_to_be_read():
    first = rank_of({"first"})["first"].module
    for read in (lambda: torch.ones(2) * first.scale, first.scale.item, lambda: first.scale.backward()):
        with pytest.raises(RunError, match=r"a forward reads `first.scale`, which .* with a graph"):
            read()
