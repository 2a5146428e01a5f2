"""The exchange between slices and heads equals a gather and a cut, and its backward is the exchange back."""

from __future__ import annotations

import random

import pytest
import torch

from sley_core.comm.collectives import all_gather
from sley_core.comm.world import World
from sley_core.topology import Topology
from sley_isp.exchange import gather_heads, repeat_heads, scatter_heads, sum_copies
from sley_testing.collectives import collectives

CASES = 12


def gathered(tensor, group):
    """All slices of a sequence, joined: what the exchange avoids."""
    rows = tensor.new_empty((group.size, *tensor.shape))
    all_gather(rows, tensor.detach().contiguous()[None], group, what="the oracle").wait()
    return torch.cat(list(rows), dim=1)


def own_heads(whole, group):
    """This rank's heads of a whole tensor; a head that several ranks need is on each of them."""
    repeated = repeat_heads(whole, group.size)
    width = repeated.shape[-2] // group.size
    return repeated.narrow(-2, group.coord * width, width)


def drawn(rng, dtype):
    """Shapes of slices that may be exchanged together: `lead` dims between positions and heads, any number of heads."""
    batch, length = rng.randint(1, 3), rng.randint(1, 5)
    shapes = [
        (batch, length, *rng.choice([(), (2,), (3,)]), rng.randint(1, 7), rng.choice([1, 2, 5]))
        for _ in range(rng.randint(1, 3))
    ]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def exchanges(seed, dtype):
    """Random tensors there and back, forward and backward, against the gather; what was issued meanwhile."""
    with World.join("cpu") as world:
        group = world.groups(Topology.of(world.size, sp=world.size), 60)["sp"]
        for case in range(CASES):
            rng = random.Random(f"{seed} {case}")
            torch.manual_seed(1000 * seed + 10 * case + world.rank)
            tensors = [tensor.requires_grad_() for tensor in drawn(rng, dtype)]
            with collectives() as calls:
                found = scatter_heads(group, *tensors)
                factors = [torch.randn(one.shape, dtype=torch.float64).to(dtype) for one in found]
                torch.autograd.backward(found, factors)
            shapes = [tuple(tensor.shape) for tensor in tensors]
            sent = [call for call in calls if call.op == "send" and call.dtype != "uint8"]
            assert len(sent) == 2 * (group.size - 1), (seed, case, calls)
            assert len(calls) == 4 * len(sent), "each has a header, and is received"
            for tensor, one, factor in zip(tensors, found, factors, strict=True):
                whole = gathered(tensor, group).requires_grad_()
                assert torch.equal(one, own_heads(whole, group)), (seed, case, shapes)
                (share,) = torch.autograd.grad(own_heads(whole, group), whole, factor)
                every = share.new_empty((group.size, *share.shape))
                all_gather(every, share.contiguous()[None], group, what="the oracle's gradient").wait()
                own = every.sum(0).chunk(group.size, dim=1)[group.coord]
                limit = 1e-14 if dtype is torch.float64 else 2**-6
                torch.testing.assert_close(tensor.grad, own, rtol=limit, atol=limit)
        return True


@pytest.mark.parametrize("size", [2, 3])
def test_exchange_equals_a_gather_and_a_cut(ranks, size):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    assert ranks(size)(exchanges, seed, torch.float64 if size == 2 else torch.bfloat16) == [True] * size


def there_and_back(seed):
    with World.join("cpu") as world:
        group = world.groups(Topology.of(world.size, sp=world.size), 60)["sp"]
        torch.manual_seed(seed + world.rank)
        sliced = torch.randn(2, 3, 2 * world.size, 5, dtype=torch.float64, requires_grad=True)
        (whole,) = scatter_heads(group, sliced)
        again = gather_heads(group, whole)
        factor = torch.randn_like(again)
        again.backward(factor)
        return torch.equal(again, sliced) and torch.equal(sliced.grad, factor)


def test_there_and_back_changes_nothing(ranks):
    assert ranks(3)(there_and_back, 1) == [True] * 3


@pytest.mark.parametrize(("heads", "ranks", "copies"), [(1, 4, 4), (2, 4, 2), (4, 2, 1), (3, 2, 2), (6, 4, 2)])
def test_a_head_is_copied_until_every_rank_has_as_many(heads, ranks, copies):
    tensor = torch.randn(1, 2, heads, 3, dtype=torch.float64, requires_grad=True)
    repeated = repeat_heads(tensor, ranks)
    assert repeated.shape[-2] == heads * copies
    assert repeated.shape[-2] % ranks == 0
    factor = torch.randn_like(repeated)
    (wanted,) = torch.autograd.grad(repeated, tensor, factor)
    torch.testing.assert_close(sum_copies(factor, heads), wanted)
