"""What a site refuses, and what it writes: a table's gradient is torch's, without a second tensor of that size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_isp.sites import embedding_gradient


class Made(TorchDispatchMode):
    """The number of elements of the largest tensor that operations return, but for `known`."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known = known
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result is not self.known:
            self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_table(dtype, padding):
    """Many tokens of few rows, so that sums have an order; written, then added to what is there."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(11, (40,), generator=generator)
    rows = torch.randn(40, 4, generator=generator, dtype=torch.float64).to(dtype)
    given = rows.clone()
    site: Any = SimpleNamespace(module=nn.Embedding(300, 4, padding_idx=padding))
    wanted = torch.ops.aten.embedding_dense_backward(rows, tokens, 300, -1 if padding is None else padding, False)
    whole = torch.full((300, 4), torch.nan, dtype=dtype)
    with Made(whole) as made:
        embedding_gradient(site, None, rows, tokens, whole, False)
        assert torch.equal(whole, wanted)
        embedding_gradient(site, None, rows, tokens, whole, True)
    torch.testing.assert_close(whole, 2 * wanted)
    assert torch.equal(rows, given), "the output's gradient is autograd's"
    assert made.most <= max(rows.numel(), 300)


def test_the_gradient_of_a_table_in_half_is_summed_in_full():
    """bf16 tokens' rows into an fp32 buffer: 300 ones are 300, which bf16 cannot count to."""
    site: Any = SimpleNamespace(module=nn.Embedding(7, 2))
    whole = torch.empty(7, 2)
    tokens = torch.full((300,), 5)
    embedding_gradient(site, None, torch.full((300, 2), 1.0, dtype=torch.bfloat16), tokens, whole, False)
    assert whole[5].tolist() == [300.0, 300.0]
    assert whole.sum() == 600.0


def said(plans: list[dict[str, Any]], folder: Path) -> list[str]:
    """What a step of each plan says, up to the first line break."""
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            try:
                run.step()
                found.append("nothing")
            except RuntimeError as error:
                found.append(str(error).splitlines()[0])
    return found


def test_an_input_of_another_dtype_is_refused_in_torchs_words(ranks, own, sharded):
    """As where weights are whole: only autocast casts them. Gathered, and the head's, of which each rank has a slice."""
    data = {"data": {"factory": "scored:Labelled"}}
    models = [{"factory": "scored:narrowed", "options": {"place": place}} for place in ("middle", "head")]
    (whole, _) = said([sharded(1, 1, model=model, **data) for model in models], own)
    assert "must have the same dtype" in whole
    heads = [(model, {"head": head}) for model in models for head in ("gather", "vocabulary")]
    plans = [sharded(2, weights=weights, model=model, **data) for model, weights in heads]
    for found in ranks(2)(said, plans, own):
        assert found == [whole] * 4
