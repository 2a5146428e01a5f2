"""Ten steps between which memory leaves and comes back end with the bits of ten without, in every layout.

Memory comes back as NaN before it is copied. bf16 has masters, which alias working weights: fp32 alone would hide that.
"""

from __future__ import annotations

import pytest
from layouts import ALONE, LAYOUTS, assert_same
from parking import BETWEEN, EVERYTHING, steps, three_ways

from sley_testing.plans import small_plan

pytestmark = pytest.mark.timeout(180)


@pytest.mark.sample(1)
@pytest.mark.parametrize("changes", ALONE.values(), ids=ALONE.keys())
def test_on_one_rank(changes, texts):
    assert_same(*three_ways(small_plan(**changes), texts))


@pytest.mark.sample(1)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_on_two_ranks(ranks, changes, compute, texts):
    for found in ranks(2, timeout_s=150)(three_ways, small_plan(**changes, precision__compute=compute), texts):
        assert_same(*found)


def test_both_kinds_together(texts):
    """States are away between two steps by themselves, the rest by call; two managers in one plan."""
    tables = small_plan(precision__compute="bf16")
    rest = ["weights", "buffers", "masters", "gradients", "handlers", "pools", "messages"]
    both = [*BETWEEN, {"use": "memory.everything", "parts": rest}]
    plain, found = steps(tables, texts, 4), steps({**tables, "offload": both}, texts, 4, moves=True)
    assert found[:2] == plain[:2]


def test_memory_that_leaves_before_the_first_step(texts):
    """There are no states and no gradients yet."""
    from parking import cycle, running, sha

    tables = small_plan(precision__compute="bf16")
    with running({**tables, "offload": EVERYTHING}, texts) as run:
        cycle(run)
        assert run.memory.report["optimizer_states"].copied_out == 0
        for _ in range(3):
            run.step()
        found = sha(run)
    assert found == steps(tables, texts, 3)[0]


def test_a_copy_that_is_missing_is_seen(texts, monkeypatch):
    """The poison works: without copies back, the next step has no number."""
    from sley_core.comm.copies import HostStream

    monkeypatch.setattr(HostStream, "copy", lambda stream, target, source: None)
    with pytest.raises(Exception, match="not-finite"):
        steps({**small_plan(), "offload": EVERYTHING}, texts, 2, moves=True)
