"""What the machine decides, for any order of uses, passes and depths."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sley_isp.prefetch import PrefetchPolicy

BLOCKS = ["a", "b", "c", "d"]
FORWARD = ["embed", *BLOCKS, "head"]
BACKWARD = ["head", *reversed(BLOCKS)]


class Rank:
    """Carries decisions out, and fails where one does not make sense: a unit that is there is gathered, or is not dropped."""

    def __init__(self, ahead: int) -> None:
        self.machine = PrefetchPolicy(ahead)
        self.here: set[str] = set()
        self.gathers: list[str] = []
        self.peak = 0

    def apply(self, decision):
        for unit in decision.drop:
            self.here.remove(unit)
        for unit in decision.gather:
            assert unit not in self.here, f"{unit} is gathered twice"
            self.here.add(unit)
            self.gathers.append(unit)
        self.peak = max(self.peak, len(self.here))
        assert self.here == set(self.machine.held)

    def step(self, *passes):
        """passes: (key, uses); a use is a unit, or (unit, pins)."""
        self.gathers = []
        self.machine.begin([key for key, _ in passes])
        self.here.clear()
        for _, uses in passes:
            self.machine.enter()
            for use in uses:
                unit, pins = use if isinstance(use, tuple) else (use, 0)
                decision = self.machine.use(unit, pins=pins)
                assert unit not in decision.gather[1:], "what is wanted now comes first"
                self.apply(decision)
                assert unit in self.here
            self.apply(self.machine.leave())
        return self.gathers


def test_a_block_is_gathered_twice_and_one_unit_is_not_foreseen():
    """Once per forward, once per backward; the last block and the head are still there when they come again."""
    rank = Rank(1)
    for _ in range(3):
        before = rank.machine.num_demands
        gathers = rank.step(("F", FORWARD), ("B", BACKWARD))
    assert gathers == ["embed", "a", "b", "c", "d", "head", "c", "b", "a"]
    assert rank.machine.num_demands - before == 1, "the first use of a step"
    assert rank.peak == 2
    assert rank.here == set()


def test_without_looking_ahead_every_gather_is_asked_for():
    rank = Rank(0)
    for _ in range(2):
        rank.step(("F", FORWARD), ("B", BACKWARD))
    assert rank.machine.num_demands == rank.machine.num_gathers
    assert rank.peak == 1


def test_what_is_recomputed_stays_for_its_backward():
    """Module by module, a block's forward runs again and then its backward: one gather for both."""
    modules = [f"{block}{number}" for block in "ab" for number in range(3)]
    again = [(unit, 1) for unit in modules[:3]] + [(unit, -1) for unit in reversed(modules[:3])]
    backward = [(unit, 1) for unit in modules[3:]] + [(unit, -1) for unit in reversed(modules[3:])] + again
    rank = Rank(1)
    for _ in range(3):
        gathers = rank.step(("F", modules), ("B", backward))
    assert all(gathers.count(unit) == 2 for unit in modules), gathers
    assert rank.peak <= 4, "a block, and one module"


def test_an_order_that_changes_is_learned_again():
    """A pass that strays is right, gathers on demand, and the next one knows."""
    rank = Rank(1)
    for order, num_demands in (("abc", 3), ("abc", 1), ("acb", 3), ("acb", 1)):
        before = rank.machine.num_demands
        rank.step(("F", order))
        assert rank.machine.num_demands - before == num_demands, "c and b, gathered when they were used"
    assert rank.gathers == ["a", "c", "b"]


def test_chunks_have_orders_of_their_own():
    rank = Rank(1)
    step = (("F0", "ab"), ("F1", "cd"), ("B1", "dc"), ("B0", "ba"))
    rank.step(*step)
    before = rank.machine.num_demands
    assert rank.step(*step) == ["a", "b", "c", "d", "b", "a"]
    assert rank.machine.num_demands - before == 1, "the next chunk's first unit is foreseen"


def test_what_was_left_behind_is_dropped_at_the_next_step():
    """A pass that an error cut short leaves units held; the next step begins without them."""
    rank = Rank(2)
    rank.step(("F", FORWARD))
    rank.machine.begin(["F"])
    rank.machine.enter()
    rank.apply(rank.machine.use("embed"))
    assert rank.here
    assert rank.step(("F", FORWARD)) == FORWARD


