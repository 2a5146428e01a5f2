"""A stage's estimate takes a few micro-batches of many, and as many messages are under way as with all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes import rank as steps
from sley_estimate.bytes.rank import rank_bytes
from sley_testing.plans import small_plan

PLAN = small_plan(parallel={"pp": 2}, pipeline={"use": "pp.one_f_one_b"}, batch={"global_size": 16, "micro_size": 1})


def test_a_few_micro_batches_have_as_many_messages_under_way(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage sends a gradient for each output that it takes, and waits for the ninth before."""
    plan = plan_from_dict(PLAN, texts)
    few = rank_bytes(plan, 1, 2)
    monkeypatch.setattr(steps, "fewest_micros", lambda _, of_micros: of_micros)
    every = rank_bytes(plan, 1, 2)
    assert few.num_micros < every.num_micros
    assert few.states == every.states
