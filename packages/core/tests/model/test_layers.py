from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_core.errors import PlanError
from sley_core.model.layers import Model, as_model, with_fields


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        ([linear(), linear()], ["0", "1"]),
        ((linear() for _ in range(2)), ["0", "1"]),
        ([("a", linear()), ("b.0", linear())], ["a", "b.0"]),
        ([("a", linear()), linear()], ["a", "1"]),
        (OrderedDict(x=linear(), y=linear()), ["x", "y"]),
        (nn.Sequential(OrderedDict(x=linear(), y=linear())), ["x", "y"]),
        (nn.ModuleList([linear(), linear()]), ["0", "1"]),
        (nn.ModuleDict({"x": linear()}), ["x"]),
        (Model([("a", linear())]), ["a"]),
    ],
)
def test_what_a_factory_may_return(returned: Any, names: list[str]) -> None:
    assert [layer.name for layer in as_model(returned)] == names


SAME = linear()


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned None, not a list of layers"),
        (3, "returned a int"),
        ("layers", "returned a str"),
        (linear(), "returned a Linear"),
        ([], "no layers"),
        ([linear(), "x"], "layer 1 of the model is a str"),
        ([linear], "layer 0 of the model is a function"),
        ([(1, linear())], "name of layer 0 of the model is a int"),
        ([("", linear())], "name of layer 0"),
        ([("a", linear()), ("a", linear())], "two layers of the model are named 'a'"),
        ([SAME, SAME], "the layers '0' and '1' are one and the same module"),
        (nn.Sequential(SAME, SAME), "the layers '0' and '1' are one and the same module"),
        ([("a", nn.ModuleDict({"b": linear()})), ("a.b", linear())], "two parameters of the model are named 'a.b.weight'"),
    ],
)
def test_what_it_may_not_return(returned: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says) as raised:
        as_model(returned)
    assert raised.value.diagnostics[0].code == "model-factory"
    assert raised.value.diagnostics[0].path == ("model",)


class First(nn.Module):
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class Later(nn.Module):
    def forward(self, hidden: Any, cu_seqlens: Tensor, *, labels: Tensor | None = None, masked: bool = False) -> Tensor:
        raise NotImplementedError


class Everything(nn.Module):
    def forward(self, hidden: Any, **fields: Tensor) -> Tensor:
        raise NotImplementedError


class Starred(nn.Module):
    def forward(self, *hidden: Any) -> Tensor:
        raise NotImplementedError


def test_a_layer_gets_the_fields_that_its_forward_names(info: DataInfo) -> None:
    model = with_fields(Model([First(), Later(), Everything(), Starred(), nn.ReLU()]), info)
    assert [layer.fields for layer in model] == [
        ("tokens", "positions"),
        ("cu_seqlens", "labels"),
        ("tokens", "labels", "positions", "cu_seqlens"),
        (),
        (),
    ]


class NeedsImage(nn.Module):
    def forward(self, hidden: Tensor, image: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError


class TakesNothing(nn.Module):
    def forward(self, *, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def test_all_misfits_are_told_at_once(info: DataInfo) -> None:
    misfits = [("embed", nn.Embedding(4, 4)), ("body", NeedsImage()), ("head", TakesNothing())]
    with pytest.raises(PlanError) as raised:
        with_fields(Model(misfits), info)
    said = [diagnostic.message for diagnostic in raised.value.diagnostics]
    assert said == [
        "layer 'embed' (Embedding.forward) needs 'input', which the data does not have",
        "layer 'body' (NeedsImage.forward) needs 'image', which the data does not have",
        "layer 'body' (NeedsImage.forward) needs 'mask', which the data does not have",
        "layer 'head' (TakesNothing.forward) takes no previous output",
    ]
    assert {diagnostic.code for diagnostic in raised.value.diagnostics} == {"model-field"}
    assert "tokens, labels, positions, cu_seqlens" in (raised.value.diagnostics[0].hint or "")


def test_layers_are_found_by_name(build: Callable[..., Model]) -> None:
    model = build(lambda _: [("a", First()), ("b", linear())])
    assert len(model) == 2
    assert model["b"].module is model.layers[1].module
    assert torch.is_tensor(model["b"].module.weight)
