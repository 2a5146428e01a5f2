"""What a factory puts into parameters is what a run starts from: the same code run by plain PyTorch is the oracle."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_core.errors import PlanError
from sley_core.model.layers import Model

Real = Callable[..., Model]


class Part(nn.Module):
    """A layer of two linears, whose weights cases change."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size, bias=False)
        nn.init.constant_(self.first.weight, 0.5)
        nn.init.zeros_(self.first.bias)
        nn.init.eye_(self.second.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def state() -> dict[str, Tensor]:
    """A checkpoint of a `Part`."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(value.shape, generator=generator) for name, value in Part().state_dict().items()}


def in_constructors() -> list[nn.Module]:
    return [Part(), Part()]


def applied() -> list[nn.Module]:
    """As nanoGPT does it: everything is initialised again at the end."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.02)

    parts = nn.ModuleList([Part(), Part()])
    parts.apply(init)
    for name, parameter in parts.named_parameters():
        if name.endswith("second.weight"):
            nn.init.constant_(parameter, 0.01)
    return list(parts)


def loaded() -> list[nn.Module]:
    part = Part()
    part.load_state_dict(state())
    return [part, Part()]


def assigned() -> list[nn.Module]:
    part = Part()
    part.load_state_dict(state(), assign=True)
    return [part, Part()]


def on_meta_then_assigned() -> list[nn.Module]:
    with torch.device("meta"):
        part = Part()
    part.load_state_dict(state(), assign=True)
    return [part]


def emptied_then_loaded() -> list[nn.Module]:
    with torch.device("meta"):
        part = Part()
    part.to_empty(device="cpu")
    part.load_state_dict(state())
    return [part]


def tied_before_loading() -> list[nn.Module]:
    one, two = Part(), Part()
    two.second.weight = one.first.weight
    one.load_state_dict(state())
    return [one, two]


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


def printed() -> list[nn.Module]:
    """Numbers that are written out, and memory that is shared with processes."""
    part = Part()
    part.load_state_dict(state())
    said = f"{part.first.weight.mean():.4f}"
    part.share_memory()
    with torch.no_grad():
        part.second.weight.fill_(float(said))
    return [part]


def copied() -> list[nn.Module]:
    part = Part()
    part.load_state_dict(state())
    return [part, copy.deepcopy(part), copy.deepcopy(part).double(), copy.deepcopy(part).to("cpu", torch.bfloat16)]


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


def reused_memory() -> list[nn.Module]:
    """numpy writes where torch does not look; each parameter was given what was there at its time."""
    one, two, buffer = Part(), Part(), np.zeros((4, 4), dtype=np.float32)
    for at, part in enumerate((one, two)):
        buffer[:] = at + 1
        with torch.no_grad():
            part.first.weight.copy_(torch.from_numpy(buffer))
    zeros = torch.zeros(4, 4)
    zeros.numpy()[2] = 5.0
    two.second.weight = nn.Parameter(zeros)
    zeros.numpy()[3] = 6.0
    return [one, two]


OUTSIDE = Part()
OUTSIDE.load_state_dict(state())


def made_outside() -> list[nn.Module]:
    """Modules and parameters of a model that was there before; that model's parameters stay as they are."""
    part = Part()
    part.second = OUTSIDE.second
    part.first.weight = OUTSIDE.first.weight
    return [part]


CASES = [
    made_outside,
    in_constructors,
    applied,
    loaded,
    assigned,
    on_meta_then_assigned,
    emptied_then_loaded,
    tied_before_loading,
    tied_after_loading,
    data_set,
    in_place,
    own_parameters,
    looked_at,
    printed,
    copied,
    drawn_by_a_generator,
    parametrized,
    computed_buffer,
    in_another_thread,
    reused_memory,
]


def values(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, layer in layers.items():
        found |= dict(layer.named_parameters(name, remove_duplicate=False))
        found |= dict(layer.named_buffers(name))
    return found


@pytest.mark.parametrize("case", CASES)
def test_first_values_are_those_of_plain_pytorch(real: Real, case: Callable[[], list[nn.Module]]) -> None:
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


def test_init_weights_has_the_last_word_over_what_the_factory_gave(real: Real) -> None:
    def init_weights(module: nn.Module, name: str) -> None:
        if name.endswith("second"):
            module.weight.add_(1.0)  # type: ignore[operator, union-attr]

    model = real(lambda _: Model(loaded(), init_weights=init_weights))
    wanted = state()
    assert torch.equal(model["0"].module.first.weight, wanted["first.weight"])
    assert torch.equal(model["0"].module.second.weight, wanted["second.weight"] + 1.0)


def test_what_nobody_writes_is_reset_and_nothing_else(real: Real) -> None:
    class Late(Part):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.empty(3))

        def reset_parameters(self) -> None:
            self.gain.fill_(2.0)
            self.first.reset_parameters()  # in vain: it has its values

    part = real(lambda _: [Late()])["0"].module
    assert part.gain.tolist() == [2.0] * 3
    assert part.first.weight.eq(0.5).all()
