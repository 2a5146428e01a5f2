"""First values are those that the same code gives in plain PyTorch; what shares or holds a parameter is refused by name."""

import functools
import random
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.generators import use_program_seed
from sley_testing.plans import build_model_with_values


class Part(nn.Module):
    """Two linears [4, 4] of values that follow from nothing drawn, the second one without a bias, and what `add` does to it."""

    def __init__(self, add: Callable[[Any], object] = lambda part: None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            for at, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 16 + at)
        add(self)


def state() -> dict[str, Tensor]:
    """A checkpoint of a `Part`."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(value.shape, generator=generator) for name, value in Part().state_dict().items()}


def loaded() -> list[nn.Module]:
    part = Part()
    part.load_state_dict(state())
    return [part, Part()]


def on_meta_then_assigned() -> list[nn.Module]:
    with torch.device("meta"):
        part = Part()
    part.load_state_dict(state(), assign=True)
    return [part]


def tied_after_loading() -> list[nn.Module]:
    one, two = Part(), Part()
    one.load_state_dict(state())
    two.second.weight = one.first.weight
    return [one, two]


class Own(nn.Module):
    """Parameters that are made of values."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.table = nn.Parameter(torch.arange(6.0).view(2, 3) * 0.5)
        self.outside = nn.Parameter(torch.from_numpy(np.arange(4, dtype=np.float32)))
        self.large = nn.Parameter(torch.from_numpy(np.arange(40_000, dtype=np.float32)))
        self.halves = nn.ParameterList([torch.zeros(2), torch.full((2,), 2.0)])
        self.held = weight = nn.Parameter(torch.empty(5))
        nn.init.constant_(weight, 4.0)  # by the object that was given, not the one that is registered
        made = torch.empty(2)
        self.later = nn.Parameter(made)
        made.fill_(9.0)  # the memory of the parameter
        self.moved = nn.Parameter(torch.zeros(2), requires_grad=True)
        weight.requires_grad = False
        self.eager = nn.Parameter(torch.zeros(2))
        self.eager.data = torch.tensor([1.0, 2.0])


def own_parameters() -> list[nn.Module]:
    return [Own()]


@torch.no_grad()
def looked_at() -> list[nn.Module]:
    """Code that depends on values."""
    part = Part()
    part.load_state_dict(state())
    if part.first.weight.sum() > -1000 and part.first.weight[0, 0].item() != 0.5:
        part.first.bias.fill_(float(part.first.weight.abs().max()))
    part.second.weight.copy_(torch.from_numpy(np.asarray(part.first.weight).copy() * 2))
    kept = part.first.weight[part.first.weight > 0]
    part.second.weight[0, 0] = kept.numel() + sum(part.first.bias.tolist())
    return [part]


def parametrized() -> list[nn.Module]:
    part = Part()
    part.load_state_dict(state())
    nn.utils.parametrizations.weight_norm(part.first)
    nn.utils.parametrizations.orthogonal(part.second)
    return [part]


def in_another_thread() -> list[nn.Module]:
    made: list[nn.Module] = []
    thread = threading.Thread(target=lambda: made.append(Part()))
    thread.start()
    thread.join()
    made[0].load_state_dict(state())
    return made


def drawn() -> list[nn.Module]:
    part = Part()
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=random.random() + np.random.rand())
    torch.manual_seed(5)
    nn.init.normal_(part.second.weight)
    part.register_buffer("noise", torch.randn(3))
    return [part]


CASES = [loaded, on_meta_then_assigned, tied_after_loading, own_parameters, looked_at, parametrized, in_another_thread, drawn]


def values(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, layer in layers.items():
        found |= dict(layer.named_parameters(name, remove_duplicate=False))
        found |= dict(layer.named_buffers(name))
    return found


@pytest.mark.parametrize("case", CASES)
def test_first_values_are_those_of_plain_pytorch(case: Callable[[], list[nn.Module]]) -> None:
    with use_program_seed(0):
        plain = {str(at): layer for at, layer in enumerate(case())}
    wanted = values(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of load_state_dict, that it does nothing, too
        model = build_model_with_values(lambda _: case(), torch.float64)
    found = values({layer.name: layer.module for layer in model})
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name].double(), value.double()), name
        assert found[name].requires_grad == value.requires_grad, name
    same = {name: [other for other in wanted if wanted[other] is wanted[name]] for name in wanted}
    assert same == {name: [other for other in found if found[other] is found[name]] for name in found}
    for name in plain:
        part = build_model_with_values(lambda _: case(), torch.float64, owned={name})
        for key, value in values({name: part[name].module}).items():
            assert torch.equal(value, found[key]), key


