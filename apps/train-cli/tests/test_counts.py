"""What the parts of a run have counted: in `summary.json` of every run, and on stderr when asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)


def test_what_a_communicator_counted_is_printed(together: Callable[..., Any], plan: Path, folder: Path) -> None:
    """Two local ranks with sharded weights: gathers, peaks and bytes are in `summary.json`, and `run -v` prints them."""
    pytest.importorskip("sley_isp")
    sharded = ("--set", "parallel.wp=2", "--set", 'weights.use="isp.communicator"', "--set", "run.steps=3")
    result = together(2, "run", plan, *sharded, "-v")
    assert result.code == 0, result.err
    counts = json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))["counts"]["isp.communicator"]
    assert counts["gathers_per_unit_and_micro_batch"] <= 2
    assert counts["demand_gathers_per_step"] == 1
    assert counts["most_resident_units"] <= 2
    assert counts["allocations_after_step_2"] == 0
    assert counts["gathered_bytes_per_step"] > 0
    assert counts["reduced_bytes_per_step"] > 0
    assert counts["most_full_gradient_bytes"] > counts["most_full_gradients"] > 0
    lines = [line.split() for line in result.err.splitlines()]
    assert ["isp.communicator", "counted"] in lines
    for name, value in counts.items():
        assert [name, f"{value:,.10g}"] in lines


def test_nothing_is_counted_aloud_unasked(cli: Callable[..., Any], plan: Path, folder: Path) -> None:
    result = cli("run", plan, "--set", "parallel.dp=1", "--set", "run.steps=1")
    assert result.code == 0, result.err
    assert "counted" not in result.err
    assert json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))["counts"] == {}
