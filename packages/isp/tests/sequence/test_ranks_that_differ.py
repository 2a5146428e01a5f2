"""Ranks that attend in different ways over slices of the same sequences are told so, instead of mixing them or ending."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.topology import Topology
from sley_isp.sequence.attention import over_slices


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    heads = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)


def packed(q: Tensor, kv: Tensor) -> Tensor:
    return plain(q, *kv.unbind(2))


def squared(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """As `plain` in every shape."""
    return plain(q, k, v, causal).square()


def attended() -> list[str]:
    """What is said on this rank of every pair of attentions."""
    said = []
    with World.join("cpu") as world:
        is_first = world.rank == 0
        q, k, v = torch.randn(3, 1, 4, 4, 8, requires_grad=True).unbind()
        for first, second in [
            (partial(plain, q, k, v), partial(squared, q, k, v)),
            (partial(plain, q, k, v), partial(plain, q, k, v, causal=False)),
            (partial(plain, q, k, v), partial(packed, q, torch.stack([k, v], dim=2))),
            (partial(plain, q, k, v), partial(plain, q, k[:, :, :2], v[:, :, :2])),
        ]:
            group = world.groups(Topology.of(world.size, sp=world.size), 20)["sp"]
            one = first if is_first else second
            with pytest.raises(RunError) as caught:
                over_slices(one.func, group)(*one.args, **one.keywords)
            said.append(str(caught.value))
    return said


def test_attentions_that_differ(ranks):
    """By what they are, by an option, by how they are packed (gloo would end the process), and by their sizes."""
    first, second = ranks(2)(attended)
    assert all("ranks-differ" in one for one in (*first, *second))
    assert "queries, keys and values" in first[0]
    assert "rank 0 exchanges queries, keys and values (1536 bytes)" in second[3]
