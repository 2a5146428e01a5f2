"""`dp.sharded` gives the one-process run's numbers, though each rank steps only a part of every bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plain import PlainLoop, assert_step, decay_groups
from sley_testing.runs import assert_parity, gradients, record, same_on_all, weights

SHARDED = {"use": "dp.sharded", "bucket_mb": 0.001}
ADAMW = {"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1}
MOMENTUM = {"use": "core.sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True}
UNUSUAL = {"factory": "dp_parts:Unusual", "lr": 0.1, "scope": "elementwise"}
FP16 = {"compute": "fp16", "loss_scale": {"init_scale": 64.0}}
SOCKETS = {"cross_memory_attach": False}

CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": ADAMW},
    "momentum by sockets": {"optimizer": MOMENTUM, "parallel": SOCKETS},
    "one bucket": {"optimizer": ADAMW, "handler": {"bucket_mb": 25.0}},
    "odd sizes, clipped": {"optimizer": ADAMW | {"clip_norm": 0.05}, "model__factory": "dp_parts:odd"},
    "odd sizes in bf16": {"optimizer": ADAMW, "model__factory": "dp_parts:odd", "precision": {"compute": "bf16"}},
    "the largest element": {"optimizer": MOMENTUM | {"clip_norm": 0.01, "clip_kind": "inf"}},
    "the 1-norm": {"optimizer": MOMENTUM | {"clip_norm": 0.1, "clip_kind": 1.0}},
    "fp16": {"optimizer": ADAMW | {"clip_norm": 0.05}, "precision": FP16},
    "own decay and rate": {
        "optimizer": ADAMW
        | {"groups": [{"match": "layer1.*", "lr": 0.1, "weight_decay": 0.5}, {"match": "layer2.bias", "freeze": True}]}
    },
    "accumulated directly": {"optimizer": ADAMW, "precision": {"compute": "fp64", "accumulation": "direct"}},
    "recomputed": {"optimizer": ADAMW, "activations": {"use": "core.recompute"}},
    "unused": {"optimizer": ADAMW, "model__factory": "dp_parts:sometimes"},
    "start": {"optimizer": ADAMW, "handler": {"start": "broadcast"}},
    "an unusual optimizer": {"optimizer": UNUSUAL, "model__factory": "dp_parts:odd"},
    "an unusual optimizer in bf16": {"optimizer": UNUSUAL, "precision": {"compute": "bf16"}},
}
IN_FP64 = {"compute": "fp64"}
FEW = tuple(name for name in CASES if name not in ("adamw", "one bucket", "the 1-norm"))
"""Without those of which others have all."""


def plans(small, handler, names):
    made = []
    for changes in (CASES[name] for name in names):
        own = SHARDED | handler | changes.get("handler", {})
        rest = {key: value for key, value in changes.items() if key != "handler"}
        made.append(small(own, **{"precision": IN_FP64, "batch__global_size": 8, **rest}))
    return made


def recorded(every, folder):
    """One after the other in the same ranks: starting them takes longer than a small run."""
    return [record(tables, 3, folder=folder) for tables in every]


@pytest.mark.parametrize(
    ("size", "handler", "names"),
    [
        (2, {}, FEW),
        *(
            pytest.param(size, handler, tuple(CASES), marks=pytest.mark.campaign)
            for size, handler in ((2, {}), (4, {}), (4, {"shards": 2}))
        ),
    ],
)
def test_parts_of_every_bucket_make_the_whole_step(ranks, small, own, size, handler, names):
    """Gradients, norms, clips and weights are those of one process; replicas stay equal bit for bit."""
    every = plans(small, handler, names)
    layouts = ranks(size, 240)(recorded, every, own)
    for at, (name, tables) in enumerate(zip(names, every, strict=True)):
        print(name)
        alone = {key: value for key, value in tables.items() if key not in ("gradient_handlers", "parallel")}
        found = [rank[at] for rank in layouts]
        assert_parity(record(alone, 3, folder=own), found, tables["precision"]["compute"])
        same_on_all(found)


def beside_a_plain_loop(tables, folder):
    """Four steps of the run, each held to torch's own loop over the same samples."""
    from dp_parts import Squares, batch, odd

    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        torch.set_default_dtype(torch.float64)
        layers = odd()
        loop = PlainLoop(
            layers,
            Squares(),
            optimizer=lambda named: torch.optim.AdamW(decay_groups(named, 0.1), lr=1e-2, betas=(0.9, 0.95)),
            clip_norm=0.05,
        )
        loop.load(weights(run))
        for step in range(4):
            numbers = range(8 * step, 8 * step + 8)
            row = run.step({name: value[run.rows] for name, value in batch(*numbers).items()})
            wanted = loop.step([batch(number) for number in numbers])
            assert_step(wanted, row, gradients(run), weights(run))


@pytest.mark.sample(1)
@pytest.mark.parametrize("handler", [{"shards": 2}, {}])
def test_the_loop_that_everybody_writes_gives_the_same(ranks, small, own, handler):
    tables = small(
        SHARDED | handler,
        model__factory="dp_parts:odd",
        optimizer=ADAMW | {"clip_norm": 0.05},
        precision=IN_FP64,
        batch__global_size=8,
    )
    ranks(4, 120)(beside_a_plain_loop, tables, own)
