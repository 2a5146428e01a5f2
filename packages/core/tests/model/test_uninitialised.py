"""First values that nobody gives are refused, with the name of the parameter and advice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.model.layers import Model

Real = Callable[..., Model]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gain


class Half(Scale):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.gain[:2] = 1.0


class OnMeta(Scale):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.gain = nn.Parameter(torch.ones(3))


class Scaled(nn.Module):
    def __init__(self, scale: nn.Module) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("scale", [Scale, Half, OnMeta])
def test_a_module_that_nobody_initialises_is_refused_by_name(real: Real, scale: type[nn.Module]) -> None:
    with pytest.raises(PlanError, match=r"the parameter '0.scale.gain' has no first value") as raised:
        real(lambda _: [Scaled(scale())])
    assert raised.value.diagnostics[0].code == "model-init"


@pytest.mark.parametrize("scale", [Scale, Half, OnMeta])
def test_init_weights_may_initialise_it_instead(real: Real, scale: type[nn.Module]) -> None:
    def threes(module: nn.Module, name: str) -> None:
        if isinstance(module, Scale):
            nn.init.constant_(module.gain, 3.0)

    assert real(lambda _: Model([Scaled(scale())], threes))["0"].module.scale.gain.tolist() == [3.0] * 3
    assert real(lambda _: Model([("0", lambda: Scaled(scale()))], threes))["0"].module.scale.gain.tolist() == [3.0] * 3


def test_an_initialiser_that_fails_is_named(real: Real) -> None:
    def fails(module: nn.Module, name: str) -> None:
        if name == "0.scale":
            raise RuntimeError("no such luck")

    with pytest.raises(PlanError, match=r"'0.scale' \(Scale\) cannot be initialised: RuntimeError: no such luck"):
        real(lambda _: Model([Scaled(Scale())], fails))
