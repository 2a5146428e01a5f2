"""Layouts by name, which tests compare with one process."""

import math
from typing import Any

from sley_testing.plans import Tables, changed

BUCKETED = {"gradient_handlers": [{"use": "dp.bucketed", "bucket_mb": 0.01}]}
SHARDED = {"gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.01}]}
TIES = {"use": "pp.shared_modules"}
BUCKETED_STAGES = {"gradient_handlers": [*BUCKETED["gradient_handlers"], TIES]}
SHARDED_STAGES = {"gradient_handlers": [*SHARDED["gradient_handlers"], TIES]}
WP = {"parallel__wp": 2, "weights": {"use": "isp.communicator"}}
GROUPS = {"weights__groups": [{"match": "*.feed_forward.*", "unit": "module", "ahead": 2}]}
SP = {"parallel__sp": 2, "sequence": {"use": "isp.all_to_all"}}


def staged(schedule: str) -> Tables:
    return {"parallel__pp": 2, "pipeline": {"use": f"pp.{schedule}"}}


LAYOUTS: dict[str, Tables] = {
    "alone": {},
    "dp2 each": {"parallel__dp": 2},
    "dp2 bucketed": {"parallel__dp": 2, **BUCKETED},
    "dp2 sharded": {"parallel__dp": 2, **SHARDED},
    "dp4 sharded": {"parallel__dp": 4, **SHARDED},
    "wp2": {"parallel__dp": 2, **WP},
    "wp2 wdp2 sharded": {
        "parallel__dp": 4,
        **WP,
        **SHARDED,
        "weights__groups": [{"match": "*.feed_forward.*", "unit": "module"}],
    },
    "wp2 pp2": {"parallel__dp": 2, **staged("zero_bubble_h1"), **WP},
    "wp2 sp2": {**SP, **WP},
    "sp2": SP,
    "pp2": staged("one_f_one_b"),
    "interleaved": staged("interleaved"),
    "zero bubble": staged("zero_bubble_h1"),
    "zero bubble v dp2": {"parallel__dp": 2, **staged("zero_bubble_v"), **BUCKETED_STAGES},
    "pp2 dp2 sharded": {"parallel__dp": 2, **staged("one_f_one_b"), **SHARDED_STAGES},
}


def layout_of(name: str, plan: Tables, **changes: Any) -> Tables:
    """Returns the one-process plan in this layout, with changes."""
    return changed(changed(plan, **LAYOUTS[name]), **changes)


def num_ranks(tables: Tables) -> int:
    return math.prod(tables.get("parallel", {}).get(axis, 1) for axis in ("dp", "pp", "sp"))
