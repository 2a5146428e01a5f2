"""`train-cli search`: layouts from what is installed, the fastest that fit, and the plan of the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from sley_core.plan.load import load_plan
from sley_core.testing.plans import small_plan

pytest.importorskip("sley_pp")

MACHINE = {
    "format": 1,
    "device": {
        "name": "even",
        "kind": "cuda",
        "memory_bandwidth": 1e11,
        "launch_s": 1e-6,
        "matmul": {"fp64": {"flops_per_s": 1e11}},
    },
    "links": {"ranks_per_host": 8, "same_host": {"latency_s": 1e-5, "bandwidth": 1e10}},
}


@pytest.fixture
def given(tmp_path: Path) -> Path:
    data = {"use": "core.text", "source": "python-stdlib", "sequence": 24}
    plan = small_plan(data=data, model__num_layers=4, batch={"global_size": 8, "micro_size": 1})
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(plan), "utf-8")
    (tmp_path / "machine.toml").write_text(tomli_w.dumps(MACHINE), "utf-8")
    return tmp_path


@pytest.fixture
def searched(cli: Callable[..., Any], given: Path) -> Callable[..., Any]:
    def search(*options: str) -> Any:
        return cli("search", given / "plan.toml", "--machine", given / "machine.toml", *options)

    return search


def test_the_fastest_layout_is_written_as_a_plan_that_loads(searched: Callable[..., Any], given: Path) -> None:
    best = given / "best.toml"
    done = searched("--world", "4", "--write", str(best), "--keep", "reducer", "--keep", "schedule")
    assert done.code == 0, done.err
    rows = [line for line in done.out.splitlines() if " s  " in line]
    seconds = [float(row.split()[0]) for row in rows[:5]]
    assert seconds == sorted(seconds)
    plan = load_plan(best)
    sizes = plan.parallel
    assert f"pp {sizes.pp}, sp 1, wp 1, micro_size {plan.batch.micro_size}" in rows[0]
    assert sizes.dp * sizes.pp == 4


def test_what_cannot_fit_says_what_the_smallest_layout_needs(searched: Callable[..., Any]) -> None:
    done = searched("--world", "2", "--memory", "1B", "--keep", "pp", "--keep", "micro_size")
    assert done.code == 1
    assert "nothing fits into 1 B: the smallest layout needs" in done.out


def test_an_axis_that_there_is_not_is_refused(searched: Callable[..., Any]) -> None:
    done = searched("--world", "2", "--keep", "tp")
    assert done.code == 2


def test_what_cannot_be_told_at_a_glance_is_no_candidate(searched: Callable[..., Any]) -> None:
    """Copies to the host are not in these seconds, so a policy that makes them would seem to cost nothing."""
    pytest.importorskip("sley_memory")
    kept = ("--keep", "pp", "--keep", "micro_size")
    done = searched("--world", "2", "--top", "20", *kept)
    assert done.code == 0, done.err
    assert "memory.selective" in done.out
    assert "memory.host" not in done.out
    own = ("--keep", "activations", "--set", 'activations.use="memory.host"')
    done = searched("--world", "2", *kept, *own)
    assert done.code == 1
    assert "cannot be assembled: estimate-seconds" in done.out
