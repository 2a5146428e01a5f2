"""A glance at steps of many micro-batches: their seconds are those of their own lists, and what a stage holds may grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sley_core.plan.load import plan_from_dict
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search import quick_step
from sley_estimate.search.best_first import InOrder
from sley_estimate.search.choices import choices_of
from sley_estimate.search.layouts import AXES, Candidate, Layouts
from sley_estimate.search.quick import Quick
from sley_estimate.seconds_of_plan import estimate_seconds
from sley_estimate.testing.machines import small_machine, timed_layers
from sley_testing.plans import small_plan

WORLD = 8
SLOW = {"latency_s": 1e-5, "bandwidth": 1e7}
MACHINE = machine_from_dict(small_machine(device__launch_s=1e-6, links__same_host=SLOW, links__ranks_per_host=WORLD))


def plan_of(schedule: str, micros: int, stages: int = WORLD, **options: Any) -> Any:
    """The plan of `stages` stages, whose links are slow beside what they compute."""
    return plan_from_dict(
        small_plan(
            data={"use": "core.text", "source": "python-stdlib", "sequence": 64},
            model={"use": "models.llama", "num_layers": 14, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48},
            batch={"global_size": micros, "micro_size": 1},
            precision={"compute": "fp32"},
            parallel={"pp": stages},
            pipeline={"use": schedule, **options},
        )
    )


def own_layout(plan: Any) -> Candidate:
    space = Layouts(plan, plan.parallel.pp, choices_of(plan), keep=AXES)
    return next(layout for shape in space.shapes() for layout in space.within(shape))


def test_a_long_step_is_its_own_lists_and_not_a_short_one_made_longer() -> None:
    """Told from steps of two and three micro-batches per stage, this one came out 5 % too long; others were too short."""
    plan = plan_of("pp.one_f_one_b", 64)
    exact = estimate_seconds(plan, WORLD, MACHINE).step.seconds
    layout = own_layout(plan)
    assert Quick(plan, WORLD, MACHINE).seconds(layout) == pytest.approx(exact, rel=1e-3)
    with patch.object(quick_step, "MOST_SIMULATED", 32 * WORLD):
        told = Quick(plan, WORLD, MACHINE).seconds(layout)
    assert told == pytest.approx(exact, rel=0.05)
    assert told != pytest.approx(exact, rel=1e-6), "a very long one is told from shorter ones"


@pytest.mark.parametrize("micros", [8, 11, 16])
def test_what_grows_with_micro_batches_is_held_of_all_of_them(micros: int) -> None:
    """And what does not, is held of as few as there are in a short step."""
    some, more = (_bytes("pp.gpipe", each) for each in (4, micros))
    kept = int(some[1][-1].sum())
    assert more[0][-1] - some[0][-1] == (micros - 4) * kept
    assert _bytes("pp.one_f_one_b", micros)[0] == _bytes("pp.one_f_one_b", 4)[0]


def _bytes(schedule: str, micros: int) -> tuple[list[int], list[Any]]:
    """The bytes of two stages, and of each the kept bytes of its layers."""
    plan = plan_of(schedule, micros, 2)
    step = Quick(plan, 2, MACHINE).step(own_layout(plan))
    first, last = (part[0] for part in map(step.parts.of_stage, range(2)))
    return step.stage_bytes, [step.table.kept[slice(*first)], step.table.kept[slice(*last)]]


def test_a_schedule_of_a_file_is_simulated_as_it_is_written(tmp_path: Path) -> None:
    """It was refused: there are no shorter lists of it."""
    micros = 9
    lists = [[f"0F{micro}" for micro in range(micros)], []]
    lists[1] = [word for micro in range(micros) for word in (f"1F{micro}", f"1B{micro}")]
    lists[0] += [f"0B{micro}" for micro in range(micros)]
    (tmp_path / "own.csv").write_text("\n".join(map(",".join, lists)), "utf-8")
    plan = plan_of("pp.csv", micros, 2, file=str(tmp_path / "own.csv"))
    order = InOrder(Layouts(plan, 2, choices_of(plan), keep=AXES), Quick(plan, 2, MACHINE))
    found = order.next()
    assert found is not None, order.tally
    assert found.estimate.seconds == pytest.approx(estimate_seconds(plan, 2, MACHINE).step.seconds, rel=0.01)


ENGINE = {"step_s": 1e-6, "parameter_s": 1e-8, "micro_s": 1e-7, "gradient_s": 1e-8}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("schedule", "options"),
    [("pp.interleaved", {"chunks": 2}), ("pp.one_f_one_b", {}), ("pp.zero_bubble_v", {})],
)
def test_the_slowest_host_of_stages_is_that_of_their_lists(schedule: str, options: dict[str, Any]) -> None:
    """Whole backwards and split ones; the halves of the latter take the host half again as long here."""
    plan = plan_of(schedule, 4, 2, **options)
    layers = timed_layers(plan, host=20.0)
    for layer in layers:
        layer["host_weight_gradient"] += 0.5 * layer["host_backward"]
    fast = small_machine(links__same_host={"latency_s": 0.0, "bandwidth": 1e12}, layers=layers, engine=ENGINE)
    machine = machine_from_dict(fast)
    exact = estimate_seconds(plan, 2, machine).step
    assert exact.seconds == max(exact.host_s) > exact.devices_s
    assert min(exact.host_s) > 0
    assert Quick(plan, 2, machine).seconds(own_layout(plan)) == pytest.approx(exact.seconds, rel=1e-6)
