"""Where first values come from: a seed, files, who writes last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from two_linears import Part

from sley_core.data.dataset import DataInfo
from sley_core.model.layers import Model

Real = Callable[..., Model]


class Drawn(nn.Module):
    """Numbers of torch's default generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(300, 200)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        self.experts = nn.Parameter(torch.randn(2, 300, 100) * 0.02)
        self.orthogonal = nn.Parameter(torch.empty(40, 40))
        nn.init.orthogonal_(self.orthogonal)
        self.sum = float(self.experts.detach().sum())
        torch.manual_seed(5)
        self.one = nn.Parameter(torch.empty(20).normal_())
        torch.manual_seed(5)
        self.same = nn.Parameter(torch.empty(20).normal_())

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def test_what_is_drawn_has_its_distribution_follows_the_seed_and_no_layout(real: Real) -> None:
    def drawn(_: DataInfo) -> list[nn.Module]:
        return [Drawn(), Drawn()]

    model = real(drawn)
    layer = model["0"].module.requires_grad_(False)
    assert layer.linear.weight.std() == pytest.approx(0.02, rel=0.05)
    assert layer.linear.bias.abs().max() <= 300**-0.5
    assert layer.experts.std() == pytest.approx(0.02, rel=0.05)
    assert float(layer.experts.sum()) == layer.sum, "what the factory saw of it is what it is"
    torch.testing.assert_close(layer.orthogonal @ layer.orthogonal.T, torch.eye(40), rtol=0, atol=1e-5)
    assert torch.equal(layer.one, layer.same)
    assert not torch.equal(layer.linear.weight, model["1"].module.linear.weight)
    assert not torch.equal(layer.linear.weight, real(drawn, seed=1)["0"].module.linear.weight)
    alone = real(drawn, owned={"1"})["1"].module
    for one, other in zip(alone.parameters(), model["1"].module.parameters(), strict=True):
        assert torch.equal(one, other)


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
