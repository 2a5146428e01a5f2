"""What the plugin tells before a run: its records, what check finds, and that neither costs torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_dp.config import BF16_TOLERANCE

HANDLERS = [{"use": "dp.bucketed"}, {"use": "dp.bucketed", "reduction": "bf16"}, {"use": "dp.sharded"}]


def test_records_are_listed_without_torch():
    """Core and this package are enough, and a plan is checked without what a run needs."""
    code = (
        "import sys\n"
        "from sley_core.plan.loader import Loader\n"
        "from sley_core.plan.load import plan_from_dict\n"
        "print([*Loader().load('dp').records['gradient_handlers']])\n"
        "print([name for name in sys.modules if name.startswith(('torch', 'sley_dp.bucketed', 'sley_pp', 'sley_isp'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['bucketed', 'sharded']", "[]"]


@pytest.mark.parametrize("handler", HANDLERS)
def test_check_has_nothing_against_them(small, handler):
    """Inexact ones too: the plan names them, so the user wants them."""
    plan = plan_from_dict(small(handler))
    assert check_plan(plan, 2) == []
    assert list(plan.plugins) == ["core", "dp"], "core first, then in order of appearance"


def test_an_inexact_sum_says_so(small):
    """What `tolerance_with` tells of each: 0 is the sum itself."""
    found = []
    for handler in HANDLERS:
        (component,) = plan_from_dict(small(handler)).gradient_handlers
        found.append((component.record.exact, component.record.tolerance_with(component.config)))
    assert found == [(True, 0.0), (True, BF16_TOLERANCE), (True, 0.0)]


def test_nothing_runs_that_the_plan_does_not_name(small):
    """Installing this package changes no plan: the default stays core's."""
    tables = small()
    del tables["gradient_handlers"]
    plan = plan_from_dict(tables | {"parallel": {"dp": 2}})
    assert [handler.name for handler in plan.gradient_handlers] == ["core.each"]
    assert list(plan.plugins) == ["core"]


@pytest.mark.parametrize(
    ("handler", "code", "words"),
    [
        ({"bucket_mb": 0.0}, "out-of-range", "above 0"),
        ({"reduction": "fp16"}, "wrong-value", '"same" or "bf16"'),
        ({"start": "hope"}, "wrong-value", '"check" or "broadcast"'),
        ({"use": "dp.powersgd"}, "unknown-record", "it is `powersgd.reducer` now"),
        ({"use": "dp.buckets"}, "unknown-record", "has no"),
        ({"use": "dp.sharded", "shards": 1}, "out-of-range", "at least 2"),
    ],
)
def test_wrong_tables(small, handler, code, words):
    with pytest.raises(PlanError) as caught:
        plan_from_dict(small(handler))
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert words in f"{found.message} {found.hint}"


@pytest.mark.parametrize("handler", HANDLERS)
def test_every_rank_of_a_large_world_assembles_without_memory(handler):
    """Nothing is reduced or broadcast there, and the buckets are the same on all ranks."""
    tables = {
        "run": {"name": "fake", "steps": 1},
        "model": {"use": "models.llama", "num_layers": 2, "hidden": 512, "heads": 8},
        "data": {"use": "data.text", "source": "python-stdlib", "sequence": 64},
        "batch": {"global_size": 64, "micro_size": 1},
        "optimizer": {"use": "core.adamw", "lr": 1e-3},
        "gradient_handlers": [handler | {"bucket_mb": 1.0}],
    }
    seen = set()
    for rank in (0, 31, 63):
        with World.fake(rank, 64) as world, assemble(plan_from_dict(tables), world) as run:
            assert all(buffer.data.is_meta for buffer in run.store.buffers)
            seen.add(str([buffer.params for buffer in run.store.buffers]))
    assert len(seen) == 1
