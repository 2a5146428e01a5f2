"""What a sharded linear costs beside its work: time that does not grow with its layer, and no gradient of whole size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.live_bytes import allocations, memory_profile

FOREIGN = {"data": {"factory": "isp_parts:Points"}, "loss": {"factory": "isp_parts:Squares"}}
SHORT = {"batch": {"global_size": 4, "micro_size": 1}, "evaluation": {"every": 9, "steps": 1}, "run__steps": 9}


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs: what it costs, and the same on every machine."""
    number = 0

    def traced(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal number
        number += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    return number


def lines_per_use(plans: list[dict[str, Any]], folder: Any) -> list[int]:
    """Of each plan: what asking for weights takes that are there, in the third step."""
    found: list[int] = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            communicator = run.stepper.executor.weights
            experts = next(layer.module for layer in run.layers if layer.name == "experts")
            site = next(site for site in communicator.sites if site.module is experts[0])
            lines: list[int] = []

            def measure(*_: Any, site: Any = site, lines: list[int] = lines) -> None:
                site.use()
                lines.append(lines_of(site.use))

            run.step()
            run.step()
            experts[1].register_forward_pre_hook(measure)
            run.step()
            found.append(max(lines))
    return found


def test_a_use_takes_no_time_for_the_layers_other_weights(ranks, sharded, texts, own):
    """A use costs in a layer of 64 experts, which has 128 weights, what it costs in one of 4."""
    plans = [
        sharded(2, model={"factory": "isp_parts:experts", "options": {"number": number}}, **FOREIGN, **SHORT)
        for number in (4, 64)
    ]
    for few, many in ranks(2, 120)(lines_per_use, plans, texts):
        assert 0 < many <= few < 100


def allocated(tables: dict[str, Any], folder: Any) -> tuple[list[int], int]:
    """What the third step allocates of at least a shard's size, and how many shards there are of that."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        run.step()
        with memory_profile() as profile:
            run.step()
        own = run.registry["experts.0.weight"].parameter.nbytes
        number = sum(param.parameter.nbytes >= own for param in run.registry if param.shard is not None)
    return [one.num_bytes for one in allocations(profile) if one.num_bytes >= own], number


def test_a_step_allocates_nothing_as_large_as_a_gradient(ranks, sharded, texts, own):
    """By bytes, in four micro-batches: no placeholder, no product beside the buffers, no sum twice."""
    model = {"factory": "isp_parts:experts", "options": {"number": 3, "width": 50}}
    for sizes, number in ranks(2, 60, fresh=True)(allocated, sharded(2, model=model, **FOREIGN, **SHORT), texts):
        assert number == 3
        assert sizes == []
