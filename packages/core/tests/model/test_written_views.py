"""Values that reach parameters through views of other numbers, conversions, and operations that do not say what they write."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.model.layers import Model

AsPlain = Callable[[Callable[[], list[nn.Module]]], Model]


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"first.weight": (4, 4), "first.bias": (4,), "second.weight": (4, 4), "second.bias": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Part(nn.Module):
    """A layer of two linears, with given values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.load_state_dict(state())

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


@torch.no_grad()
def conjugates_of_parameters(part: Part) -> None:
    numbers = torch.complex(part.first.weight, part.second.weight)
    part.first.weight.copy_(numbers.conj().imag)
    part.second.weight.copy_(torch.view_as_real(numbers.mH.resolve_conj())[..., 1])
    part.first.bias.copy_(torch.view_as_real((numbers.conj() * 1j).resolve_conj())[0, :, 0])


@torch.no_grad()
def conjugates_of_constants(part: Part) -> None:
    numbers = torch.complex(torch.arange(16.0).view(4, 4), torch.arange(16.0).view(4, 4) * 2 + 1)
    part.first.weight.copy_(numbers.conj().imag)
    part.second.weight.copy_(numbers.mH.imag)


@torch.no_grad()
def written_through_a_conjugate(part: Part) -> None:
    negative = torch._neg_view(part.first.weight)
    negative.fill_(3.0)
    negative[0] = 7.0
    numbers = torch.complex(part.first.weight, part.second.weight).conj()
    numbers[1] = 1 + 2j
    target = torch.zeros(4, 4, dtype=torch.complex64)
    target.conj().copy_(numbers)
    part.second.weight.copy_(torch.view_as_real(target)[..., 1])


def made_of_a_negative(part: Part) -> None:
    part.first.weight = nn.Parameter(torch._neg_view(torch.arange(16.0).view(4, 4)))
    part.first.bias.data.fill_(torch._neg_view(part.second.weight)[0, 0].item())


@torch.no_grad()
def of_data_given_to_a_parameter(part: Part) -> None:
    weight = part.first.weight
    part.first.bias.copy_(weight.new_tensor([1.0, 2, 3, 4]))
    part.second.bias.copy_(torch.tensor([weight[0, 0], 1, weight[1, 1], 2.0]))
    part.second.bias.add_(torch.zeros(3).new_tensor([weight[0, 0], weight[1, 1], 2.0, 3.0]))
    part.second.weight.copy_(torch.tensor(weight, device="cpu") * 2 + weight.new_tensor(weight))
    part.second.weight.add_(weight.new(torch.Size([4, 4])).fill_(2.0)).add_(weight.new(np.arange(4, dtype=np.float32)))
    weight.copy_(weight.new([[1.0, 2, 3, 4]] * 4) + weight.new_tensor(np.arange(4.0), dtype=torch.float64))
    part.register_buffer("kind", weight.new_tensor([1, 0], dtype=torch.bool))


