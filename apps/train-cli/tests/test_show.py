"""`show` prints the resolved plan with origins, the ranks, groups and handlers, and the timeline of a step."""

from pathlib import Path
from types import FunctionType

import pytest
from started_program import Cli

from sley_core.actions.action import Schedule, v_placement
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, Timeline, simulate
from sley_core.plan.load import load_plan, plan_from_text
from sley_core.topology import Topology
from sley_pp.schedules import gpipe, interleaved, one_f_one_b, zero_bubble_h1, zero_bubble_v
from train_cli.commands.plan import draw_timeline, format_groups, format_ranks


def test_the_output_is_a_plan_with_origins(cli: Cli, plan: Path) -> None:
    result = cli("show", "plan.toml", "--set", "run.seed=7")
    assert result.err == ""
    lines = [line.partition("  # ") for line in result.out.splitlines()]
    origins = {value.strip(): origin for value, _, origin in lines}
    assert origins["steps = 4"] == "plan.toml:5:1"
    assert origins["seed = 7"] == "--set #1"
    assert origins['folder = "runs"'] == "default"
    assert origins['use = "core.each"'] == "default"
    shown = result.out.partition("# world")[0]
    assert plan_from_text(shown, folder=plan.parent) == load_plan(plan, ["run.seed=7"])


def test_ranks_groups_and_handlers(cli: Cli, plan: Path) -> None:
    out = cli("show", plan, "--set", "parallel.dp=4").out
    assert "# world of 4: pp 1, dp 4, sp 1, wdp 4, wp 1" in out
    assert "dp[0-3]" in out
    assert out.rstrip().endswith("1  core.each  (reducer)")
    out = cli("show", plan, "--rank", "1").out
    rows = out.partition("# world")[2].partition("# groups")[0].split("\n")
    assert [row.split() for row in rows if row.strip()][2:] == [["1", "0", "1", "0", "1", "0"]]
    assert cli("show", plan, "--rank", "2").code == 3


@pytest.mark.parametrize(("reduction", "tolerance"), [("bf16", ", not exact: within 0.0078125"), ("same", "")])
def test_handlers_have_their_tolerance(cli: Cli, plan: Path, reduction: str, tolerance: str) -> None:
    handlers = f'gradient_handlers=[{{use="dp.bucketed", reduction="{reduction}"}}]'
    assert cli("show", plan, changes=[handlers]).out.rstrip().endswith(f"1  dp.bucketed  (reducer{tolerance})")


def test_a_large_world_has_few_lines(cli: Cli, plan: Path) -> None:
    topology = Topology.from_sizes(2048, pp=4, sp=4, wp=16)
    lines = [*format_ranks(topology, None), *format_groups(list(topology.groups()))]
    assert len(lines) < 60
    assert any("wp.gather" in line and "128 groups of 16: " in line and "2032-2047" in line for line in lines)
    assert "  of 1024 ranks" in cli("show", plan, "--set", 'parallel.dp="auto"', "--world", "1024").out


def test_the_timeline_has_a_line_per_stage(cli: Cli, plan: Path) -> None:
    stages = ["parallel.dp=1", "parallel.pp=2", 'pipeline={use="pp.gpipe"}', "model.num_layers=2", "batch.global_size=3"]
    drawn = cli("show", plan, "--timeline", changes=stages).out
    assert "stage 0  F0-F1-F2-" in drawn
    assert "stage 1: idle" in drawn
    assert "2 stages, 3 microbatches; F, I and W take" in drawn
    assert "holds at most 3 microbatches" in drawn
    assert "no-pipeline" in cli("show", plan, "--timeline").err


# -- drawings ---------------------------------------------------------------------------------------------------------


def timeline(schedule: Schedule, stages: int, micros: int) -> Timeline:
    placement = schedule.placement(stages)
    costs = Costs.uniform(placement.num_positions)
    return simulate(lower(schedule.lists(stages, micros), placement, micros), placement, costs).timeline


@pytest.mark.parametrize("width", [1, 40, 80, 120])
@pytest.mark.parametrize("micros", [3, 7, 40])
def test_a_row_is_never_wider_than_asked_for(width: int, micros: int) -> None:
    rows = draw_timeline(timeline(Schedule(interleaved, 2), 3, micros), width).splitlines()[:3]
    least = len("stage 0  F0-F1-F / ====...   99% idle")
    assert max(map(len, rows)) <= max(width, least)
    assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize(
    ("schedule", "micros"),
    [
        (Schedule(gpipe), 4),
        (Schedule(one_f_one_b), 4),
        (Schedule(interleaved, 2), 4),
        (Schedule(zero_bubble_h1), 4),
        (Schedule(zero_bubble_v, 2, v_placement), 8),
    ],
)
def test_the_drawings_in_docstrings_are_right(schedule: Schedule, micros: int) -> None:
    generate = schedule.generate
    assert isinstance(generate, FunctionType)
    lines = (generate.__doc__ or "").splitlines()
    shown = [line.strip().removesuffix(" ...") for line in lines if line.startswith("        stage ")]
    drawn = draw_timeline(timeline(schedule, 4, micros), num_columns=1000).splitlines()
    assert len(shown) == 4
    assert all(row.startswith(line) for row, line in zip(drawn, shown, strict=False))
