"""A model that names the argument of a linear, `linear(input=x)`, trains sharded as it does whole."""

from __future__ import annotations

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.runs import assert_parity, record

NAMED = {
    "model": {"factory": "isp_named:layers"},
    "data": {"factory": "scored:Labelled"},
    "loss": {"use": "core.cross_entropy"},
}


@pytest.mark.parametrize("weights", [{"head": "vocabulary"}, {"embedding": "hidden"}])
def test_sharded(parity, own, weights):
    parity(2, wp=2, weights=weights, **NAMED)


def test_whole(sharded, texts, own):
    """Core's own forward of a linear, too."""
    plans = [sharded(1, **NAMED, precision={"compute": "fp64", "accumulation": way}) for way in ("autograd", "direct")]
    wanted, found = (record(tables, 2, folder=texts) for tables in plans)
    assert_parity(wanted, [found], "fp64")


def called(tables, folder):
    """What a call by name says after the run."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        pass
    with pytest.raises(RunError, match="after its run was closed") as caught:
        run.layers[0].module(torch.zeros(1, 2, dtype=torch.int64))
    return caught.value.diagnostics[0].code


def test_closed(ranks, sharded, texts, own):
    assert ranks(2)(called, sharded(2, **NAMED), texts) == ["weights-sharded"] * 2
