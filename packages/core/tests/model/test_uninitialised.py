"""First values that nobody gives are refused, with the name of the parameter and what to do."""

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
    def reset_parameters(self) -> None:
        self.gain[:2] = 1.0  # type: ignore[index]


class Raises(Scale):
    def reset_parameters(self) -> None:
        raise RuntimeError("no such luck")


class Scaled(nn.Module):
    def __init__(self, scale: nn.Module) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (Scale, r"the parameter '0.scale.gain' has no first value: its module \(Scale\) has no reset_parameters\(\)"),
        (Half, r"the parameter '0.scale.gain' has no first value: its module \(Half\) does not set all of it"),
        (Raises, r"the module '0.scale' \(Raises\) cannot be initialised: RuntimeError: no such luck"),
    ],
)
def test_a_module_that_nobody_initialises_is_refused_by_name(real: Real, scale: type[nn.Module], says: str) -> None:
    with pytest.raises(PlanError, match=says) as raised:
        real(lambda _: [Scaled(scale())])
    assert raised.value.diagnostics[0].code == "model-init"


def test_a_parent_or_init_weights_may_initialise_it_instead(real: Real) -> None:
    class Parent(Scaled):
        def reset_parameters(self) -> None:
            nn.init.constant_(self.scale.gain, 2.0)

    def ones(module: nn.Module, name: str) -> None:
        if isinstance(module, Scale):
            nn.init.constant_(module.gain, 3.0)

    assert real(lambda _: [Parent(Scale())])["0"].module.scale.gain.tolist() == [2.0] * 3
    assert real(lambda _: Model([Scaled(Scale())], init_weights=ones))["0"].module.scale.gain.tolist() == [3.0] * 3