@pytest.mark.parametrize("kind", ["mapped", "memory"])
def test_what_is_given_is_not_what_is_trained(tmp_path: Path, kind: str) -> None:
    given = {"weight": torch.randn(200, 300), "bias": torch.randn(200)}
    torch.save(given, tmp_path / "file.pt")

    def read() -> Any:
        return given if kind == "memory" else torch.load(tmp_path / "file.pt", mmap=True)

    def layers(_: object) -> list[nn.Module]:
        linear = nn.Linear(300, 200)
        linear.load_state_dict(read(), assign=True)
        return [Part(), linear]

    weight = build_model_with_values(layers)["1"].module.weight
    assert torch.equal(weight, given["weight"])
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(read()["weight"], given["weight"])
    assert given["weight"].any()


def transposed(part: Any) -> None:
    part.second.weight = nn.Parameter(part.first.weight.t())


def sliced(part: Any) -> None:
    part.rows = nn.Parameter(part.first.weight[:2])


def frozen_view(part: Any) -> None:
    part.frozen = nn.Parameter(part.first.weight.detach()[1], requires_grad=False)


def alias(part: Any) -> None:
    values = torch.ones(4)
    part.own = nn.Parameter(values)
    part.values = values


def test_parts_of_one_memory_that_do_not_overlap_are_parameters_like_others() -> None:
    def parts(part: Any) -> None:
        whole = torch.arange(32.0).view(8, 4)
        part.top, part.bottom = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])

    part = build_model_with_values(lambda _: [Part(parts)])["0"].module
    assert torch.equal(torch.cat([part.top, part.bottom]), torch.arange(32.0).view(8, 4))


def in_a_list(part: Any) -> None:
    part.kept = [part.first.weight]


def in_a_function(part: Any) -> None:
    weight = nn.Parameter(torch.ones(4))
    part.own = weight
    part.kept = functools.partial(lambda hidden, scale: hidden * weight * scale, scale=2)


def in_a_hook(part: Any) -> None:
    weight = part.first.weight
    part.second.register_forward_hook(lambda module, args, output: output + weight.sum())


def in_an_object(part: Any) -> None:
    class Cache:
        pass

    part.kept = Cache()
    part.kept.weight = part.first.weight


OUTSIDE = Part()


def in_a_module_of_others(part: Any) -> None:
    part.other = [OUTSIDE]
    part.own = OUTSIDE.first.weight


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


OVERLAP = "{} and {} overlap in memory"
HELD = "`{}` refers to the parameter '{}'"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Part(transposed), OVERLAP.format("the parameter '0.first.weight'", "the parameter '0.second.weight'")),
        (lambda: Part(sliced), OVERLAP.format("the parameter '0.rows'", "the parameter '0.first.weight'")),
        (lambda: Part(frozen_view), OVERLAP.format("the parameter '0.first.weight'", "the parameter '0.frozen'")),
        (
            lambda: Part(lambda part: part.register_buffer("start", part.first.weight.detach())),
            OVERLAP.format("the parameter '0.first.weight'", "the buffer '0.start'"),
        ),
        (lambda: Part(alias), OVERLAP.format("the parameter '0.own'", "the attribute '0.values'")),
        (lambda: Part(lambda part: setattr(part, "row", part.first.weight[0])), "the attribute '0.row' overlap in memory"),
        (lambda: Part(lambda part: setattr(part, "rows", [part.first.weight.detach()[1:]])), "the attribute '0.rows' overlap"),
        (lambda: Part(in_a_module_of_others), HELD.format("0.other", "0.own")),
        (lambda: Part(in_a_list), HELD.format("0.kept", "0.first.weight")),
        (lambda: Part(in_a_function), HELD.format("0.kept", "0.own")),
        (lambda: Part(in_a_hook), HELD.format("0.second._forward_hooks", "0.first.weight")),
        (lambda: Part(in_an_object), HELD.format("0.kept", "0.first.weight")),
        (ByGlobalName, HELD.format("ByGlobalName.forward", "0.first.weight")),
        (ByClass, HELD.format("ByClass.kept", "0.first.weight")),
    ],
)
def test_memory_that_is_shared_or_held_unregistered_is_refused_by_name(make: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(PlanError, match=f"model-init.*{says}") as raised:
        build_model_with_values(lambda _: [make()])
    assert raised.value.diagnostics[0].hint
    build_model_with_values(lambda _: [Listed()])
