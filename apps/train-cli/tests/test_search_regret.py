"""The layout that a search finds is nearly as fast as the fastest of all, each taken by its own steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sley_core.errors import SleyError
from sley_core.plan.load import plan_from_dict
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search.choices import choices_of
from sley_estimate.search.find import exact, find
from sley_estimate.search.layouts import Layouts
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import small_plan
from train_cli.surroundings import num_cores

WORLD = 4


def drawn(seed: int) -> tuple[Any, Any]:
    """A plan and a machine."""
    rng = random.Random(seed)
    heads, hidden = rng.choice([2, 4]), rng.choice([64, 128, 256])
    model = {"use": "models.llama", "num_layers": rng.randint(3, 8), "hidden": hidden, "heads": heads}
    plan = small_plan(
        data={"use": "data.text", "source": "python-stdlib", "sequence": rng.choice([64, 128])},
        model={**model, "kv_heads": heads, "ffn_hidden": 2 * hidden, "tie_embeddings": rng.random() < 0.3},
        batch={"global_size": rng.choice([8, 16]), "micro_size": 1},
        precision={"compute": "fp32"},
        run__device="cuda",
    )
    link = {"latency_s": 10 ** rng.uniform(-6, -4), "bandwidth": 10 ** rng.uniform(8, 11)}
    host = {"to_host": 1e10, "to_device": 1e10, "memory_bandwidth": 1e10}
    machine = small_machine(links__same_host=link, device__launch_s=10 ** rng.uniform(-8, -5), host=host)
    return plan_from_dict(plan), machine_from_dict(machine)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_a_search_finds_a_layout_within_two_percent_of_the_fastest(seed: int) -> None:
    plan, machine = drawn(seed)
    space = Layouts(plan, WORLD, choices_of(plan), ["offload", random.Random(seed).choice(["micro_size", "sp", "pp"])])
    found = find(space, machine, top=1, cores=num_cores())  # first: a backward here would leave it without processes
    every = []
    for layout in space.every():
        try:
            takes = exact(layout.plan(plan, WORLD), WORLD, machine)
        except SleyError:
            continue
        assert takes is not None
        every.append((takes.seconds, str(layout)))
    best, chosen = min(every), found.fastest[0]
    regret = chosen.takes.seconds / best[0] - 1
    print(f"seed {seed}: {len(every)} layouts, regret {regret:.2%}; {chosen.layout}, and the fastest is {best[1]}")
    assert regret <= 0.02
