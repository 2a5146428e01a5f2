"""`pp.measured` from the command line: a run times layers and writes what it found; its plan is cut alike from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_core.plan.load import load_plan

pytestmark = pytest.mark.timeout(180)

PIPELINE = """\
[parallel]
dp = 1
pp = 2

[pipeline]
use = "pp.one_f_one_b"

[partition]
use = "pp.measured"
"""


def costs(plan: Path) -> tuple[float, ...] | None:
    partition = load_plan(plan).partition
    assert partition is not None
    found: tuple[float, ...] | None = partition.config.layer_costs
    return found


def test_the_folder_s_plan_has_the_seconds(
    together: Callable[..., Any], cli: Callable[..., Any], plan: Path, folder: Path
) -> None:
    text = plan.read_text("utf-8").partition("[parallel]")[0] + PIPELINE
    plan.write_text(text.replace("steps = 4", "steps = 1"), "utf-8")
    checked = cli("check", "--model", plan)
    assert checked.code == 0
    assert "`pp.measured` times layers in a run; here they are cut by parameters" in checked.err
    assert together(2, "run", plan).code == 0
    written = folder / "runs" / "small" / "plan.toml"
    found = costs(written)
    assert found is not None
    assert len(found) == 3, "embedding, block, head"
    assert min(found) > 0
    again = cli("check", "--model", written, "--set", 'run.name="again"')
    assert (again.code, again.err.splitlines()[-1]) == (0, "1 plan is fine")
    assert "times layers" not in again.err, "nothing is left to time"
