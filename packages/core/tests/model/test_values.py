"""First values: the same whatever the layout, complete and tied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_core.errors import PlanError
from sley_core.generators import seeded_as_plain
from sley_core.model.layers import Model

Real = Callable[..., Model]


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.table.weight.kept = "on the parameter"  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


class Mixed(nn.Module):
    """One of each of torch's that has something of its own, and a submodule shared with other layers."""

    def __init__(self, shared: nn.Module, noise: nn.Module) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv2d(2, 3, 3)
        self.batch = nn.BatchNorm1d(8)
        self.rnn = nn.GRU(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.shared = shared
        self.noise = noise

    def forward(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Noise(nn.Module):
    """No parameters, and random buffers, one tensor under two names."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(4))
        self.register_buffer("same_noise", self.noise, persistent=False)
        self.noise.normal_()


class Shared(nn.Module):
    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Head(nn.Module):
    """Holds the embedding's matrix, and a bias of its own."""

    def __init__(self, embed: Embed) -> None:
        super().__init__()
        self.output = nn.Linear(8, 11)
        self.output.weight = embed.table.weight

    def forward(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


def layers(_: DataInfo) -> list[tuple[str, nn.Module]]:
    embed, shared, noise = Embed(), Shared(), Noise()
    mixed = [Mixed(shared, noise), Mixed(shared, noise)]
    return [("embed", embed), ("first", mixed[0]), ("second", mixed[1]), ("head", Head(embed))]


def init_weights(module: nn.Module, name: str) -> None:
    """Sets some modules, changes one in place, and leaves the rest to their own methods."""
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight)
    if name.endswith(".shared.linear"):
        module.weight.mul_(2.0)  # type: ignore[operator, union-attr]


def with_init(data: DataInfo) -> Model:
    return Model(layers(data), init_weights=init_weights)


def values(model: Model) -> dict[str, Tensor]:
    """Everything that is not on meta, by qualified name."""
    return {
        name: tensor.detach()
        for layer in model
        for name, tensor in chain(
            layer.module.named_parameters(layer.name, remove_duplicate=False),
            layer.module.named_buffers(layer.name, remove_duplicate=False),
        )
        if not tensor.is_meta
    }


def is_buffer(name: str) -> bool:
    return name.endswith(("noise", "running_mean", "running_var", "num_batches_tracked"))


def subsets(names: list[str]) -> Iterator[set[str]]:
    for size in range(1, len(names)):
        yield from map(set, combinations(names, size))


@pytest.mark.sample(3)
@pytest.mark.parametrize("function", [layers, with_init])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_do_not_depend_on_which_layers_are_owned(real: Real, function: Any, dtype: torch.dtype) -> None:
    whole = values(real(function, dtype))
    for owned in subsets(["embed", "first", "second", "head"]):
        model = real(function, dtype, owned)
        found = values(model)
        ours = {name: value for name, value in found.items() if name.split(".")[0] in owned}
        memory = {id(parameter) for name in owned for parameter in model[name].module.parameters()}
        for layer in model:
            foreign = [parameter for parameter in layer.module.parameters() if not parameter.is_meta]
            assert memory.issuperset(map(id, foreign)), "a layer that is not owned takes no memory"
        assert ours.keys() == {name for name in whole if name.split(".")[0] in owned}
        for name, value in ours.items():
            assert value.dtype == whole[name].dtype
            assert torch.equal(value, whole[name]), (name, owned)


def test_values_follow_the_seed(real: Real) -> None:
    one, reseeded = values(real(layers)), values(real(layers, seed=1))
    assert not torch.equal(one["first.conv.weight"], one["second.conv.weight"])
    assert not torch.equal(one["first.conv.weight"], reseeded["first.conv.weight"])


def test_fp32_values_are_drawn_once_and_cast(real: Real) -> None:
    single, double, half = (values(real(layers, dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16))
    for name, value in single.items():
        assert torch.equal(value.double(), double[name].double())
        if not is_buffer(name):
            assert torch.equal(value.bfloat16(), half[name])
            assert double[name].dtype == torch.float64
    assert half["first.batch.running_var"].dtype == torch.float32, "buffers are never narrowed"
    assert double["first.batch.running_var"].dtype == torch.float64
    assert double["first.batch.num_batches_tracked"].dtype == torch.int64


def test_torchs_own_modules_get_the_values_that_their_constructors_give(real: Real) -> None:
    found = values(real(layers))
    assert torch.equal(found["first.norm.weight"], torch.ones(8))
    assert torch.equal(found["first.batch.running_var"], torch.ones(8))
    assert not found["first.attention.out_proj.bias"].any(), "attention sets its child's bias after the child did"
    assert not found["embed.table.weight"][0].any()
    assert found["embed.table.weight"][1:].std() == pytest.approx(1.0, abs=0.3)
    bound = (6 / (8 + 24)) ** 0.5  # Xavier's, over the three projections at once
    assert 0.8 * bound < found["first.attention.in_proj_weight"].abs().max() <= bound


def test_ties_requires_grad_and_attributes_survive(real: Real) -> None:
    model = real(layers, torch.float64)
    embed, first, second, head = (layer.module for layer in model)
    assert head.output.weight is embed.table.weight
    assert first.shared.linear.weight is second.shared.linear.weight
    assert head.output.weight.kept == "on the parameter"
    assert first.noise.noise is first.noise.same_noise is second.noise.noise
    assert not first.frozen.weight.requires_grad
    assert first.conv.weight.requires_grad
    first.rnn(
        torch.zeros(2, 1, 8, dtype=torch.float64)
    )  # the list of weights that it keeps beside its attributes was renewed too


def test_init_weights_has_the_last_word_and_may_leave_modules_alone(real: Real) -> None:
    plain, touched = values(real(layers)), values(real(with_init))
    assert torch.equal(touched["first.shared.linear.weight"], 2 * plain["first.shared.linear.weight"])
    assert torch.equal(touched["first.shared.linear.bias"], plain["first.shared.linear.bias"])
    assert touched["first.conv.weight"].std() > 3 * plain["first.conv.weight"].std()


def test_generator_and_gradients_are_left_alone(real: Real) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        state = torch.get_rng_state()
        model = real(layers)
        assert torch.equal(torch.get_rng_state(), state)
    assert model["embed"].module.table.weight.grad_fn is None
    assert torch.is_grad_enabled()


class TiedInside(nn.Module):
    """Two modules of one layer hold one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 8)
        self.output = nn.Linear(8, 300)
        self.output.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def test_a_tie_has_the_values_of_its_first_holder(real: Real) -> None:
    weight = values(real(lambda _: [TiedInside()]))["0.output.weight"]
    assert weight.std() == pytest.approx(1.0, abs=0.1), "an embedding's, not a linear's"


class Noisy(nn.Module):
    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def test_buffers_of_a_shared_module_have_the_values_of_its_first_layer(real: Real) -> None:
    def noisy(_: DataInfo) -> list[nn.Module]:
        noise = Noise()
        return [Noisy(noise), Noisy(noise)]

    whole, second = values(real(noisy)), values(real(noisy, owned={"1"}))
    assert whole["0.noise.noise"].any()
    assert torch.equal(whole["0.noise.noise"], second["1.noise.noise"])


class Uses(nn.Module):
    """Holds modules that other layers may hold too."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


def test_a_module_shared_with_a_layer_of_another_rank_stays(real: Real) -> None:
    """The middle layer is drawn for what the last shares with it, and leaves what it shares with the first as it was."""

    def overlapping(_: DataInfo) -> list[nn.Module]:
        one, two = nn.Linear(3, 3), nn.Linear(3, 3)
        return [Embed(), Uses(one), Uses(one, two), Uses(two)]

    whole = values(real(overlapping))
    for owned in subsets(["0", "1", "2", "3"]):
        for name, value in values(real(overlapping, owned=owned)).items():
            assert torch.equal(value, whole[name]), (name, owned)
            assert name.split(".")[0] in owned or "parts" in name


def test_a_default_dtype_that_the_factory_sets_counts_from_there_in_both_runs(real: Real) -> None:
    def layers(_: DataInfo) -> list[nn.Module]:
        before = Embed()
        torch.set_default_dtype(torch.float64)
        return [before]

    with seeded_as_plain(0):
        wanted = Embed().table.weight
    try:
        model = real(layers)
        assert torch.get_default_dtype() == torch.float64  # as in plain PyTorch
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(model["0"].module.table.weight, wanted)  # type: ignore[union-attr]


def _freeze(module: nn.Module, name: str) -> None:
    module.requires_grad_(False)


class FrozenLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = gain = nn.Parameter(torch.ones(3))
        gain.requires_grad = False  # the object that was given, not the one that is registered

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        (lambda _: Model([Embed()], _freeze), "0.table.weight"),
        (lambda _: Model([("0", Embed)], _freeze), "0.table.weight"),
        (lambda _: [FrozenLater()], "0.gain"),
    ],
)
def test_a_parameter_that_is_frozen_in_the_second_run_alone_is_refused(real: Real, layers: Any, name: str) -> None:
    with pytest.raises(PlanError, match=rf"'{name}' is first trained, and then frozen") as raised:
        real(layers)
    assert raised.value.diagnostics[0].code == "model-differs"
