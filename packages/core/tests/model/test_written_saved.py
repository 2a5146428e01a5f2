"""What a factory saves, pickles or copies has the values that parameters have by then; plain PyTorch is the oracle."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.model.layers import Model

AsPlain = Callable[[Callable[[], list[nn.Module]]], Model]


class Part(nn.Module):
    """A layer with given values, of which one more is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        for at, parameter in enumerate(self.parameters()):
            parameter.data = torch.arange(parameter.numel()).view(parameter.shape) * 0.5 + at
        with torch.no_grad():
            self.first.weight.mul_(2)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def through_a_file(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_a_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("through", [through_a_file, through_a_pickle, copy.deepcopy])
@pytest.mark.parametrize("what", ["state", "module"])
def test_what_is_saved_is_what_comes_back(as_plain: AsPlain, through: Callable[[Any], Any], what: str) -> None:
    def case() -> list[nn.Module]:
        part, other = Part(), Part()
        saved = through(part.state_dict() if what == "state" else part)
        nn.init.zeros_(part.first.weight)
        nn.init.ones_(part.second.weight)
        if what == "module":
            return [part, saved]
        other.load_state_dict(saved)
        return [part, other]

    as_plain(case)


@pytest.mark.parametrize("through", [through_a_file, copy.deepcopy])
def test_views_of_one_memory_come_back_as_views_of_one(as_plain: AsPlain, through: Callable[[Any], Any]) -> None:
    def case() -> list[nn.Module]:
        part, real = Part(), torch.zeros(4, 4)
        weight = part.first.weight.data
        real.copy_(weight)
        back = through({"all": weight, "row": weight[1], "turned": weight.t(), "real": real, "made": weight * 3})
        back["all"][1] = 7.0
        part.first.bias.data.copy_(back["row"])
        part.first.weight.data.copy_(back["turned"])
        part.second.weight.data.copy_(back["real"] + back["made"])
        nn.init.ones_(part.second.bias)
        part.second.bias.data.add_(through(part.second.bias.data))
        return [part]

    as_plain(case)


def test_a_shallow_copy_is_the_same_memory(as_plain: AsPlain) -> None:
    def case() -> list[nn.Module]:
        part = Part()
        copy.copy(part.first.weight).data.fill_(3.0)
        copy.copy(part.second.weight.data).fill_(4.0)
        copy.copy(part.first).bias.data.fill_(5.0)
        return [part]

    as_plain(case)


def test_safetensors_writes_the_values(as_plain: AsPlain, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")

    def case() -> list[nn.Module]:
        part = Part()
        saved = files.save(part.state_dict())
        files.save_model(part, tmp_path / "file.safetensors")
        nn.init.zeros_(part.first.weight)
        other = Part()
        other.load_state_dict(files.load(saved))
        nn.init.zeros_(other.second.weight)
        files.load_model(part, tmp_path / "file.safetensors")
        return [part, other]

    as_plain(case)


def test_torch_pickles_as_ever_after_a_build(real: Callable[..., Model]) -> None:
    before = torch.Tensor._reduce_ex_internal
    real(lambda _: [Part()])
    assert torch.Tensor._reduce_ex_internal is before
    assert not hasattr(torch.Tensor, "__copy__")
