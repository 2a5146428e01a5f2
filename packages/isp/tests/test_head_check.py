"""Attention that depends on the number of a head, or on how many there are, is refused, and so is [b, h, s, d]."""

from __future__ import annotations

from math import lcm
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sley_core.errors import RunError
from sley_core.model.attention import Attention
from sley_isp.head_check import HeadCheck


def plain(q, k, v):
    return Attention()(q, k, v)


def grouped(repeat, q, k, v, *, scale=None, bias=None, dropout=0.0):
    """Causal attention [b, s, h, d] whose keys and values get as many heads as the queries by `repeat`."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    k, v = (repeat(tensor, q.shape[1] // tensor.shape[1]) for tensor in (k, v))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    mask = torch.zeros_like(later, dtype=q.dtype).masked_fill(later, -torch.inf)
    mask = mask if bias is None else mask + bias
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale).transpose(1, 2)


def side_by_side(tensor, times):
    return tensor.repeat_interleave(times, dim=1)


def interleaved(q, k, v):
    return grouped(side_by_side, q, k, v)


def tiled(q, k, v):
    """Query head i looks at key head i % h_kv: another one on a rank with some of the heads."""
    return grouped(lambda tensor, times: tensor.repeat(1, times, 1, 1), q, k, v)


def sloped(slopes, q, k, v):
    places = torch.arange(q.shape[1])
    return grouped(side_by_side, q, k, v, bias=slopes.to(q.dtype)[:, None, None] * (places[None] - places[:, None]))


def alibi(q, k, v):
    """A slope for each head's number (Press et al. 2022)."""
    return sloped(torch.tensor([2.0 ** (-8 * (at + 1) / q.shape[2]) for at in range(q.shape[2])]), q, k, v)


def slopes_of_a_table(q, k, v):
    """The first numbers of a table that knows nothing of ranks."""
    return sloped(torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.5, 0.25, 0.125, 0.0625])[: q.shape[2]], q, k, v)


def scaled_by_heads(q, k, v):
    return grouped(side_by_side, q, k, v, scale=1 / q.shape[2])


def summed_over_heads(q, k, v):
    """One context for all heads."""
    return interleaved(q, k, v).sum(2, keepdim=True)


def over_all_heads(q, k, v):
    return interleaved(q, k, v) + v.mean(-2, keepdim=True)


def transposed(q, k, v):
    """[b, h, s, d], as torch's own attention wants it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def dropped(q, k, v):
    return grouped(side_by_side, q, k, v, dropout=0.25)


class Dropping(nn.Module):
    """Draws by its own operation while it trains."""

    def forward(self, q, k, v):
        kept = torch.rand(q.shape[:-1])[..., None] < 0.5 if self.training else 1.0
        return interleaved(q, k, v) * kept


def drawn(q, k, v):
    return interleaved(q, k, v) * (torch.rand(q.shape[:-1])[..., None] < 0.5)


def joined(attention, form):
    """`attention` as it is called with a form, and the form of its tensors."""
    if form == "qkv":
        return lambda qkv: attention(*qkv.unbind(2)), lambda q, k, v: (torch.stack([q, k, v], 2),)
    if form == "q and kv":
        return lambda q, kv: attention(q, *kv.unbind(2)), lambda q, k, v: (q, torch.stack([k, v], 2))
    return attention, lambda q, k, v: (q, k, v)


def code(attention, num_ranks, heads, kv_heads, length=16, form="q, k, v", is_zero=False):
    """Checks a rank's call of `attention`; returns the error's code, or "" if it passes."""
    attention, join = joined(attention, form)
    check = HeadCheck(attention, SimpleNamespace(size=num_ranks, has_peers=True))
    shapes = [(2, length, number // num_ranks, 3) for number in (heads, *[lcm(kv_heads, num_ranks)] * 2)]
    tensors = join(*(torch.zeros(shape) if is_zero else torch.randn(shape, dtype=torch.float64) for shape in shapes))
    state = torch.get_rng_state()
    try:
        check.before(tensors, (), {}, kv_heads)
    except RunError as error:
        return error.diagnostics[0].code
    assert torch.equal(torch.get_rng_state(), state)
    return "" if check.is_done else "sequence-attention"  # no context: the caller raises


LAYOUT = {"sequence-layout", "sequence-attention"}
NUMBERS = [
    (tiled, 4, 4, {""}),
    (tiled, 4, 1, {""}),
    (tiled, 8, 1, {""}),
    (tiled, 8, 4, LAYOUT),
    (tiled, 4, 2, LAYOUT),
    (alibi, 4, 4, LAYOUT),
    (alibi, 4, 1, LAYOUT),
    (slopes_of_a_table, 4, 4, LAYOUT),
    (scaled_by_heads, 4, 4, LAYOUT),
    (scaled_by_heads, 4, 2, LAYOUT),
    (scaled_by_heads, 4, 1, LAYOUT),
    (summed_over_heads, 4, 4, LAYOUT),
    (over_all_heads, 4, 4, LAYOUT),
    (interleaved, 4, 4, {""}),
    (interleaved, 4, 2, {""}),
    (interleaved, 4, 1, {""}),
    (interleaved, 8, 2, {""}),
    (plain, 8, 4, {""}),
    (plain, 8, 2, {""}),
]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize(("attention", "heads", "kv_heads", "codes"), NUMBERS)
def test_numbers_of_heads(attention, heads, kv_heads, codes, num_ranks, is_zero):
    """A rank counts its own heads from 0: slopes, groups and scales by them would be others. Zeros hide none."""
    assert code(attention, num_ranks, heads, kv_heads, is_zero=is_zero) in codes


def test_groups_that_ranks_share_and_lie_askew():
    """Three key heads for six on two ranks: the middle one is on both."""
    assert [code(attention, 2, 6, 3) for attention in (interleaved, plain, tiled)] == ["", "", "sequence-layout"]


@pytest.mark.parametrize("form", ["qkv", "q and kv", "q, k, v"])
@pytest.mark.parametrize(("length", "heads"), [(4, 8), (4, 4), (8, 4), (2, 4), (2, 8)])
def test_heads_and_positions_are_told_apart(form, length, heads):
    """Also where shapes do not tell, as 4 heads of 4 positions."""
    assert code(plain, 2, heads, heads, length, form) == ""
    assert code(transposed, 2, heads, heads, length, form) in LAYOUT


def test_attention_that_draws():
    """By torch's dropout, or as a module while it trains: it is checked without. Other draws cannot be left out."""
    dropping = Dropping()
    assert [code(attention, 2, 4, 2) for attention in (dropped, dropping, drawn)] == ["", "", "sequence-layout"]
    assert dropping.training


def test_the_first_conclusive_call_is_the_last_one_that_is_checked():
    calls = []

    def counted(q, k, v):
        calls.append(q.shape)
        return plain(q, k, v)

    check = HeadCheck(counted, SimpleNamespace(size=2, has_peers=True))
    for length in (1, 8, 8):
        check.before([torch.randn(1, length, 1, 3) for _ in range(3)], (), {}, 2)
    assert len(calls) == 3, "one position of one head shows nothing"
