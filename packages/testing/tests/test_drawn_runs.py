"""A whole run trains on a device that draws its copies, alone and as ranks of one each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sley_testing.drawn_copies import DrawnDevice
from sley_testing.parity import assert_same_bits
from sley_testing.plans import small_plan
from sley_testing.runs import Recorded, record


def trained(order: int, tables: dict[str, Any], folder: Path) -> Recorded:
    """What a run on a drawn device sees, alone or as one of several ranks."""
    device = DrawnDevice(order=order)
    with device.watching():
        return record(tables, 2, folder=folder, device=device)


def test_a_run_trains_on_it(texts: Path) -> None:
    """All that a step does passes the rules, and its numbers are those of a plain CPU."""
    tables = small_plan(precision__compute="bf16")
    assert_same_bits(record(tables, 2, folder=texts).weights, trained(1, tables, texts).weights)


def test_ranks_train_on_one_each(ranks: Callable[..., Any], texts: Path) -> None:
    tables = small_plan(parallel={"dp": 2}, gradient_handlers=[{"use": "core.each"}])
    plain = ranks(2)(record, tables, 2, folder=texts)
    for one, other in zip(plain, ranks(2)(trained, 2, tables, texts), strict=True):
        assert_same_bits(one.weights, other.weights)
