"""bf16: weights and activations in it, gradients accumulated in fp32 whatever dp is; and gradients that travel in it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from sley_core.comm.groups import make_groups
from sley_core.comm.progress import SentBytes
from sley_core.engine.buffers import FlatBuffer
from sley_core.engine.registry import Param
from sley_core.topology import Topology
from sley_dp.config import BF16_TOLERANCE
from sley_dp.narrow import Narrow
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import assert_parity, record, same_on_all

BF16 = {"precision": {"compute": "bf16"}}


@pytest.mark.parametrize("size", [2, 4])
def test_bf16_on_any_number_of_ranks(ranks, small, own, size):
    """First gradients are those of one process to fp32's rounding, since each micro-batch's are: sums are fp32 for any dp."""
    tables = small(batch__global_size=8, **BF16)
    (reference,) = ranks(1)(record, tables, 3, folder=own)
    found = ranks(size)(record, tables, 3, folder=own)
    assert_parity(reference, found, "bf16")
    same_on_all(found)
    for rank in found:
        assert rank.gradients[0]["layer0.weight"].dtype == torch.float32
        assert rank.weights["layer0.weight"].dtype == torch.bfloat16
        assert_close_gradients(reference.gradients[0], rank.gradients[0], 1e-6)


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.campaign)])
def test_equal_gradients_sum_exactly(ranks, small, own, batches, size):
    """64 equal micro-batches per rank give 64 times one; in bf16 a sum would stand still long before."""
    (once,) = ranks(1)(record, small(**BF16, batch__global_size=1), 1, folder=own, batches=batches((5,)))
    tables = small(**BF16, batch__global_size=64 * size)
    for rank in ranks(size)(record, tables, 1, folder=own, batches=batches((5,) * 64 * size)):
        assert_same_bits(once.gradients[0], rank.gradients[0])


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.campaign)])
def test_updates_below_the_resolution_of_bf16_are_not_lost(ranks, small, own, batches, size):
    """Each is less than half a unit in the last place of a weight; their sum arrives through the masters."""
    tables = small(**BF16, optimizer__lr=3e-5, run__steps=100, run__seed=6)
    (one,) = ranks(1)(record, small(optimizer__lr=3e-5, run__seed=6), 1, folder=own, batches=batches((0, 1, 2, 3)))
    found = ranks(size)(record, tables, 100, folder=own, batches=batches((0, 1, 2, 3)) * 100)
    for rank in found:
        first, last = (weights["layer0.weight"].float() for weights in (rank.first, rank.weights))
        update = 3e-5 * one.gradients[0]["layer0.weight"].abs()
        assert (update < first.abs() * 2**-10).any(), "plain bf16 weights would not move at all here"
        moved = (first != last) & (update < first.abs() * 2**-10)
        assert moved.sum() > moved.numel() / 4


@pytest.mark.parametrize(
    ("size", "compute"),
    [
        (2, "fp32"),
        (4, "bf16"),
        *(pytest.param(*case, marks=pytest.mark.campaign) for case in ((2, "bf16"), (3, "fp32"), (3, "bf16"), (4, "fp32"))),
    ],
)
def test_gradients_that_travel_as_bf16(ranks, small, own, size, compute):
    """Within the record's tolerance of one process, equal bits on all ranks, and the bucket's size changes none."""
    tables = [
        small({"reduction": "bf16", "bucket_mb": bucket_mb}, precision__compute=compute, batch__global_size=12)
        for bucket_mb in (0.0003, 25.0)
    ]
    (reference,) = ranks(1)(record, tables[0], 3, folder=own)
    few, many = (ranks(size)(record, each, 3, folder=own) for each in tables)
    same_on_all([*few, *many])
    for rank in few:
        assert_close_gradients(reference.gradients[0], rank.gradients[0], BF16_TOLERANCE)
        assert any(not torch.equal(value, rank.gradients[0][name]) for name, value in reference.gradients[0].items()), (
            "it would be exact otherwise"
        )


def sum_of_ones(num_terms):
    """The sum over this world of as many equal terms as `num_terms`, each rank's own share of them already summed."""
    topology = Topology.of(torch.distributed.get_world_size())
    rank = torch.distributed.get_rank()
    stage = make_groups(topology, rank, backend="gloo", timeout=timedelta(seconds=30))["stage"]
    found = []
    for numel in (1, 65, 1000):
        buffer = FlatBuffer([(numel,)], torch.float32, torch.device("cpu"))
        buffer.params = [Param("ones", (numel,), [])]
        buffer.data.fill_(1.0 if rank else num_terms)
        sums = Narrow(SentBytes())
        sums.start(buffer, stage)
        sums.finish()
        found.append(buffer.data.unique().tolist())
    return found


def test_terms_are_added_in_fp32(ranks):
    """256 + 1 + 1 + 1: added in bf16, whose numbers are 2 apart from there on, the ones would vanish one by one."""
    for found in ranks(4)(sum_of_ones, 256.0):
        assert found == [[260.0]] * 3, "259, rounded once"