UNITS = st.sampled_from("abcde")
PASSES = st.lists(st.tuples(st.sampled_from(["F", "B", "E"]), st.lists(UNITS, max_size=12)), max_size=6)


@given(st.lists(PASSES, min_size=1, max_size=5), st.integers(0, 3))
def test_any_order_is_served(steps, ahead):
    """A use finds its unit; at most `ahead` more are held; nothing outlives its step; two ranks decide alike."""
    rank, twin = Rank(ahead), Rank(ahead)
    for passes in steps:
        assert rank.step(*passes) == twin.step(*passes)
        assert rank.here == set()
    assert rank.peak <= 1 + ahead


@given(PASSES.filter(lambda passes: len({key for key, _ in passes}) == len(passes)), st.integers(1, 3))
def test_a_known_order_is_foreseen(passes, ahead):
    """Once every pass was seen, only the very first use of a step is asked for."""
    rank = Rank(ahead)
    rank.step(*passes)
    before = rank.machine.num_demands
    gathers = rank.step(*passes)
    assert rank.machine.num_demands - before == min(1, len(gathers))


@given(st.lists(st.tuples(UNITS, st.sampled_from([-1, 0, 1])), max_size=30), st.integers(0, 2))
def test_pins_hold_until_they_are_paid_back(uses, ahead):
    rank = Rank(ahead)
    pins = dict.fromkeys("abcde", 0)
    rank.machine.begin(["B"])
    rank.machine.enter()
    for unit, change in uses:
        pins[unit] = max(0, pins[unit] + change)
        rank.apply(rank.machine.use(unit, pins=change))
        assert {unit, *(one for one, number in pins.items() if number)} <= rank.here
    rank.apply(rank.machine.leave())
    assert rank.here == set()


def test_gathers_wait_for_their_launch():
    """A use that does not launch gathers itself only; the first one that does gathers ahead."""
    machine = PrefetchPolicy(1)
    for number in range(2):
        machine.begin(["F"])
        machine.enter()
        found = [machine.use(unit, launches=launches).gather for unit in "ab" for launches in (False, True, True)]
        machine.leave()
        if number:
            assert found == [["a"], ["b"], [], [], [], []]


def test_stale_weights_are_gathered_again():
    """What was told to be forgotten is not held."""
    machine = PrefetchPolicy(1)
    machine.begin(["F"])
    machine.enter()
    machine.use("a")
    machine.forget("a")
    assert machine.use("a").gather == ["a"]


def seconds_per_use(num_units: int) -> float:
    """In steps that go the way they have learned: forward, and backward with every unit recomputed before.

    Of each hundred units the best of some steps, so that what else the host does in one of them does not count.
    """
    machine = PrefetchPolicy(1)
    units = [f"layer{number}" for number in range(num_units)]
    parts = [units[first : first + 100] for first in range(0, num_units, 100)]
    steps: list[list[float]] = []
    for _ in range(12):
        steps.append([])
        machine.begin(["F", "B"])
        machine.enter()
        for part in parts:
            start = time.perf_counter()
            for unit in part:
                machine.use(unit)
            steps[-1].append(time.perf_counter() - start)
        machine.leave()
        machine.enter()
        for part in reversed(parts):
            start = time.perf_counter()
            for unit in reversed(part):
                machine.use(unit, pins=1)
                machine.use(unit, pins=-1)
            steps[-1].append(time.perf_counter() - start)
        machine.leave()
    assert machine.num_demands < machine.num_gathers / 4, "in the first of twelve steps, then one in each"
    return sum(min(times) for times in zip(*steps[1:], strict=True)) / (3 * num_units)


def test_a_decision_is_cheap():
    """Little time per module and pass, whatever the number of units: no use looks at all of them."""
    few, many = seconds_per_use(400), seconds_per_use(2800)
    print(f"{few * 1e6:.2f} us per use of 400 units, {many * 1e6:.2f} of 2800")
    assert max(few, many) < 100e-6
    assert many < 3 * few, "seven times the units"


def test_the_machine_needs_no_torch():
    program = "import sys, sley_isp.prefetch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("ahead", [1, 2])
def test_two_blocks_are_there_at_most(ahead):
    """The one in use and `ahead` more: two, where one unit is gathered ahead."""
    rank = Rank(ahead)
    for _ in range(3):
        rank.step(*(pass_ for _ in range(4) for pass_ in (("F", FORWARD), ("B", BACKWARD))))
    assert rank.peak == 1 + ahead