def parameters_of_data_given_to_a_parameter(part: Part) -> None:
    part.first.bias = nn.Parameter(part.first.weight.new_tensor([1.0, 2.0]))
    part.second.bias = nn.Parameter(part.second.weight.new([1.0, 2.0, 3.0]))


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "cpu": lambda one: one.cpu(),
    "to a name": lambda one: one.to("cpu"),
    "to a device": lambda one: one.to(torch.device("cpu"), torch.float32),
    "to a device by its name": lambda one: one.to(device="cpu"),
    "to a type": lambda one: one.to(torch.float32, copy=False),
    "to a real tensor": lambda one: one.to(torch.zeros(1)),
    "to itself": lambda one: one.to(one),
    "type": lambda one: one.type("torch.FloatTensor"),
    "type of torch": lambda one: one.type(torch.float32),
    "type_as": lambda one: one.type_as(torch.zeros(1)),
    "float": lambda one: one.float(),
    "contiguous": lambda one: one.contiguous(),
    "detach": lambda one: one.detach(),
    "twice": lambda one: one.cpu().t().contiguous().t().to("cpu").reshape(-1),
    "as_tensor": lambda one: torch.as_tensor(one, device="cpu"),
    "asarray": lambda one: torch.asarray(one, dtype=torch.float32, device="cpu"),
    "a copy": lambda one: one.to("cpu", copy=True),
    "a copy by place": lambda one: one.to(torch.float32, False, True),
    "another type": lambda one: one.to("cpu", torch.float64),
    "another layout": lambda one: one.t().to("cpu", memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_what_is_the_same_memory_in_plain_pytorch_is_the_same_memory(as_plain: AsPlain, kind: str) -> None:
    def case() -> list[nn.Module]:
        part = Part()
        ALIASES[kind](part.first.weight.data).fill_(5.0)
        real = torch.zeros(4, 4)
        real.to(part.first.weight).fill_(6.0)
        real.type_as(part.first.weight).add_(1.0)
        part.second.weight = nn.Parameter(real)
        return [part]

    as_plain(case)


def test_a_parameter_on_the_host_is_itself_there(real: Callable[..., Model]) -> None:
    def layers(_: Any) -> list[nn.Module]:
        part = Part()
        weight = part.first.weight
        assert weight.cpu() is weight
        assert weight.to("cpu") is weight
        assert weight.to(part.second.weight) is weight
        assert weight.type() == "torch.FloatTensor"
        assert part.cpu().float().first.weight is weight
        return [part]

    real(layers)


@torch.no_grad()
def called_in_training(part: Part) -> None:
    numbers = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    norm = nn.BatchNorm1d(4)
    part.register_module("norm", norm)
    norm(part.first(numbers))
    norm(numbers)
    part.first.bias.copy_(norm.running_mean)  # type: ignore[arg-type]
    norm.eval()
    part.first.weight.copy_(norm(part.second(numbers))[:4])
    nn.functional.batch_norm(numbers, part.second.bias, norm.bias, training=True)
    nn.functional.instance_norm(numbers.view(2, 4, 4), norm.weight, norm.bias)


@torch.no_grad()
def indexed_by_lists(part: Part) -> None:
    weight, other = part.first.weight, part.second.weight
    weight[[0, 1]] = weight[[1, 0]]
    weight[:, [True, False, True, False]] *= 2
    weight[[0, 3], [1, 2]] += weight[np.array([1, 2]), (0, 1)]
    weight[(0, 1), (2, 3)] = 6.0
    weight[[]] = 9.0
    order = [3, 1, 0, 2]
    other.copy_(weight[order][:, order])
    other[range(1, 3)] = 5.0
    other[np.array([True, False, False, False])] -= 1.0
    other[..., np.int64(2)] = 4.0
    part.first.bias[[weight[0].argmax().item()]] = 3.0
    part.first.bias[other[[3]].argmax(1)] += 2.0


CASES = [
    indexed_by_lists,
    conjugates_of_parameters,
    conjugates_of_constants,
    written_through_a_conjugate,
    made_of_a_negative,
    of_data_given_to_a_parameter,
    parameters_of_data_given_to_a_parameter,
    called_in_training,
]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("change", CASES)
def test_first_values_are_those_of_plain_pytorch(as_plain: AsPlain, change: Callable[[Part], None]) -> None:
    def case() -> list[nn.Module]:
        parts = [Part(), Part()]
        change(parts[0])
        return list(parts)

    as_plain(case)


def test_data_that_is_a_view_of_negatives_is_refused_by_name(real: Callable[..., Model]) -> None:
    def layers(_: Any) -> list[nn.Module]:
        part = Part()
        part.first.weight.data = torch._neg_view(part.second.weight.data)
        return [part]

    with pytest.raises(PlanError, match=r"a parameter of shape \[4, 4\] was given .* negative") as raised:
        real(layers)
    assert "resolve_neg" in str(raised.value)


def test_numbers_that_were_made_on_meta_unseen_are_refused_by_name(real: Callable[..., Model]) -> None:
    index = torch.tensor([1], device="meta")

    def layers(_: Any) -> list[nn.Module]:
        part = Part()
        part.first.weight.data[index] = 5.0
        return [part]

    with pytest.raises(
        PlanError, match=r"'0.first.weight' cannot be kept: .* torch.int64 tensor on meta, made where nobody"
    ):
        real(layers)


@pytest.mark.parametrize("size", [8, 300])  # copied at once, held by reference
def test_mapped_files_of_numbers_are_read_as_they_are(as_plain: AsPlain, tmp_path: Path, size: int) -> None:
    np.arange(size * size * 2, dtype=np.float32).tofile(tmp_path / "numbers")

    def case() -> list[nn.Module]:
        part = Part()
        numbers = torch.from_file(str(tmp_path / "numbers"), size=size * size * 2).view(2, size, size)
        part.first.weight = nn.Parameter(numbers[0])
        part.second.weight.data = numbers[1] * 2
        numbers[1].fill_(3.0)  # in memory, not in the file
        part.first.bias.data = numbers[1, 0].clone()
        return [part]

    as_plain(case)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(4)
        self.norm = nn.LazyBatchNorm1d()

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.norm(self.linear(tokens))
        return found


def test_lazy_modules_may_be_run_once_in_the_factory(as_plain: AsPlain, real: Callable[..., Model]) -> None:
    @torch.no_grad()
    def case() -> list[nn.Module]:
        part = Lazy()
        part(torch.ones(2, 5))
        for at, parameter in enumerate(part.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + at)
        part(torch.arange(10.0).view(2, 5))
        assert isinstance(part.norm.running_mean, Tensor)
        part.norm.running_mean.zero_()  # half of it is from numbers that were drawn
        assert isinstance(part.norm.running_var, Tensor)
        part.norm.running_var.zero_()
        loaded = Lazy()
        loaded.load_state_dict({name: value + 1 for name, value in part.state_dict().items()})
        return [part, loaded]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lazy modules are a new feature")
        as_plain(case)
        with pytest.raises(PlanError, match=r"shape of .0\.linear\.weight. is not known yet"):
            real(lambda _: [Lazy()])
