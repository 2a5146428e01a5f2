"""Attention over slices is attention over the whole: every form, every number of heads, documents apart."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.model.attention import Attention
from sley_core.topology import Topology
from sley_isp.sequence.attention import SequenceAttention, over_slices
from sley_testing.collectives import collectives

HEADS, BATCH, LENGTH, WIDTH = 8, 2, 16, 4
BOUNDS = torch.tensor([[0, 3, 9, 16], [0, 7, 16, 16]], dtype=torch.int32)
"""Documents that begin in one slice and end in another, for two slices and for four."""

FORMS = ["qkv", "q and kv", "q, k, v"]


def plain(q, k, v, cu_seqlens=None):
    return Attention()(q, k, v, cu_seqlens=cu_seqlens)


def from_pair(q, kv, cu_seqlens=None):
    return plain(q, *kv.unbind(2), cu_seqlens=cu_seqlens)


def from_packed(qkv, cu_seqlens=None):
    return plain(*qkv.unbind(2), cu_seqlens=cu_seqlens)


def joined(form, q, k, v):
    """The attention of a form, and what it is called with."""
    if form == "qkv":
        return from_packed, (torch.stack([q, k, v], dim=2),)
    if form == "q and kv":
        return from_pair, (q, torch.stack([k, v], dim=2))
    return plain, (q, k, v)


def attended(cases, dtype):
    """The worst error of context and input gradients, and the exchanges of one call, of every case."""
    found = []
    with World.join("cpu") as world:
        group = world.groups(Topology.of(world.size, sp=world.size), 60)["sp"]
        for form, kv_heads, packed in cases:
            torch.manual_seed(kv_heads)
            shapes = [(BATCH, LENGTH, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads)]
            q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
            more = {"cu_seqlens": BOUNDS} if packed else {}
            factor = torch.randn(BATCH, LENGTH, HEADS, WIDTH, dtype=dtype)
            whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
            wanted = plain(*whole, **more)
            wanted.backward(factor)
            own = [t.chunk(group.size, dim=1)[group.coord].clone().requires_grad_() for t in (q, k, v)]
            attention, args = joined(form, *own)
            with collectives() as calls:
                context = over_slices(attention, group)(*args, **more)
                context.backward(factor.chunk(group.size, dim=1)[group.coord])
            pairs = [
                (context.detach(), wanted.detach()),
                *((one.grad, all_.grad) for one, all_ in zip(own, whole, strict=True)),
            ]
            errors = [float((o - w.chunk(group.size, dim=1)[group.coord]).abs().max() / w.abs().max()) for o, w in pairs]
            found.append((max(errors), [call.op for call in calls]))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_form_and_number_of_key_heads(ranks, size):
    """One exchange there and one back, in the forward and in the backward, whatever is packed; errors of 1e-10 at most."""
    cases = [case for case in itertools.product(FORMS, [1, 2, 4, 8], [False, True]) if case[0] != "qkv" or case[1] == 8]
    for found in ranks(size, 120)(attended, cases, torch.float64):
        for case, (error, calls) in zip(cases, found, strict=True):
            assert error <= 1e-10, (case, error)
            # To each of the others: a header and its part.
            assert (calls.count("send"), calls.count("recv")) == (4 * 2 * (size - 1),) * 2, (case, calls)
            assert len(calls) == 2 * calls.count("send"), (case, calls)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_other_types(ranks, dtype, limit):
    cases = [("q, k, v", kv_heads, packed) for kv_heads in (1, 2, 8) for packed in (False, True)]
    for found in ranks(4, 120)(attended, cases, dtype):
        for case, (error, _) in zip(cases, found, strict=True):
            assert error <= limit, (case, error)


def looks_ahead(position):
    """Whether the context of any earlier position, or of another document, changes with the token at `position`."""
    with World.join("cpu") as world:
        group = world.groups(Topology.of(world.size, sp=world.size), 60)["sp"]
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 1, LENGTH, 4, WIDTH, dtype=torch.float64).unbind()
        changed = [tensor.clone() for tensor in (k, v)]
        for tensor in changed:
            tensor[:, position] += 1
        attend = over_slices(plain, group)
        seen = []
        for keys, values in ((k, v), changed):
            own = [tensor.chunk(group.size, dim=1)[group.coord] for tensor in (q, keys, values)]
            seen.append(attend(*own, cu_seqlens=BOUNDS[:1]))
        return (seen[0] != seen[1]).any(-1).any(-1)[0].tolist()


def test_documents_do_not_see_each_other_across_slices(ranks):
    """The document [3, 9) lies in both slices of eight: its token 4 is seen by 4..8, and by nobody else."""
    seen = [one for part in ranks(2)(looks_ahead, 4) for one in part]
    assert [place for place, changed in enumerate(seen) if changed] == [4, 5, 6, 7, 8]


class Flat(nn.Module):
    """Returns its context as [b, s, h d]."""

    def forward(self, q, k, v):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def wrapped_and_flat():
    with World.join("cpu") as world:
        group = world.groups(Topology.of(world.size, sp=world.size), 60)["sp"]
        torch.manual_seed(3)
        q, k, v = torch.randn(3, 1, 8, 4, 6, dtype=torch.float64).unbind()
        attention = SequenceAttention(Flat())
        alone = attention(q, k, v)
        attention.join(group)
        own = [tensor.chunk(group.size, dim=1)[group.coord] for tensor in (q, k, v)]
        mixed = over_slices(lambda q, k, v, scale: (q + k.to(q) * scale) + v, group)
        half = mixed(own[0], own[1].half(), own[2], 2.0)
        return (
            float((attention(*own) - alone.chunk(group.size, dim=1)[group.coord]).abs().max()),
            float((half - (own[0] + own[1].half().double() * 2 + own[2])).abs().max()),
        )


def test_a_module_s_flat_context_and_tensors_of_two_types(ranks):
    """The class form: alone it is the attention itself, in a run it works on slices. Other arguments go through."""
    for flat, mixed in ranks(2)(wrapped_and_flat):
        assert flat < 1e-14
        assert mixed == 0


def refusals():
    """What is said of calls that cannot be, and whether anything was exchanged before."""
    said = []
    with World.join("cpu") as world:
        group = world.groups(Topology.of(world.size, sp=world.size), 60)["sp"]
        tensor = torch.zeros(1, 4, 3, 2)
        even = torch.zeros(1, 4, 4, 2)
        calls = [
            (plain, (tensor, tensor, tensor), {}),
            (plain, (even, torch.zeros(1, 4, 3, 2), torch.zeros(1, 4, 3, 2)), {}),
            (plain, (even, torch.zeros(1, 2, 4, 2), even), {}),
            (plain, (), {"q": even, "k": even, "v": even}),
            (plain, (even, even), {}),
        ]
        with collectives() as issued:
            for attention, args, more in calls:
                with pytest.raises(RunError) as caught:
                    over_slices(attention, group)(*args, **more)
                said.append(caught.value.diagnostics[0].message)
        assert not issued, issued
        with pytest.raises(RunError) as caught:
            over_slices(lambda q, k, v: (q, None), group)(even, even, even)
        said.append(caught.value.diagnostics[0].message)
    return said


def test_what_cannot_be_is_refused_before_anything_is_exchanged(ranks):
    """The numbers are named, and no rank waits for another."""
    for said in ranks(2, 10)(refusals):
        assert said[0] == "heads = sp x heads per rank fails: 3 is no multiple of 2"
        assert "do not fit: equal b and s, and heads a multiple of the keys'" in said[1]
        assert "[1, 4, 4, 2] and [1, 2, 4, 2]" in said[2]
        assert said[3] == "an attention over slices was called with no arguments by place"
        assert said[4] == "an attention over slices was called with [1, 4, 4, 2], [1, 4, 4, 2]"
        assert (
            said[5] == "an attention of 1 x 8 positions and 2 heads returned a tuple, not a context [b, s, h, d] or [b, s, h d]"
        )


def told_of_positions():
    """What is said where a mask of the keys is of one slice, and the error where it is of the whole sequence."""
    with World.join("cpu") as world:
        group = world.groups(Topology.of(world.size, sp=world.size), 60)["sp"]
        torch.manual_seed(4)
        q, k, v = torch.randn(3, 2, 8, 4, 3, dtype=torch.float64).unbind()
        counts = torch.rand(2, 8) < 0.7
        counts[:, 0] = True

        def padded(q, k, v, counts=None):
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, counts[:, None, None]).transpose(1, 2)

        own = [one.chunk(group.size, 1)[group.coord] for one in (q, k, v)]
        right = over_slices(padded, group)(*own, counts=counts)
        with pytest.raises(RunError) as caught:
            over_slices(padded, group)(*own, counts=counts.chunk(group.size, 1)[group.coord])
        wanted = padded(q, k, v, counts).chunk(group.size, 1)[group.coord]
        return float((right - wanted).abs().max()), caught.value.diagnostics[0]


def test_a_mask_is_of_the_whole_sequence(ranks):
    for error, problem in ranks(2, 30)(told_of_positions):
        assert error < 1e-14
        assert problem.code == "sequence-attention"
        assert "masks of the whole sequence" in problem.hint
