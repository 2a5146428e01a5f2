"""Splitting a sequence over two ranks lets almost twice the sequence into the same memory."""

from __future__ import annotations

from pathlib import Path

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.live_bytes import memory_profile, peak_bytes

OWN = Path(__file__).parent / "own"
PLAN = {
    "run": {"name": "long", "steps": 3, "device": "cpu"},
    "model": {"use": "models.llama", "num_layers": 4, "hidden": 32, "heads": 4},
    "batch": {"global_size": 1, "micro_size": 1},
    "optimizer": {"use": "core.adamw", "lr": 1e-3},
}
LENGTH = 1024
"""Of the sequence that fixes the budget, on one rank."""

GROWTH = 1.8
ACTIVATIONS = 0.8


def live_bytes(lengths):
    """For each length of a sequence: the peak of live tensor bytes of a run's second step, and how many are activations."""
    found = []
    with World.join("cpu") as world:
        for length in lengths:
            tables = PLAN | {"data": {"factory": "zeros:Zeros", "options": {"sequence": length}}}
            tables |= {"parallel": {"sp": world.size, "dp": 1}, "sequence": {"use": "isp.all_to_all"}}
            with memory_profile() as profile, assemble(plan_from_dict(tables, OWN), world) as run:
                for _ in range(2):
                    run.step()
                lasting = sum(run.memory.bytes.values())
            peak = peak_bytes(profile)
            found.append((peak, peak - lasting))
    return found


def test_two_ranks_hold_almost_twice_the_sequence(ranks, monkeypatch):
    """At least 1.8 times the length in the bytes that one rank needs, where activations are at least 80 % of them."""
    monkeypatch.syspath_prepend(OWN)
    ((budget, activations),) = ranks(1, fresh=True)(live_bytes, [LENGTH])[0]
    assert activations >= ACTIVATIONS * budget, (activations, budget)
    longer = int(GROWTH * LENGTH) // 8 * 8 + 8
    for ((peak, _),) in ranks(2, fresh=True)(live_bytes, [longer]):
        print(f"{LENGTH} positions on one rank: {budget} bytes; {longer} on two: {peak}, {peak / budget:.3f} of it")
        assert peak <= budget, (peak, budget)
