"""Attention over a rank's heads is that over all heads: what depends on a head's number, or how many there are, is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.model.attention import Attention
from sley_core.topology import Topology
from sley_isp.sequence.attention import over_slices

HEADS, BATCH, LENGTH, WIDTH = 8, 2, 16, 4


def plain(q, k, v):
    return Attention()(q, k, v)


def grouped(repeat, q, k, v, *, scale=None, bias=None, dropout=0.0):
    """Causal attention [b, s, h, d] whose keys and values get as many heads as the queries by `repeat`."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    k, v = (repeat(one, q.shape[1] // one.shape[1]) for one in (k, v))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    mask = torch.zeros_like(later, dtype=q.dtype).masked_fill(later, -torch.inf)
    mask = mask if bias is None else mask + bias
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale).transpose(1, 2)


def side_by_side(one, times):
    return one.repeat_interleave(times, dim=1)


def in_turn(one, times):
    return one.repeat(1, times, 1, 1)


def interleaved(q, k, v):
    return grouped(side_by_side, q, k, v)


def tiled(q, k, v):
    """Query head i looks at key head i % h_kv: another one where a rank has some of the heads."""
    return grouped(in_turn, q, k, v)


def alibi(q, k, v):
    """A slope for each head's number (Press et al. 2022)."""
    slopes = torch.tensor([2.0 ** (-8 * (at + 1) / q.shape[2]) for at in range(q.shape[2])], dtype=q.dtype)
    places = torch.arange(q.shape[1])
    return grouped(side_by_side, q, k, v, bias=slopes[:, None, None] * (places[None] - places[:, None]))


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.5, 0.25, 0.125, 0.0625])


def slopes_of_a_table(q, k, v):
    """The first numbers of a table that knows nothing of ranks."""
    places = torch.arange(q.shape[1])
    slopes = SLOPES.to(q.dtype)[: q.shape[2], None, None]
    return grouped(side_by_side, q, k, v, bias=slopes * (places[None] - places[:, None]))


def slopes_as_a_whole(q, k, v):
    """As many slopes as the model has heads, of which one rank's head would take each."""
    places = torch.arange(q.shape[1])
    slopes = SLOPES.to(q.dtype)[:2, None, None]
    return grouped(side_by_side, q, k, v, bias=slopes * (places[None] - places[:, None]))


def scaled_by_heads(q, k, v):
    return grouped(side_by_side, q, k, v, scale=1 / q.shape[2])


def summed_over_heads(q, k, v):
    """One context for all heads, that any number of heads would take."""
    return interleaved(q, k, v).sum(2, keepdim=True)


def drawn(q, k, v):
    return grouped(side_by_side, q, k, v, dropout=0.25)


class Dropping(nn.Module):
    """Draws by an op of its own while it trains."""

    def forward(self, q, k, v):
        kept = torch.rand(q.shape[:-1])[..., None] < 0.5 if self.training else 1.0
        return interleaved(q, k, v) * kept


def drawn_otherwise(q, k, v):
    return interleaved(q, k, v) * (torch.rand(q.shape[:-1])[..., None] < 0.5)


def numbers_of_heads(calls, is_zero=False):
    """For each of (attention, heads, key heads): the worst error of context and gradients, or what is refused."""
    found = []
    with World.join("cpu") as world:
        group = world.groups(Topology.of(world.size, sp=world.size), 60)["sp"]
        for attention, heads, kv_heads in calls:
            torch.manual_seed(heads)
            shapes = [(2, 8, number, 3) for number in (heads, kv_heads, kv_heads)]
            whole = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
            if is_zero:
                whole[0].data.zero_()
            own = [one.detach().chunk(group.size, 1)[group.coord].requires_grad_() for one in whole]
            try:
                context = over_slices(attention, group)(*own)
            except RunError as error:
                found.append((error.diagnostics[0].code, error.diagnostics[0].message))
                continue
            if attention is drawn or isinstance(attention, Dropping):
                found.append(0.0)
                continue
            wanted = attention(*whole)
            wanted.square().sum().backward()
            context.square().sum().backward()
            pairs = [(context, wanted), *((one.grad, all_.grad) for one, all_ in zip(own, whole, strict=True))]
            found.append(max(float((o - w.chunk(group.size, 1)[group.coord]).detach().abs().max()) for o, w in pairs))
    return found


WHAT_HEADS_ARE_COUNTED_BY = [
    (tiled, 4, 4, True),
    (tiled, 8, 4, False),
    (tiled, 4, 2, False),
    (tiled, 4, 1, True),
    (tiled, 8, 1, True),
    (alibi, 4, 4, False),
    (alibi, 4, 1, False),
    (slopes_of_a_table, 4, 4, False),
    (slopes_as_a_whole, 2, 2, False),
    (scaled_by_heads, 4, 4, False),
    (scaled_by_heads, 4, 2, False),
    (scaled_by_heads, 4, 1, False),
    (summed_over_heads, 4, 4, False),
    (interleaved, 4, 4, True),
    (interleaved, 4, 2, True),
    (interleaved, 4, 1, True),
    (interleaved, 8, 2, True),
    (plain, 8, 4, True),
    (plain, 8, 2, True),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("is_zero", [False, True])
def test_what_depends_on_the_number_or_the_place_of_a_head_is_refused(ranks, size, is_zero):
    """A rank counts its own heads from 0: slopes, groups and scales by them would be others. Zeros hide none."""
    cases = [case for case in WHAT_HEADS_ARE_COUNTED_BY if case[1] % size == 0]
    for found in ranks(size, 60)(numbers_of_heads, [case[:3] for case in cases], is_zero):
        for case, one in zip(cases, found, strict=True):
            if case[3]:
                assert isinstance(one, float), (case, one)
                assert one < 1e-12, (case, one)
            else:
                assert isinstance(one, tuple), (case, one)
                assert one[0] in ("sequence-layout", "sequence-attention"), (case, one)


def test_groups_that_ranks_share_and_lie_askew(ranks):
    """Three key heads for six on two ranks: the middle one is on both."""
    cases = [(interleaved, 6, 3), (plain, 6, 3), (tiled, 6, 3)]
    for found in ranks(2, 30)(numbers_of_heads, cases):
        assert max(found[:2]) < 1e-12
        assert found[2][0] == "sequence-layout"


def test_attention_that_draws(ranks):
    """By torch's dropout, or as a module while it trains: asked without. What cannot be asked without is refused so."""
    for found in ranks(2, 30)(numbers_of_heads, [(drawn, 4, 2), (Dropping(), 4, 2), (drawn_otherwise, 4, 2)]):
        assert found[:2] == [0.0, 0.0]
        assert found[2][0] == "sequence-layout"
        assert "random" in found[2][1]
