"""What shares memory with a parameter, or holds one unregistered, is refused by name; what lies beside it has its values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.model.layers import Model

Real = Callable[..., Model]


class Part(nn.Module):
    """Two linears of values that follow from nothing drawn, and what `add` does to it."""

    def __init__(self, add: Callable[[Any], object] = lambda part: None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            for at, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 16 + at)
        add(self)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def transposed(part: Any) -> None:
    part.second.weight = nn.Parameter(part.first.weight.t())


def sliced(part: Any) -> None:
    part.rows = nn.Parameter(part.first.weight[:2])


def frozen_view(part: Any) -> None:
    part.frozen = nn.Parameter(part.first.weight.detach()[1], requires_grad=False)


def buffer(part: Any) -> None:
    part.register_buffer("start", part.first.weight.detach())


def interleaved(part: Any) -> None:
    part.even = nn.Parameter(part.first.weight[:, ::2])
    part.odd = nn.Parameter(part.first.weight[:, 1::2])
    part.first.weight = nn.Parameter(torch.ones(4, 4))
    part.last = nn.Parameter(part.odd.data[:, 1:])


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (transposed, "parameters '0.first.weight' and '0.second.weight' share their memory"),
        (sliced, "parameters '0.rows' and '0.first.weight' share their memory"),
        (frozen_view, "parameters '0.first.weight' and '0.frozen' share their memory"),
        (buffer, "the parameter '0.first.weight' and the buffer '0.start' share their memory"),
        (interleaved, "parameters '0.odd' and '0.last' share their memory"),
    ],
)
def test_memory_that_is_partly_the_same_is_refused_by_name(real: Real, add: Callable[[Any], None], says: str) -> None:
    with pytest.raises(PlanError, match=says) as raised:
        real(lambda _: [Part(add)])
    assert raised.value.diagnostics[0].code == "model-init"
    assert raised.value.diagnostics[0].hint


def test_parts_of_one_memory_that_do_not_overlap_are_parameters_like_others(real: Real) -> None:
    def parts(part: Any) -> None:
        whole = torch.arange(32.0).view(4, 8)
        part.left, part.right = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:])

    part = real(lambda _: [Part(parts)])["0"].module
    assert torch.equal(torch.cat([part.left, part.right], 1), torch.arange(32.0).view(4, 8))


def in_a_list(part: Any) -> None:
    part.kept = [part.first.weight]


def as_it_was_made(part: Any) -> None:
    weight = nn.Parameter(torch.ones(4))
    part.own = weight
    part.kept = {"own": (weight,)}


def in_a_function(part: Any) -> None:
    weight = nn.Parameter(torch.ones(4))
    part.own = weight
    part.kept = functools.partial(lambda hidden, scale: hidden * weight * scale, scale=2)


def in_a_hook(part: Any) -> None:
    weight = part.first.weight
    part.second.register_forward_hook(lambda module, args, output: output + weight.sum())


def in_its_own_hook(part: Any) -> None:
    weight = part.first.weight
    weight.register_hook(lambda gradient: gradient + 0.1 * weight)


def in_an_object(part: Any) -> None:
    class Cache:
        pass

    part.kept = Cache()
    part.kept.weight = part.first.weight


OUTSIDE = Part()


def in_a_module_of_others(part: Any) -> None:
    part.other = [OUTSIDE]
    part.own = OUTSIDE.first.weight


@pytest.mark.parametrize(
    ("add", "where", "name"),
    [
        (in_a_module_of_others, "0.other", "0.own"),
        (in_a_list, "0.kept", "0.first.weight"),
        (as_it_was_made, "0.kept", "0.own"),
        (in_a_function, "0.kept", "0.own"),
        (in_a_hook, "0.second._forward_hooks", "0.first.weight"),
        (in_its_own_hook, "0.first.weight.register_hook", "0.first.weight"),
        (in_an_object, "0.kept", "0.first.weight"),
    ],
)
def test_a_parameter_that_is_held_unregistered_is_refused_by_name(
    real: Real, add: Callable[[Any], None], where: str, name: str
) -> None:
    with pytest.raises(PlanError, match=f"`{where}` holds the parameter '{name}'") as raised:
        real(lambda _: [Part(add)])
    assert raised.value.diagnostics[0].code == "model-init"


KNOWN: dict[str, nn.Parameter] = {}


class ByGlobalName(Part):
    def __init__(self) -> None:
        super().__init__()
        KNOWN["weight"] = self.first.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(tokens, KNOWN["weight"])


class ByClass(Part):
    kept: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        ByClass.kept = self.first.weight


class Listed(Part):
    def __init__(self) -> None:
        super().__init__()
        KNOWN["weight"] = self.first.weight  # for a program outside, which nobody's forward asks


@pytest.mark.parametrize(("kind", "where"), [(ByGlobalName, "ByGlobalName.forward"), (ByClass, "ByClass.kept")])
def test_a_parameter_that_is_held_by_name_is_refused(real: Real, kind: type[nn.Module], where: str) -> None:
    with pytest.raises(PlanError, match=f"`{where}` holds the parameter '0.first.weight'"):
        real(lambda _: [kind()])
    real(lambda _: [Listed()])


def test_a_view_in_an_attribute_is_refused_by_name(real: Real) -> None:
    def alias(part: Any) -> None:
        values = torch.ones(4)
        part.own = nn.Parameter(values)
        part.values = values

    for add, where in (
        (alias, "0.values"),
        (lambda part: setattr(part, "row", part.first.weight[0]), "0.row"),
        (lambda part: setattr(part, "rows", [part.first.weight.detach()[1:]]), "0.rows"),
    ):
        with pytest.raises(PlanError, match=f"`{where}` shares its memory with the parameter"):
            real(lambda _, add=add: [Part(add)])


def beside(part: Any) -> None:
    part.ones = torch.ones(3)
    part.norm = part.first.weight.detach().norm()
    part.table = {"start": [part.first.weight.detach().clone()], "frozen": nn.Linear(4, 4, bias=False)}
    part.table["frozen"].weight.data.copy_(part.second.weight * 2)
    part.teacher = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))]
    part.teacher[0].requires_grad_(False).eval()
    part.teacher[0][0].weight.copy_(part.second.weight.detach())
    part.teacher[0][0].bias.fill_(1.0)
    part.teacher[0].register_buffer("start", part.second.weight.detach() * 3)
    mask = part.first.weight.detach() > 1
    part.masked = lambda hidden: hidden * mask
    part.empty = torch.empty(3, device="meta")
    part.leaf = torch.zeros_like(part.first.weight, requires_grad=True)


def test_tensors_beside_parameters_have_the_values_of_plain_pytorch(real: Real) -> None:
    wanted, found = Part(beside), real(lambda _: [Part(beside)])["0"].module
    for one, other in (
        (wanted.ones, found.ones),
        (wanted.norm, found.norm),
        (wanted.table["start"][0], found.table["start"][0]),
        (wanted.table["frozen"].weight, found.table["frozen"].weight),
        (wanted.masked(torch.ones(4, 4)), found.masked(torch.ones(4, 4))),
        (wanted.leaf, found.leaf),
        (wanted.teacher[0](torch.ones(2, 4)), found.teacher[0](torch.ones(2, 4))),
        (wanted.teacher[0].start, found.teacher[0].start),
    ):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
    assert isinstance(found.table["frozen"].weight, nn.Parameter)
    assert found.empty.is_meta


def test_modules_of_an_earlier_call_are_refused_by_name(real: Real) -> None:
    parts = [Part(), Part()]
    with pytest.raises(PlanError, match=r"'0.first.weight' belongs to a model that was built before") as raised:
        real(lambda _: parts)
    assert raised.value.diagnostics[0].code == "model-init"
