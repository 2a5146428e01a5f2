"""Values that cannot be kept are refused with the parameter's name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from two_linears import Part

from sley_core.data.dataset import DataInfo
from sley_core.errors import PlanError
from sley_core.model.layers import Model

Real = Callable[..., Model]


def test_memory_that_is_written_again_unseen_is_refused_by_name(real: Real) -> None:
    def reused(_: DataInfo) -> list[nn.Module]:
        parts = [Part(200), Part(200)]
        memory = np.zeros((200, 200), dtype=np.float32)  # too large to keep a copy of
        for at, part in enumerate(parts):
            memory[:] = at + 1
            part.first.weight.data.copy_(torch.from_numpy(memory))
        return list(parts)

    with pytest.raises(PlanError, match=r"'0.first.weight' cannot be kept: the memory .* was written again") as raised:
        real(reused)
    assert raised.value.diagnostics[0].code == "model-init"


def test_two_parameters_over_one_memory_are_refused_by_name(real: Real) -> None:
    def shared(_: DataInfo) -> list[nn.Module]:
        one, two = Part(), Part()
        two.first.weight.data = one.first.weight.data
        return [one, two]

    with pytest.raises(PlanError, match=r"'0.first.weight' and '1.first.weight' share their memory"):
        real(shared)


def test_what_autocast_would_have_narrowed_is_refused(real: Real) -> None:
    def narrowed(_: DataInfo) -> list[nn.Module]:
        part = Part()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            part.second.weight.copy_(part.first.weight @ part.second.weight)
        return [part]

    with pytest.raises(PlanError, match="computes with parameters under autocast") as raised:
        real(narrowed)
    assert raised.value.diagnostics[0].code == "model-init"


def test_modules_of_an_earlier_build_are_refused_by_name(real: Real) -> None:
    parts = [Part(), Part()]
    real(lambda _: parts, owned={"0"})
    with pytest.raises(
        PlanError, match=r"'1.first.weight' cannot be kept: it belongs to a model that was built before"
    ):
        real(lambda _: parts)
