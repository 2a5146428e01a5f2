"""What layers are made of: what a factory may return, fields, patches of a forward, training mode, and written buffers."""

import copy
import pickle
from collections import OrderedDict
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.model.build import check_written_buffers, evaluation_notes, set_train_mode
from sley_core.model.layers import ForwardPatch, Model, as_model, set_fields
from sley_testing.plans import TOKENS


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        ((linear() for _ in range(2)), ["0", "1"]),
        ([("b.0", linear()), linear()], ["b.0", "1"]),
        (OrderedDict(x=linear(), y=linear()), ["x", "y"]),
        (nn.Sequential(OrderedDict(x=linear(), y=linear())), ["x", "y"]),
        (nn.ModuleList([linear(), linear()]), ["0", "1"]),
        (nn.ModuleDict({"x": linear()}), ["x"]),
        (Model([("a", linear())]), ["a"]),
    ],
)
def test_what_a_factory_may_return(returned: Any, names: list[str]) -> None:
    assert [layer.name for layer in as_model(returned)] == names


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "must return a list of layers, but returned None"),
        ("layers", "returned a str"),
        (linear(), "returned a Linear"),
        ([], "no layers"),
        ([linear(), "x"], "layer 1 of the model must be a torch.nn.Module, but is a str"),
        ([linear], "layer 0 of the model must be a torch.nn.Module, but is a function"),
        ([(1, linear())], "name of layer 0 of the model must be a string, but is a int"),
        ([("", linear())], "name of layer 0"),
        ([("a", linear()), ("a", linear())], "two layers of the model are named 'a'"),
        (nn.Sequential(*[linear()] * 2), "the layers '0' and '1' are the same module"),
        ([("a", nn.ModuleDict({"b": linear()})), ("a.b", linear())], "two parameters of the model are named 'a.b.weight'"),
        ([("a", linear, 0)], "layer 0 of the model has the count 0, but a count must be at least 1"),
        ([("a", cache(linear), 2)], "the layers 'a.0' and 'a.1' are the same module"),
        ([("a", lambda: 1 / 0)], "the builder of the layer 'a' failed: ZeroDivisionError"),
        ([("a", dict)], "the builder of the layer 'a' must return a torch.nn.Module, but returned a dict"),
        (Model([linear()], ties=[("0.weight", "1.weight")]), "ties the parameter '1.weight', which does not exist"),
        (Model([linear()], ties=[("0.bias", "0.weight")]), "'0.weight' to '0.bias', which is not in an earlier layer"),
    ],
)
def test_what_it_may_not_return(returned: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says) as raised:
        as_model(returned).build()
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


def test_a_layer_gets_the_fields_that_its_forward_names() -> None:
    model = set_fields(Model([First(), Later(), Everything(), Starred(), nn.ReLU()]), TOKENS)
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


def test_all_misfits_are_told_at_once() -> None:
    misfits = [("embed", nn.Embedding(4, 4)), ("body", NeedsImage()), ("head", TakesNothing())]
    misfits.append(("odd", type("Odd", (nn.Module,), {"forward": type})()))
    with pytest.raises(PlanError) as raised:
        set_fields(Model(misfits), TOKENS)
    said = [diagnostic.message for diagnostic in raised.value.diagnostics]
    assert said == [
        "layer 'embed' (Embedding.forward) reads the field 'input', which the data does not have",
        "layer 'body' (NeedsImage.forward) reads the field 'image', which the data does not have",
        "layer 'body' (NeedsImage.forward) reads the field 'mask', which the data does not have",
        "layer 'head' (TakesNothing.forward) must take the output of the previous layer as its first parameter",
        "layer 'odd' (Odd.forward) must have a Python signature",
    ]
    assert {diagnostic.code for diagnostic in raised.value.diagnostics} == {"model-field"}
    assert "tokens, labels, positions, cu_seqlens" in (raised.value.diagnostics[0].hint or "")


class Scale(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, input):
        return input * self.factor


class Careful(Scale):
    """Has a say in what becomes of its attributes."""

    def __setattr__(self, name, value):
        assert name != "forward", "somebody patches me"
        super().__setattr__(name, value)


def with_its_own():
    """A module whose factory replaced its forward."""
    module = Scale()
    module.forward = lambda input: input * 100
    return module


def plus(module, number):
    """A patch that adds to what the module would return without it."""
    below = module.forward
    return ForwardPatch(module, lambda input: below(input) + number)


