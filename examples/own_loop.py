"""Drives a run from your own program: the plan defines the layout, and the program creates the batches and runs the steps.

In one process and under a launcher, the program prints the same losses. Arguments change the plan, as `--set` does:

    python examples/own_loop.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py optimizer.lr=1e-2
"""

import sys
from pathlib import Path

import torch

from sley_core.comm.world import World
from sley_core.plan.load import load_plan
from sley_trainer.assemble import assemble

PLAN = Path(__file__).parent / "plans" / "quickstart.toml"
ANY_WORLD = ['parallel.dp="auto"', 'data.documents="cut"']  # "cut" has two fields, tokens and labels

plan = load_plan(PLAN, [*ANY_WORLD, *sys.argv[1:]])
with World.join(plan.run.device) as world, assemble(plan, world) as run:
    chance = torch.Generator().manual_seed(plan.run.seed)  # one on every rank: all make the same global batch
    for _ in range(20):
        start = torch.randint(128, (plan.batch.global_size, 1), generator=chance)
        count = start + torch.arange(65)  # 17, 18, 19, ...: the next one is easy to tell
        row = run.step({"tokens": count[run.rows, :-1], "labels": count[run.rows, 1:]})
        if world.rank == 0:
            print(f"step {row['step']:2}  loss {row['loss']:.6f}")
