"""What the parts of a run have counted: in `summary.json` of every run, and on stderr when asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan

pytestmark = pytest.mark.timeout(120)


def test_what_a_communicator_counted_is_printed(together: Callable[..., Any], plan: Path, folder: Path) -> None:
    """Two local ranks with sharded weights: gathers, peaks and bytes are in `summary.json`, and `run -v` prints them."""
    sharded = ("--set", "parallel.wp=2", "--set", 'weights.use="isp.communicator"', "--set", "run.steps=3")
    result = together(2, "run", plan, *sharded, "-v")
    assert result.code == 0, result.err
    counts = json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))["counts"]["isp.communicator"]
    assert counts["demand_gathers_per_step"] == 1
    assert counts["most_unsharded_groups"] <= 2
    assert counts["allocations_after_step_2"] == 0
    assert counts["gathered_bytes_per_step"] > 0
    assert counts["reduced_bytes_per_step"] > 0
    assert counts["most_full_gradient_bytes"] > counts["most_full_gradients"] > 0
    lines = [line.split() for line in result.err.splitlines()]
    assert ["isp.communicator", "counted"] in lines
    for name, value in counts.items():
        assert [name, f"{value:,.10g}"] in lines


REDUCERS: dict[str, dict[str, Any]] = {
    "each": {"use": "core.each"},
    "bucketed": {"use": "dp.bucketed"},
    "bf16": {"use": "dp.bucketed", "reduction": "bf16"},
    "low rank": {"use": "powersgd.reducer", "rank": 1, "start_step": 2},
}
SENT = "sent_bytes_per_step"


def counted(plans: dict[str, Any], folder: Path) -> dict[str, tuple[dict[str, Any], int, list[int]]]:
    """Of each plan, on this rank: what its parts counted in two steps, bytes of gradients, and those of ties among them."""
    found = {}
    for name, tables in plans.items():
        with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            run.step()
            run.step()
            run.evaluate()  # after the last step, as at the end of a run: it counts for nothing
            gradients = {param: run.store.gradient(param).nbytes for param in run.registry}
            ties = [size for param, size in gradients.items() if param.tie_group]
            found[name] = run.counts, sum(gradients.values()), ties
    return found


def test_whatever_exchanges_says_in_one_word_what_it_sends(ranks: Callable[..., Any], texts: Path) -> None:
    """Over two ranks an all-reduce sends as many bytes as it sums."""
    held_out = {"evaluation": {"every": 9, "steps": 3}}
    plans = {name: small_plan(parallel={"dp": 2}, gradient_handlers=[table], **held_out) for name, table in REDUCERS.items()}
    for found in ranks(2)(counted, plans, texts):
        sent = {name: counts[REDUCERS[name]["use"]][SENT] for name, (counts, _, _) in found.items()}
        size = found["each"][1]
        assert sent["each"] == size
        assert size <= sent["bucketed"] < 1.2 * size  # with what aligns gradients
        assert sent["bf16"] == pytest.approx(sent["bucketed"] / 4, rel=0.01)
        assert 0 < sent["low rank"] < size / 3


def test_stage_links_ties_and_communicators_say_it_too(ranks: Callable[..., Any], texts: Path) -> None:
    held_out = {"evaluation": {"every": 9, "steps": 3}}
    stages = {"parallel": {"dp": 1, "pp": 2}, "pipeline": {"use": "pp.gpipe"}, "model__tie_embeddings": True}
    weights = {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}}
    plans = {"stages": small_plan(**stages, **held_out), "weights": small_plan(**weights, **held_out)}
    for found in ranks(2)(counted, plans, texts):
        counts, _, ties = found["stages"]
        assert counts["pp.shared_modules"][SENT] == sum(ties) > 0
        messages = 4 * 2 * 24 * 16 * 8  # micro-batches of samples of tokens of width 16 in fp64
        assert messages < counts["pp.link"][SENT] < messages + 4 * 4096  # with heads
        (counted_weights,) = [found["weights"][0]["isp.communicator"]]
        gathered, reduced = (counted_weights[f"{name}_bytes_per_step"] for name in ("gathered", "reduced"))
        assert counted_weights[SENT] == gathered + reduced > 0


def test_nothing_is_counted_aloud_unasked(cli: Callable[..., Any], plan: Path, folder: Path) -> None:
    result = cli("run", plan, "--set", "parallel.dp=1", "--set", "run.steps=1")
    assert result.code == 0, result.err
    assert "counted" not in result.err
    assert json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))["counts"] == {}


def test_what_offload_managers_moved_is_printed(cli: Callable[..., Any], plan: Path, folder: Path) -> None:
    """States leave in each of three steps, and come in all but the first, which makes them."""
    between = """offload=[{use="memory.optimizer_states", when="between_steps"}]"""
    result = cli("run", plan, "--set", "parallel.dp=1", "--set", "run.steps=3", "--set", between, "-v")
    assert result.code == 0, result.err
    summary = json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))
    counts = summary["counts"]["memory.optimizer_states"]
    size = 2 * 4 * summary["trained_parameters"]  # two moments in fp32
    step = counts["optimizer_states_copied_out"] / 3
    assert size <= step < 1.02 * size  # small states lie together, each at a multiple of 256 bytes
    assert counts["optimizer_states_copied_in"] == 2 * step
    lines = [line.split() for line in result.err.splitlines()]
    assert ["memory.optimizer_states", "counted"] in lines
    for name, value in counts.items():
        assert [name, f"{value:,.10g}"] in lines
