"""Flat buffers, shards of weights, and norms over them; states have names."""

import math
import random
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sley_core.engine.buffers import FlatBuffer
from sley_core.engine.reduction import MIN_ROWS_NUMEL, combined_norm
from sley_core.engine.shards import Shard
from sley_core.memory import ALIGNMENT_BYTES
from sley_testing.plans import small_plan
from sley_testing.runs import running
from sley_trainer.update import MASTER, states_of

GRADIENTS = torch.randn(3_000_017, generator=torch.Generator().manual_seed(1)) * 1e-3


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [1000, MIN_ROWS_NUMEL - 1, MIN_ROWS_NUMEL, 1_000_003, len(GRADIENTS)])
def test_a_norm_in_fp32_is_that_in_fp64(kind: float, size: int) -> None:
    found = combined_norm(GRADIENTS.split(size), kind)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.linalg.vector_norm(GRADIENTS.double(), kind), rtol=1e-6, atol=0)


def test_in_a_norm_what_has_gaps_counts_once_and_what_is_no_number_is_not_lost() -> None:
    matrix = GRADIENTS[:1_000_000].view(1000, 1000)
    found = combined_norm([matrix[:, :500], matrix[:, 500:].t()], 2.0)
    torch.testing.assert_close(found, torch.linalg.vector_norm(matrix.double()), rtol=1e-6, atol=0)
    for odd in (math.nan, math.inf):
        assert not combined_norm([torch.cat([GRADIENTS, torch.tensor([odd])])], 2.0).isfinite()


SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(deadline=None)
@given(SHAPES, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_views_are_aligned_disjoint_and_leave_the_padding_zero(shapes, dtype):
    buffer = FlatBuffer(shapes, dtype, torch.device("cpu"))
    start = buffer.data.data_ptr()
    for number, (view, shape) in enumerate(zip(buffer.views, shapes, strict=True), start=1):
        assert view.shape == shape
        assert view.dtype == dtype
        if view.numel():
            assert (view.data_ptr() - start) % ALIGNMENT_BYTES == 0
        view.fill_(number)
    assert [view.unique().tolist() for view in buffer.views if view.numel()] == [
        [number] for number, shape in enumerate(shapes, start=1) if torch.Size(shape).numel()
    ]
    expected = sum(number * torch.Size(shape).numel() for number, shape in enumerate(shapes, start=1))
    assert buffer.data.double().sum().item() == expected


@given(st.integers(1, 9), st.integers(1, 6), st.lists(st.integers(1, 3), max_size=2), st.integers(0, 2))
def test_shards_cover_the_whole_once(length, count, rest, dim):
    dim = min(dim, len(rest))
    shape = (*rest[:dim], length, *rest[dim:])
    whole = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    shards = [Shard(shape, count, index, dim) for index in range(count)]
    cuts = [shard.cut(whole) for shard in shards]
    assert {tuple(cut.shape) for cut in cuts} == {shards[0].local_shape}, "alike on every rank"
    assert all(cut.is_contiguous() for cut in cuts)
    assert torch.equal(torch.cat(cuts, dim).narrow(dim, 0, length), whole)
    assert sum(shard.unpadded_size for shard in shards) == length
    assert sum(cut.numel() - shard.padding for cut, shard in zip(cuts, shards, strict=True)) == whole.numel()
    assert all(
        not cut.narrow(dim, shard.unpadded_size, shard.size - shard.unpadded_size).any()
        for cut, shard in zip(cuts, shards, strict=True)
    )
    joined = shards[0].join(torch.stack(cuts))
    assert torch.equal(joined, whole)
    assert joined.is_contiguous()


def test_nested_states_have_the_way_to_them_in_their_names(texts):
    """As of optimizers that keep factors of a matrix in a list; words and numbers among them are no tensors."""
    with running(small_plan(precision__compute="bf16"), texts) as run:
        run.step()
        update = run.stepper.update
        entry = update.masters.local_params[0]
        left, right = torch.ones(3), torch.ones(4)
        update.optimizer.state[entry.parameter]["factors"] = {"both": [left, (right, "unused")]}
        update.optimizer.state["all"] = {"count": torch.ones(2)}
        of_first = {one.state: one.tensor for one in states_of(update) if one.name == entry.name}
        assert list(of_first) == [MASTER, "step", "exp_avg", "exp_avg_sq", "factors.both.0", "factors.both.1.0"]
        assert of_first["factors.both.0"] is left
        assert of_first["factors.both.1.0"] is right
        seen = {f"{one.name}.{one.state}" for one in states_of(update) if one.state != MASTER}
        assert {name for name, _ in run.memory.inventory.all_tensors("optimizer_states")} == {*seen, "optimizer.count"}


class Layer(nn.Module):
    """Words to logits, through a matrix that is the transpose of another, and a convolution in channels-last."""

    def __init__(self, *, contiguous: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 6)
        self.across = nn.Parameter(torch.linspace(-0.5, 0.5, 24).view(4, 6).t())
        self.mix = nn.Conv2d(4, 4, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)
        self.out = nn.Linear(4, 256)
        if contiguous:
            for parameter in self.parameters():
                parameter.data = parameter.detach().contiguous()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inner = self.table(tokens) @ self.across
        mixed = self.mix(inner.transpose(1, 2).unsqueeze(2)).squeeze(2).transpose(1, 2)
        logits: torch.Tensor = self.out(inner + mixed)
        return logits


def trained(tables, folder, contiguous, monkeypatch, relayout=None):
    """Returns the weights after three steps. relayout: draws other strides for all weights before each step."""
    made = ModuleType("strided")
    made.layers = lambda: [Layer(contiguous=contiguous)]
    monkeypatch.setitem(sys.modules, "strided", made)
    with running(tables, folder) as run:
        for _ in range(3):
            for param in run.registry if relayout else ():
                order = relayout.sample(range(param.parameter.ndim), param.parameter.ndim)
                back = [order.index(dim) for dim in range(len(order))]
                param.parameter.data = param.parameter.detach().permute(order).contiguous().permute(back)
            run.step()
        return {param.name: param.parameter.detach().clone() for param in run.registry}


@pytest.mark.sample(4)
@pytest.mark.parametrize("optimizer", ["core.adamw", "core.sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("handlers", [[], [{"use": "core.each"}]])
def test_the_order_in_memory_changes_nothing(texts, monkeypatch, optimizer, precision, handlers):
    """torch's fused optimizers step weights by gradients of other strides without an error, and wrongly."""
    tables = small_plan(
        model={"factory": "strided:layers"},
        optimizer={"use": optimizer, "lr": 0.05},
        precision={"compute": precision},
        gradient_handlers=handlers,
    )
    wanted = trained(tables, texts, True, monkeypatch)
    found = trained(tables, texts, False, monkeypatch)
    written = trained(tables, texts, True, monkeypatch, relayout=random.Random(1))
    for name, weight in wanted.items():
        assert torch.equal(weight, found[name]), name
        torch.testing.assert_close(written[name], weight, rtol=0, atol=1e-2 if precision == "bf16" else 1e-5, msg=name)