@pytest.mark.parametrize("make", [Scale, Careful, with_its_own])
@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_undone_in_any_order(make, order):
    module = make()
    was, alone = dict(vars(module)), module(1.0)
    patches = [plus(module, 10.0**at) for at in range(3)]
    assert module(1.0) == alone + 111
    left = {0, 1, 2}
    for at in order:
        for _ in range(2):
            patches[at].undo()
        left.remove(at)
        assert module(1.0) == alone + sum(10.0**one for one in left)
    assert vars(module) == was
    assert list(vars(module)) == list(was)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_program_s_own_forward_over_a_patch_stays(order):
    """And no longer passes through what is undone."""
    module = Scale()
    patches = [plus(module, 10)]
    below = module.forward
    own = module.forward = lambda input: -below(input)
    patches.append(plus(module, 100))
    assert module(1.0) == -12 + 100
    for at in order:
        patches[at].undo()
    assert vars(module)["forward"] is own
    assert module(1.0) == -2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_not_patched(copied):
    module = Scale()
    ForwardPatch(module, torch.neg)
    ForwardPatch(module, torch.neg)
    made = copied(module)
    made.factor = 3.0
    assert made(1.0) == 3.0


class Replaces(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("constant", torch.ones(3), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return hidden


def test_what_training_writes_is_refused_by_name() -> None:
    norm, count = nn.BatchNorm1d(3), Replaces()
    names = [(f"norm.{name}", norm) for name, _ in norm.named_buffers()] + [("count.seen", count)]
    check_written_buffers([])
    with pytest.raises(PlanError, match="updates 4 buffers of BatchNorm1d and Replaces") as raised:
        check_written_buffers(names)
    (found,) = raised.value.diagnostics
    assert found.code == "model-buffer-written"
    assert "(`norm.running_mean`, `norm.running_var`, `norm.num_batches_tracked` and 1 more)" in found.message
    patterns = '"*.running_mean", "*.running_var", "*.num_batches_tracked", "*.seen"'
    assert f"`sley_core.api.model.Model(layers, per_rank_buffers=({patterns},))`" in found.hint


class Own(nn.Module):
    """Keeps its tower in evaluation mode, as PyTorch's users do."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.drop = nn.Dropout()

    def train(self, mode: bool = True) -> "Own":
        super().train(mode)
        self.tower.eval()
        return self


class Wrap(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.LayerNorm(2))


def evaluated(model: Model) -> list[str]:
    return [
        name for layer in model.layers for name, module in layer.module.named_modules(prefix=layer.name) if not module.training
    ]


@pytest.mark.parametrize(
    "layers",
    [
        [block().eval(), block().eval()],
        [block().eval(), block()],
        [Wrap(block().eval()), block()],
        [Wrap(block().eval().requires_grad_(False)).eval(), block().eval()],
        [Wrap(nn.Dropout().eval()), block()],
    ],
    ids=["pretrained", "with a new head", "wrapped", "frozen within a pretrained one", "without parameters"],
)
def test_a_pretrained_model_is_trained(layers: list[nn.Module]) -> None:
    model = Model(copy.deepcopy(layers))
    set_train_mode(model)
    assert evaluated(model) == []
    assert evaluation_notes(model.layers) == []


def test_what_was_frozen_on_purpose_stays_in_evaluation_mode() -> None:
    tower, norm = Wrap(block().eval().requires_grad_(False)), Wrap(nn.BatchNorm1d(2).eval())
    model = Model([("tower", tower), ("norm", norm), ("own", Own()), ("frozen", block().eval().requires_grad_(False))])
    set_train_mode(model)
    kept = ("tower.inner", "norm.inner", "own.tower", "frozen")
    assert all(name.startswith(kept) for name in evaluated(model))
    assert set(kept) <= set(evaluated(model))
    assert evaluation_notes(model.layers) == [
        "the factory left these modules in evaluation mode, and they stay in it: tower.inner, norm.inner, own.tower and 1 more"
    ]


@pytest.mark.parametrize("patterns", [(), ("*.running_mean", "*.running_var", "*.num_batches_tracked")])
def test_a_batch_norm_of_a_pretrained_model_is_trained_where_each_rank_may_have_its_own(patterns: tuple[str, ...]) -> None:
    model = Model([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()], per_rank_buffers=patterns)
    set_train_mode(model)
    assert evaluated(model) == ([] if patterns else ["0.1"])
