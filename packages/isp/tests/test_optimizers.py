"""Optimizers by factory over shards: elementwise ones are those of a loop by hand, others are refused before the first step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict
from sley_testing.habits import layers
from sley_testing.runs import assert_by_hand, record, same_on_all

NAMES = ["NAdam", "Adagrad", "ASGD"]
MORE_NAMES = ["Adam", "AdamW", "RMSprop"]


def batch(step):
    tokens = torch.randint(0, 256, (8, 25), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def recorded(every, folder, batches):
    return [record(tables, len(batches), folder=folder, batches=batches) for tables in every]


def by_factory(sharded, wp, name):
    return sharded(
        wp,
        model={"factory": "sley_testing.habits:model", "options": {"habit": "Adaptive"}},
        optimizer={"factory": f"torch.optim:{name}", "lr": 1e-2},
        data__documents="cut",
    )


@pytest.mark.parametrize("names", [NAMES, pytest.param(MORE_NAMES, marks=pytest.mark.campaign)])
def test_elementwise_optimizers_over_shards_are_a_loop_by_hand(ranks, texts, sharded, names):
    batches = [batch(step) for step in range(3)]
    by_rank = ranks(2, 120)(recorded, [by_factory(sharded, 2, name) for name in names], texts, batches)
    for name, layouts in zip(names, zip(*by_rank, strict=True), strict=True):
        same_on_all(layouts)
        info = SimpleNamespace(vocab_size=len(layouts[0].first["head.weight"]))

        def by_hand(parameters, name=name):
            return getattr(torch.optim, name)(parameters, lr=1e-2, weight_decay=0.0)

        assert_by_hand(layouts[0], layers(info, "Adaptive"), batches, by_hand, micro_size=2)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_what_looks_at_whole_matrices_is_refused(texts, sharded, name):
    tables = by_factory(sharded, 2, name)
    with World.fake(0, 2) as world, pytest.raises(PlanError, match=r"optimizer-layout.*whole matrices.*`wp = 2`"):
        assemble(plan_from_dict(tables, texts), world)
