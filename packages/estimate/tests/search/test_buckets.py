"""In how many pieces gradients are summed: as records say, each with its latency."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sley_core.hookspecs import hookimpl
from sley_core.plan.load import plan_from_dict
from sley_core.records import GradientHandlerRecord
from sley_core.table import Table
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search.best_first import InOrder
from sley_estimate.search.buckets import fewest, filled
from sley_estimate.search.choices import choices_of
from sley_estimate.search.layouts import Layouts
from sley_estimate.search.quick import Quick
from sley_estimate.seconds_of_plan import estimate_seconds
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import loader_of, small_plan


class Size(Table):
    bucket: float = -1.0


class Outsider:
    """Reducers that say how large their buckets are, if that is not negative, and one that says nothing."""

    @hookimpl
    def sley_gradient_handlers(self) -> list[GradientHandlerRecord]:
        build, plain = "sley_core.engine.each:Each", lambda config: True
        told = lambda config: None if config.bucket < 0 else config.bucket  # noqa: E731
        says = GradientHandlerRecord(
            name="says", config=Size, build=build, role="reducer", plain_sums=plain, bucket_bytes=told
        )
        return [says, GradientHandlerRecord(name="silent", config=Size, build=build, role="reducer", plain_sums=plain)]


def seconds(use: str, latency_s: float, **more: float) -> tuple[float, int, int]:
    """Seconds of a step of two ranks at a glance; how many layers and gradients there are."""
    data = {"use": "core.text", "source": "python-stdlib", "sequence": 24}
    handlers = [{"use": use, **more}]
    plan = plan_from_dict(
        small_plan(data=data, parallel={"dp": 2}, gradient_handlers=handlers), loader=loader_of({"out": Outsider()})
    )
    link = {"latency_s": latency_s, "bandwidth": 1e15, "overlap": 0.0}
    quick = Quick(plan, 2, machine_from_dict(small_machine(links__same_host=link)))
    keep = ("pp", "sp", "wp", "micro_size", "reducer", "activations", "offload")
    found = InOrder(Layouts(plan, 2, choices_of(plan), keep), quick).next()
    assert found is not None
    if use == "core.each":
        told = estimate_seconds(found.layout.plan(plan, 2), 2, quick.machine).step.seconds
        assert found.estimate.seconds == pytest.approx(told, rel=0.01)
    trained = quick.tables.trained.every
    return found.estimate.seconds, len(trained), sum(map(len, trained))


@pytest.mark.parametrize(
    ("use", "bucket", "pieces"),
    [
        ("out.silent", None, "layers"),
        ("out.says", -1.0, "layers"),
        ("out.says", 0.0, "gradients"),
        ("core.each", None, "gradients"),
        ("out.says", 1e12, "one"),
    ],
)
def test_each_piece_has_a_latency(use: str, bucket: float | None, pieces: str) -> None:
    """A reducer of many buckets seemed to sum each layer at once: a fifth of a step between hosts."""
    more = {} if bucket is None else {"bucket": bucket}
    quick, _, _ = seconds(use, 0.0, **more)
    slow, layers, gradients = seconds(use, 1.0, **more)
    count = {"layers": layers, "gradients": gradients, "one": 1}[pieces]
    assert slow - quick == pytest.approx(2 * count, abs=1e-6), "a sum of two ranks has two latencies"


def test_buckets_are_filled_in_the_order_of_a_backward_and_never_over_stages() -> None:
    sizes = [[4.0], [1.0, 2.0], [3.0, 1.0], [9.0]]
    found = filled(sizes, [[(0, 4)]], 4.0)
    # [9] | [1 3] | [2 1] | [4]
    assert found.elements.tolist() == [4.0, 3.0, 4.0, 9.0]
    assert found.counts.tolist() == [1, 1, 1, 1]
    wide = filled(sizes, [[(0, 2)], [(2, 4)]], 100.0)
    assert wide.elements.tolist() == [7.0, 0.0, 13.0, 0.0]
    assert wide.counts.tolist() == [1, 0, 1, 0]
    dealt = filled(sizes, [[(0, 1), (2, 3)], [(1, 2), (3, 4)]], 100.0)
    assert dealt.elements.tolist() == [8.0, 12.0, 0.0, 0.0], "the last chunk comes first in a backward"


@given(
    st.lists(st.lists(st.integers(1, 9).map(float), max_size=4), min_size=1, max_size=6),
    st.integers(0, 20).map(float),
)
def test_nothing_is_lost_or_split(sizes: list[list[float]], most: float) -> None:
    found = filled(sizes, [[(0, len(sizes))]], most)
    assert found.elements.sum() == sum(map(sum, sizes))
    number = sum(map(len, sizes))
    assert found.counts.sum() <= number
    if most == 0:
        assert found.counts.tolist() == [len(some) for some in sizes]


def test_no_cut_into_stages_has_fewer_buckets_than_the_fewest() -> None:
    """Two chunks of a stage that do not touch fill buckets together: layers of 3 and 7, and of 8 and 2, make two of 10."""
    sizes = [[3.0], [8.0], [7.0], [2.0]]
    dealt = filled(sizes, [[(0, 1), (2, 3)], [(1, 2), (3, 4)]], 10.0)
    assert dealt.counts.sum() == fewest(sizes, 10.0).counts.sum() == 2
    assert filled(sizes, [[(0, 4)]], 10.0).counts.sum() == 3
    assert fewest([[25.0], [4.0]], 10.0).counts.sum() == 2
    assert fewest([[25.0], [4.0]], 0.0).counts.sum() == 2, "each by itself"
