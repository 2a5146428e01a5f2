"""What a factory puts into parameters is what a run starts from: the same code run by plain PyTorch is the oracle."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from two_linears import Part

from sley_core.data.dataset import DataInfo
from sley_core.generators import seeded_as_plain
from sley_core.model.layers import Model

Real = Callable[..., Model]


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


def data_set() -> list[nn.Module]:
    part, other = Part(), Part()
    part.first.weight.data = torch.arange(16.0).view(4, 4)
    part.second.weight.data = other.first.weight.data.clone() * 3
    part.first.bias.data.add_(2.0)
    return [part, other]


@torch.no_grad()
def in_place() -> list[nn.Module]:
    part = Part()
    part.first.weight[3] = 0
    part.first.weight[:, 1] += 1.0
    part.first.weight[torch.tensor([True, False, False, True])] = 7.0
    part.first.weight.mul_(2)
    part.second.weight.copy_(part.first.weight.t())
    part.second.weight.masked_fill_(part.second.weight > 3, 0.25)
    part.first.bias.copy_(torch.linspace(0, 1, 4))
    part.first.bias.data[0] = -1.0
    torch._foreach_mul_([part.first.bias, part.second.weight], 3.0)
    return [part]


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

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


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


def drawn_by_a_generator() -> list[nn.Module]:
    part, generator = Part(), torch.Generator().manual_seed(11)
    nn.init.trunc_normal_(part.first.weight, std=0.02, generator=generator)
    nn.init.orthogonal_(part.second.weight, generator=generator)
    part.first.bias.data.normal_(generator=generator)
    other = Part()
    other.first.weight = nn.Parameter(torch.randn(4, 4, generator=generator) * 0.02)
    return [part, other]


def parametrized() -> list[nn.Module]:
    part = Part()
    part.load_state_dict(state())
    nn.utils.parametrizations.weight_norm(part.first)
    nn.utils.parametrizations.orthogonal(part.second)
    return [part]


def computed_buffer() -> list[nn.Module]:
    part = Part()
    part.load_state_dict(state())
    part.register_buffer("start", part.first.weight.detach().clone())
    part.register_buffer("norm", torch.zeros(()))
    part.norm.copy_(part.first.weight.detach().norm())  # type: ignore[operator]
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


OUTSIDE = Part()
OUTSIDE.load_state_dict(state())


CASES = [
    loaded,
    on_meta_then_assigned,
    tied_after_loading,
    data_set,
    in_place,
    own_parameters,
    looked_at,
    drawn_by_a_generator,
    parametrized,
    computed_buffer,
    in_another_thread,
    drawn,
]


def values(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, layer in layers.items():
        found |= dict(layer.named_parameters(name, remove_duplicate=False))
        found |= dict(layer.named_buffers(name))
    return found


@pytest.mark.parametrize("case", CASES)
def test_first_values_are_those_of_plain_pytorch(real: Real, case: Callable[[], list[nn.Module]]) -> None:
    with seeded_as_plain(0):
        plain = {str(at): layer for at, layer in enumerate(case())}
    wanted = values(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of load_state_dict, that it does nothing, too
        model = real(lambda _: case(), torch.float64)
    found = values({layer.name: layer.module for layer in model})
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name].double(), value.double()), name
        assert found[name].requires_grad == value.requires_grad, name
    same = {name: [other for other in wanted if wanted[other] is wanted[name]] for name in wanted}
    assert same == {name: [other for other in found if found[other] is found[name]] for name in found}
    for name in plain:
        part = real(lambda _: case(), torch.float64, owned={name})
        for key, value in values({name: part[name].module}).items():
            assert torch.equal(value, found[key]), key


Real = Callable[..., Model]


@pytest.mark.parametrize("kind", ["pt", "mapped", "safetensors", "memory"])
def test_files_are_read_as_they_are(real: Real, tmp_path: Path, kind: str) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    given = {"weight": torch.randn(200, 300), "bias": torch.randn(200)}
    torch.save(given, tmp_path / "file.pt")
    safetensors.save_file(given, tmp_path / "file.safetensors")

    def read() -> Any:
        if kind == "safetensors":
            return safetensors.load_file(tmp_path / "file.safetensors")
        return given if kind == "memory" else torch.load(tmp_path / "file.pt", mmap=kind == "mapped")

    def layers(_: DataInfo) -> list[nn.Module]:
        one, two, three = (nn.Linear(300, 200) for _ in range(3))
        one.load_state_dict(read())
        two.load_state_dict({name: value.bfloat16() for name, value in read().items()}, assign=True)
        three.load_state_dict({name: value * 2 for name, value in read().items()})
        return [Embed(), one, two, three]

    model = real(layers)
    for name, value in given.items():
        assert torch.equal(getattr(model["1"].module, name), value)
        assert torch.equal(getattr(model["2"].module, name), value.bfloat16().float())
        assert torch.equal(getattr(model["3"].module, name), value * 2)
    with torch.no_grad():
        model["1"].module.weight.zero_()
    assert given["weight"].any(), "what was given is not what is trained"
    assert torch.equal(read()["weight"], given["weight"])


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def test_init_weights_has_the_last_word_over_what_the_factory_gave(real: Real) -> None:
    def init_weights(module: nn.Module, name: str) -> None:
        if name.endswith("second"):
            module.weight.add_(1.0)  # type: ignore[operator, union-attr]

    given = {name: torch.randn(value.shape) for name, value in Part().state_dict().items()}

    def layers(_: DataInfo) -> Model:
        part = Part()
        part.load_state_dict(given)
        return Model([part, Part()], init_weights=init_weights)

    model = real(layers)
    assert torch.equal(model["0"].module.first.weight, given["first.weight"])
    assert torch.equal(model["0"].module.second.weight, given["second.weight"] + 1.0)
