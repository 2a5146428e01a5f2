"""Tests that attention over slices equals attention over full sequences, in every form and with packed documents."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.model.attention import Attention
from sley_core.topology import Topology
from sley_isp.attention import SequenceAttention, wrap_attention
from sley_testing.collectives import collectives

HEADS, BATCH, LENGTH, WIDTH = 12, 2, 16, 4
BOUNDS = torch.tensor([[0, 3, 9, 16], [0, 7, 16, 16]], dtype=torch.int32)
"""Documents that begin in one slice and end in another, for two slices and for four."""

FORMS = ["qkv", "q and kv", "q, k, v"]


def plain(q, k, v, cu_seqlens=None):
    return Attention()(q, k, v, cu_seqlens=cu_seqlens)


def from_pair(q, kv, cu_seqlens=None):
    return plain(q, *kv.unbind(2), cu_seqlens=cu_seqlens)


def from_packed(qkv, cu_seqlens=None):
    return plain(*qkv.unbind(2), cu_seqlens=cu_seqlens)


def attention_and_args(form, q, k, v):
    """Returns the attention of a form and the arguments of its call."""
    if form == "qkv":
        return from_packed, (torch.stack([q, k, v], dim=2),)
    if form == "q and kv":
        return from_pair, (q, torch.stack([k, v], dim=2))
    return plain, (q, k, v)


def sequence_group(world):
    return world.make_groups(Topology.from_sizes(world.size, sp=world.size), 20)["sp"]


def measure_errors(cases):
    """Returns the largest error of context and input gradients and the exchanges of one call, for every case."""
    found = []
    with World.join("cpu") as world:
        group = sequence_group(world)
        for dtype, form, kv_heads, packed in cases:
            torch.manual_seed(kv_heads)
            shapes = [(BATCH, LENGTH, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads)]
            q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
            more = {"cu_seqlens": BOUNDS} if packed else {}
            factor = torch.randn(BATCH, LENGTH, HEADS, WIDTH, dtype=dtype)
            full = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
            expected = plain(*full, **more)
            expected.backward(factor)
            own = [tensor.chunk(group.size, dim=1)[group.coord].clone().requires_grad_() for tensor in (q, k, v)]
            attention, args = attention_and_args(form, *own)
            with collectives() as calls:
                context = wrap_attention(attention, group)(*args, **more)
                context.backward(factor.chunk(group.size, dim=1)[group.coord])
            pairs = [(context, expected), *((one.grad, all_.grad) for one, all_ in zip(own, full, strict=True))]
            errors = [((o - w.chunk(group.size, 1)[group.coord]).abs().max() / w.abs().max()).item() for o, w in pairs]
            found.append((max(errors), [call.op for call in calls]))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 1, 4])
def test_every_form_and_number_of_key_heads(ranks, size):
    """The forward and the backward each have two exchanges. Ranks that need the same key head get copies of it."""
    forms = itertools.product([torch.float64], FORMS, [1, 3, 4, 12], [False, True])
    cases = [case for case in forms if case[1] != "qkv" or case[2] == HEADS]
    cases += [(dtype, "q, k, v", kv_heads, True) for dtype in (torch.float32, torch.bfloat16) for kv_heads in (1, HEADS)]
    limits = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-6}
    for found in ranks(size, 120)(measure_errors, cases):
        for case, (error, calls) in zip(cases, found, strict=True):
            assert error <= limits[case[0]], (case, error)
            # To each of the others: a header and its part.
            assert (calls.count("send"), calls.count("recv")) == (4 * 2 * (size - 1),) * 2, (case, calls)
            assert len(calls) == 2 * calls.count("send"), (case, calls)


class Flat(nn.Module):
    """An attention that returns its context as [b, s, h d]."""

    def forward(self, q, k, v):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def padded(q, k, v, counts=None):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, counts[:, None, None]).transpose(1, 2)


def measure_unusual_calls():
    """Returns the errors of a flat context, two dtypes and a mask of the full sequence, and the notes on a mask of a slice."""
    with World.join("cpu") as world:
        group = sequence_group(world)
        torch.manual_seed(3)
        q, k, v = torch.randn(3, 2, 8, 4, 6, dtype=torch.float64).unbind()
        own = [tensor.chunk(group.size, dim=1)[group.coord] for tensor in (q, k, v)]
        attention = SequenceAttention(Flat())
        alone = attention(q, k, v)
        mixed = wrap_attention(lambda q, k, v, scale: (q + k.to(q) * scale) + v, group)(own[0], own[1].half(), own[2], 2.0)
        counts = torch.rand(2, 8) < 0.7
        counts[:, 0] = True
        masked = wrap_attention(padded, group)(*own, counts=counts)
        with pytest.raises(RuntimeError) as caught:
            wrap_attention(padded, group)(*own, counts=counts.chunk(group.size, 1)[group.coord])
        pairs = [
            (wrap_attention(attention, group)(*own), alone.chunk(group.size, dim=1)[group.coord]),
            (mixed, own[0] + own[1].half().double() * 2 + own[2]),
            (masked, padded(q, k, v, counts).chunk(group.size, 1)[group.coord]),
        ]
        return [float((one - other).abs().max()) for one, other in pairs], caught.value.__notes__


def test_flat_contexts_mixed_dtypes_and_masks(ranks):
    """Uses the class, which works on slices only in a run. Other arguments are passed on."""
    for errors, notes in ranks(2)(measure_unusual_calls):
        assert max(errors) < 1e-14
        assert "masks must cover the full sequence" in notes[0]


def squared(q, k, v, cu_seqlens=None):
    """Has the same shapes as `plain`."""
    return plain(q, k, v).square()


def collect_error_codes():
    """Returns the error codes of invalid calls, of a wrong context, and of ranks that differ."""
    codes = []
    with World.join("cpu") as world:
        group = sequence_group(world)

        def refuse(attention, *args, group=group, **more):
            with pytest.raises(RunError) as caught:
                wrap_attention(attention, group)(*args, **more)
            codes.append(caught.value.diagnostics[0].code)

        three, even = torch.zeros(1, 4, 3, 2), torch.zeros(1, 4, 4, 2)
        with collectives() as issued:
            refuse(plain, three, three, three)
            refuse(plain, even, three, three)
            refuse(plain, even, torch.zeros(1, 2, 4, 2), even)
            refuse(plain, q=even, k=even, v=even)
            refuse(plain, even, even)
        assert not issued, issued
        refuse(lambda q, k, v: (q, None), even, even, even)
        q, k, v = torch.randn(3, 1, 4, 4, 8, requires_grad=True).unbind()
        for other in (
            partial(squared, q, k, v),
            partial(plain, q, k, v, cu_seqlens=[0, 8]),
            partial(from_pair, q, torch.stack([k, v], dim=2)),  # gloo would end the process
            partial(plain, q, k[:, :, :2], v[:, :, :2]),
        ):
            call = partial(plain, q, k, v) if world.rank == 0 else other
            refuse(call.func, *call.args, group=sequence_group(world), **call.keywords)
    return codes


def test_invalid_calls_are_refused(ranks):
    """Invalid numbers, shapes and results, and ranks that attend differently, make no rank wait."""
    by_shape = ["sequence-heads", *["sequence-attention"] * 5]
    assert ranks(2, 60)(collect_error_codes) == [[*by_shape, *["ranks-differ"] * 4]] * 2
