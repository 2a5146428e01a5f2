"""First values: the same whatever the layout, complete and tied."""

import random
from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_core.errors import PlanError
from sley_core.generators import derive_seed, use_program_seed
from sley_core.json_text import decode_value, encode_value
from sley_core.model.layers import Model
from sley_core.model.tensors import fingerprint, flat_bytes
from sley_testing.plans import build_model_with_values


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.table.weight.kept = "on the parameter"  # type: ignore[attr-defined]


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


class Noise(nn.Module):
    """No parameters, and random buffers, one tensor under two names."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(4))
        self.register_buffer("same_noise", self.noise, persistent=False)
        self.noise.normal_()


class Head(nn.Module):
    """Holds the embedding's matrix, and a bias of its own."""

    def __init__(self, embed: Embed) -> None:
        super().__init__()
        self.output = nn.Linear(8, 11)
        self.output.weight = embed.table.weight


def layers(_: DataInfo) -> list[tuple[str, nn.Module]]:
    embed, shared, noise = Embed(), nn.ModuleDict({"linear": nn.Linear(8, 8)}), Noise()
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
def test_values_do_not_depend_on_which_layers_are_owned(function: Any, dtype: torch.dtype) -> None:
    whole = values(build_model_with_values(function, dtype))
    for owned in subsets(["embed", "first", "second", "head"]):
        model = build_model_with_values(function, dtype, owned)
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


def test_fp32_values_are_drawn_once_and_cast() -> None:
    single, double, half = (
        values(build_model_with_values(layers, dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)
    )
    for name, value in single.items():
        assert torch.equal(value.double(), double[name].double())
        if not is_buffer(name):
            assert torch.equal(value.bfloat16(), half[name])
            assert double[name].dtype == torch.float64
    assert half["first.batch.running_var"].dtype == torch.float32, "buffers are never narrowed"
    assert double["first.batch.running_var"].dtype == torch.float64
    assert double["first.batch.num_batches_tracked"].dtype == torch.int64


def test_ties_requires_grad_and_attributes_survive() -> None:
    model = build_model_with_values(layers, torch.float64)
    embed, first, second, head = (layer.module for layer in model)
    assert head.output.weight is embed.table.weight
    assert first.shared.linear.weight is second.shared.linear.weight
    assert head.output.weight.kept == "on the parameter"
    assert first.noise.noise is first.noise.same_noise is second.noise.noise
    assert not first.frozen.weight.requires_grad
    assert first.conv.weight.requires_grad
    first.rnn(torch.zeros(2, 1, 8, dtype=torch.float64))  # its list of weights beside its attributes was renewed too


def test_init_weights_has_the_last_word_and_may_leave_modules_alone() -> None:
    plain, touched = values(build_model_with_values(layers)), values(build_model_with_values(with_init))
    assert torch.equal(touched["first.shared.linear.weight"], 2 * plain["first.shared.linear.weight"])
    assert torch.equal(touched["first.shared.linear.bias"], plain["first.shared.linear.bias"])
    assert touched["first.conv.weight"].std() > 3 * plain["first.conv.weight"].std()


BUILDERS = {
    "embed": Embed,
    "block.0": lambda: nn.Linear(8, 8),
    "block.1": lambda: nn.Linear(8, 8),
    "head": lambda: nn.Linear(8, 11),
}


def built(_: DataInfo) -> Model:
    """By builders, the head tied to the embedding."""
    embed, block, _, head = BUILDERS.values()
    return Model(
        [("embed", embed), ("block", block, 2), ("head", head)], init_weights, ties=[("embed.table.weight", "head.weight")]
    )


def test_a_builder_has_the_values_of_plain_pytorch_under_the_seed_of_its_layer() -> None:
    """On the rank that owns it, whichever others that rank calls."""
    wanted = {}
    for name, build in BUILDERS.items():
        with use_program_seed(derive_seed(11, name)):
            wanted |= {f"{name}.{key}": value.detach() for key, value in build().named_parameters()}
    wanted["head.weight"] = wanted["embed.table.weight"]
    for owned in [set(BUILDERS), *subsets([*BUILDERS])]:
        found = values(build_model_with_values(built, owned=owned, seed=11))
        assert {name for name in wanted if name.rpartition(".")[0].removesuffix(".table") in owned} <= found.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())


class Uses(nn.Module):
    """Holds modules that other layers may hold too."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


def _freeze(module: nn.Module, name: str) -> None:
    module.requires_grad_(False)


class FrozenLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = gain = nn.Parameter(torch.ones(3))
        gain.requires_grad = False  # the object that was given, not the one that is registered


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


class MetaParameters(Scale):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.gain = nn.Parameter(torch.ones(3))


FROZEN = "model-differs.*'{}' is trainable at first, but is later frozen"


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (lambda: Model([Embed()], _freeze), FROZEN.format("0.table.weight")),
        (lambda: Model([("0", Embed)], _freeze), FROZEN.format("0.table.weight")),
        (lambda: [FrozenLater()], FROZEN.format("0.gain")),
        (lambda: [Uses(Scale())], "model-init.*'0.parts.0.gain' has no initial value"),
        (lambda: [Uses(Half())], "model-init.*'0.parts.0.gain' has no initial value"),
        (lambda: [Uses(MetaParameters())], "model-init.*'0.parts.0.gain' has no initial value"),
    ],
)
def test_a_parameter_that_is_frozen_in_the_second_run_alone_or_has_no_value_is_refused(layers: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        build_model_with_values(lambda _: layers())


def test_seeds_are_the_same_in_every_version() -> None:
    assert derive_seed(0) == 3229673090972834898
    assert derive_seed(1, "init", "blocks.0.attention") == 3053117252925988018
    assert derive_seed(2**62, "forward", 17, -1, "é") == 6217476628269203605


def test_every_part_its_type_and_its_place_count() -> None:
    uses: list[tuple[int | str, ...]] = [(), ("a",), ("a", "b"), ("ab",), ("b", "a"), (1,), ("1",), (1, 1), (11,), (-1,)]
    seeds = [derive_seed(0, *parts) for parts in uses] + [derive_seed(1), derive_seed(1, "a")]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert not [pair for pair in combinations(seeds, 2) if pair[0] == pair[1]]


@pytest.mark.parametrize("seed", range(30))
def test_the_bytes_of_any_view_are_those_of_its_copy(seed: int) -> None:
    """One element is contiguous with any stride, and a view of another dtype refuses that."""
    draw = random.Random(seed)
    value = torch.arange(60, dtype=draw.choice([torch.float64, torch.bfloat16, torch.int32])).reshape(3, 4, 5)
    for dim in range(3):
        chosen = range(draw.randint(0, 1), draw.randint(0, value.shape[dim]), draw.randint(1, 6))
        value = value[(slice(None),) * dim + (slice(chosen.start, chosen.stop, chosen.step),)]
    value = value.permute(draw.sample(range(3), 3))
    copy = torch.empty(value.shape, dtype=value.dtype).copy_(value)
    assert bytes(flat_bytes(value).numpy()) == bytes(copy.reshape(-1).view(torch.uint8).numpy())
    assert torch.equal(fingerprint(value), fingerprint(copy))
    assert torch.equal(decode_value(encode_value(value)), copy)
