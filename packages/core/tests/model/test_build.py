"""A model is built on meta from what a factory returns, or the factory is told by a code; the example models are."""

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from sley_core.data.dataset import DataInfo, Field
from sley_core.errors import PlanError
from sley_core.model.build import HostModel, build_on_meta
from sley_core.model.layers import Model
from sley_core.plan.load import plan_from_dict
from sley_models.llama import build_llama
from sley_models.plugin import LlamaConfig
from sley_testing.plans import TOKENS, build_meta_model, build_model_with_values, small_plan
from sley_testing.ranks import Ranks


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]), persistent=False)
        self.register_buffer("noise", torch.randn(3))


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Tied(nn.Module):
    def __init__(self, embed: Embed) -> None:
        super().__init__()
        self.weight = embed.table.weight
        fresh = nn.Parameter(torch.ones(2))
        self.first, self.second = fresh, fresh
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.rnn = nn.LSTM(4, 4)
        self.listed = nn.ParameterList([fresh, torch.zeros(3)])


def tied(_: DataInfo) -> list[nn.Module]:
    embed = Embed()
    return [embed, Tied(embed)]


def test_parameters_are_on_meta_with_their_ties_and_buffers_have_their_values() -> None:
    model = build_meta_model(tied)
    assert all(parameter.is_meta for layer in model for parameter in layer.module.parameters())
    embed, last = (layer.module for layer in model)
    assert embed.scale.tolist() == [0.5, 2.0]
    assert embed.table.weight.shape == (7, 4)
    assert last.weight is embed.table.weight
    assert last.listed[0] is last.first is last.second
    assert last.first.requires_grad
    assert not last.frozen.requires_grad
    assert len(list(last.parameters())) == 1 + 1 + 1 + 4 + 1


def test_random_buffers_follow_the_seed_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = (build_model_with_values(tied, seed=seed)["0"].module.noise for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def parameters(tensor: torch.Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(tensor, requires_grad=False)])


RNG = numpy.random.default_rng(0)


def drawn_outside() -> nn.Module:
    holder = Holder(nn.Linear(4, 4))
    nn.init.constant_(holder.inner.weight, RNG.normal())  # type: ignore[arg-type]
    return holder


def draw_from(generator: torch.Generator) -> nn.Module:
    return nn.Linear(4, 4).apply(lambda one: nn.init.normal_(one.weight, generator=generator))


def share(builds_first: bool) -> Model:
    """A rank calls its own builders alone: `init_weights` would set the shared parameter in another order on each."""
    shared = nn.Linear(4, 4)
    first = (lambda: Holder(shared)) if builds_first else Holder(shared)
    return Model([("first", first), ("second", lambda: Holder(shared))])


SHARED = "model-factory.*'second.inner.weight' and 'first.inner.weight' are the same parameter"
DRAWN = "model-random.* the builder of the layer 'some.0' uses a Generator"  # how many have drawn before depends on the rank


def adapted() -> Model:
    model = Model([Embed()])
    model.adapt = lambda module, name: module.get_parameter("missing")
    return model


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (lambda: [parameters(torch.zeros(3, dtype=torch.int8))], "model-init.*'0.0' is torch.int8, but .* be floating-point"),
        (lambda: [nn.LazyLinear(4)], "model-init.*'0.weight' has no shape yet"),
        (lambda: [parameters(torch.eye(3).to_sparse_csr())], "model-init.*'0.0' is a Parameter, but must be a plain dense"),
        (lambda: Model([Embed()], lambda *_: 1 / 0), r"model-init.*'0.table' \(Embedding\) cannot be .*: ZeroDivisionError"),
        (lambda: [Embed(), nn.BatchNorm1d(3, affine=False, device="meta")], "model-buffer.*'1.running_mean' was built without"),
        (partial(list, [Embed()]), "model-init.*'0.table.weight' belongs to a model that an earlier call built"),
        (partial(share, True), SHARED),
        (partial(share, False), SHARED),
        (lambda: [("some", drawn_outside, 2)], DRAWN),
        (lambda: [("some", partial(draw_from, torch.Generator()), 2)], DRAWN),
        (adapted, "model-adapters.* the layer '0' cannot have adapters: AttributeError"),
        (partial(lambda names: [(next(names), Embed())], iter("ab")), "model-differs.*: first the layers a, then b"),
        (
            partial(lambda sizes: [Embed(), nn.Linear(4, next(sizes))], iter((4, 5))),
            r"model-differs.*1.weight' is .* \[4, 4\], ",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(layers: Callable[[], Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        build_model_with_values(lambda _: layers())


FACTORY = """
from torch import nn

class Embed(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.table = nn.Embedding(size, 4)
    def forward(self, tokens): ...

def layers(data, width=4): return [Embed(data.vocab_size), nn.Linear(4, width)]
def takes(widths):
    made = [Embed(widths.pop())]
    while widths: made.append(nn.Linear(4, widths.pop()))
    return made
"""


def from_factory(folder: Path, factory: str, **options: object) -> Model:
    (folder / "own_model.py").write_text(FACTORY)
    plan = plan_from_dict(small_plan(model={"factory": factory, "options": options}), folder)
    return build_on_meta(plan.model, TOKENS, 0)


def test_a_factory_of_the_plan_is_built_on_meta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    model = from_factory(tmp_path, "own_model:layers", width=9)
    assert model["1"].module.weight.shape == (9, 4)
    assert model["1"].module.weight.is_meta
    assert model["0"].fields == ("tokens",)
    shrinking = from_factory(tmp_path, "own_model:takes", widths=[4, 4, 7])  # its options, at each call
    assert len(HostModel(shrinking).factory_module(shrinking["1"]).state_dict()) == 2


def test_the_example_model_has_a_gradient_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "examples" / "models")
    layers = import_module("conv_tie").layers
    model = build_model_with_values(lambda data: layers(data=data, hidden=16, num_blocks=2), torch.float64)
    output: Any = torch.randint(0, 97, (3, 24), generator=torch.Generator().manual_seed(5))
    for layer in model:
        output = layer.module(output)
    output.square().sum().backward()
    assert output.shape == (3, 24, 97)
    assert all(parameter.grad is not None for layer in model for parameter in layer.module.parameters())


def build_a_billion() -> tuple[int, int, float]:
    """Builds a Llama on meta; returns its elements, the bytes by which this process grew, and the CPU seconds."""
    sizes = LlamaConfig(num_layers=16, hidden=2048, heads=32, kv_heads=8, ffn_hidden=8192, vocab_size=32000)
    data = DataInfo({"tokens": Field("int64")}, 32000)
    one_layer = sizes.model_copy(update={"num_layers": 1})
    build_meta_model(lambda data: build_llama(one_layer, data), data)  # the first time of anything
    size, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    model = build_meta_model(lambda data: build_llama(sizes, data), data)
    seconds = time.process_time() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size
    numel = sum(parameter.numel() for layer in model for parameter in layer.module.parameters())
    return numel, grown * (1 if sys.platform == "darwin" else 1024), seconds


def test_a_billion_parameters_take_no_memory(ranks: Callable[..., Ranks]) -> None:
    ((numel, grown, seconds),) = ranks(1, init=False)(build_a_billion)
    assert numel > 1e9
    assert grown < 200e6
    assert seconds < 5
