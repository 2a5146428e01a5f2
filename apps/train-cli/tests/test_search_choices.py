"""What a search makes of the plan's own tables: none is offered twice, and what is known of one layout is told of no other."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.rank import rank_bytes
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search.choices import choices_of
from sley_estimate.search.layouts import Candidate, Layouts
from sley_estimate.search.roofline import Roofline
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import changed, small_plan

WORLD = 4


def plan_of(**changes: Any) -> Any:
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    sizes = {"pp": 2, "dp": 2}
    return plan_from_dict(
        small_plan(data=data, model__num_layers=6, batch={"global_size": 16, "micro_size": 1}, parallel=sizes, **changes)
    )


def test_an_option_with_the_value_of_its_default_is_no_other_choice() -> None:
    plan = plan_of(
        pipeline={"use": "pp.interleaved", "chunks": 2}, gradient_handlers=[{"use": "dp.bucketed", "bucket_mb": 25.0}]
    )
    choices = choices_of(plan)
    assert [str(one) for one in choices.reducers if one.name == "dp.bucketed"] == ["dp.bucketed (bucket_mb = 25.0)"]
    interleaved = [str(one) for one in choices.schedules if one.name == "pp.interleaved"]
    assert interleaved == ["pp.interleaved (chunks = 2)", "pp.interleaved (chunks = 4)"]


def layouts_of(plan: Any, *keep: Any, world: int = WORLD) -> list[Candidate]:
    space = Layouts(plan, world, choices_of(plan), ("pp", "sp", "wp", "activations", "offload", *keep))
    return [layout for shape in space.shapes() for layout in space.within(shape)]


def test_lengths_that_were_written_for_other_chunks_are_left_out() -> None:
    plan = plan_of(pipeline={"use": "pp.interleaved", "chunks": 2}, partition={"use": "pp.explicit", "layers": [2, 2, 2, 2]})
    made = {str(one.schedule): one.plan(plan, WORLD).partition for one in layouts_of(plan, "reducer", "micro_size")}
    assert made["pp.interleaved (chunks = 2)"].name == "pp.explicit"
    assert {str(one.name) for words, one in made.items() if words != "pp.interleaved (chunks = 2)"} == {"pp.balanced"}


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel": {"dp": 2}},
        {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}},
        {"parallel": {"pp": 2}, "pipeline": {"use": "pp.zero_bubble_v"}},
    ],
    ids=["one stage", "sharded", "one of two stages"],
)
def test_a_weight_that_layers_share_is_there_once(layout: dict[str, Any]) -> None:
    """It counted with each, so that layouts were dropped that fit."""
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    model = {"tie_embeddings": True, "vocab_size": 32768, "hidden": 32}
    tables = small_plan(data=data, batch={"global_size": 8, "micro_size": 1}, **layout)
    plan: Any = plan_from_dict(changed(tables, **{f"model__{name}": value for name, value in model.items()}))
    roofline = Roofline(plan, 2, machine_from_dict(small_machine()), choices_of(plan))
    layouts = layouts_of(plan, "micro_size", "schedule", world=2)
    reducers = {one.reducer.name for one in layouts if one.reducer}
    assert reducers >= {"core.each", "dp.bucketed", "dp.sharded"} or layout.keys() > {"parallel"}
    for one in layouts:
        held = max(rank_bytes(one.plan(plan, 2), rank, 2).peak for rank in range(plan.parallel.pp))
        assert 0.6 * held < roofline.of(one).num_bytes <= held, one
