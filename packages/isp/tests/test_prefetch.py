"""What the prefetch policy decides, for any order of uses, passes and depths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sley_isp.prefetch import PrefetchPolicy

BLOCKS = ["a", "b", "c", "d"]
FORWARD = ["embed", *BLOCKS, "head"]
BACKWARD = ["head", *reversed(BLOCKS)]


class Rank:
    """Carries decisions out, and fails if one makes no sense: it unshards an unsharded group, or reshards a sharded one."""

    def __init__(self, ahead: int) -> None:
        self.policy = PrefetchPolicy(ahead)
        self.unsharded: set[str] = set()
        self.gathers: list[str] = []
        self.num_demands = 0
        self.peak = 0

    def apply(self, decision):
        for group in decision.reshard:
            self.unsharded.remove(group)
        for group in decision.unshard:
            assert group not in self.unsharded, f"{group} is gathered twice"
            self.unsharded.add(group)
            self.gathers.append(group)
        self.peak = max(self.peak, len(self.unsharded))
        assert self.unsharded == set(self.policy.unsharded)

    def use(self, group, keep=0):
        decision = self.policy.use(group, keep=keep)
        assert group not in decision.unshard[1:], "the group that is needed now comes first"
        self.num_demands += decision.unshard[:1] == [group]
        self.apply(decision)
        assert group in self.unsharded

    def step(self, *passes):
        """passes: (key, uses); a use is a group, or (group, keep). Returns the gathers."""
        self.gathers = []
        self.num_demands = 0
        self.policy.begin([key for key, _ in passes])
        self.unsharded.clear()
        for _, uses in passes:
            self.policy.enter()
            for use in uses:
                self.use(*(use if isinstance(use, tuple) else (use,)))
            self.apply(self.policy.leave())
        return self.gathers


def test_a_block_is_gathered_twice_and_one_unit_is_not_foreseen():
    """Once per forward, once per backward; the last block and the head are still there when they come again."""
    rank = Rank(1)
    for _ in range(3):
        gathers = rank.step(("F", FORWARD), ("B", BACKWARD))
    assert gathers == ["embed", "a", "b", "c", "d", "head", "c", "b", "a"]
    assert rank.num_demands == 1, "the first use of a step"
    assert rank.peak == 2
    assert rank.unsharded == set()


def test_without_looking_ahead_every_gather_is_asked_for():
    rank = Rank(0)
    for _ in range(2):
        rank.step(("F", FORWARD), ("B", BACKWARD))
    assert rank.num_demands == len(rank.gathers)
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
        rank.step(("F", order))
        assert rank.num_demands == num_demands, "c and b, gathered when they were used"
    assert rank.gathers == ["a", "c", "b"]


def test_chunks_have_orders_of_their_own():
    rank = Rank(1)
    step = (("F0", "ab"), ("F1", "cd"), ("B1", "dc"), ("B0", "ba"))
    rank.step(*step)
    assert rank.step(*step) == ["a", "b", "c", "d", "b", "a"]
    assert rank.num_demands == 1, "the next chunk's first unit is foreseen"


def test_what_was_left_behind_is_dropped_at_the_next_step():
    """A pass that an error cut short leaves units held; the next step begins without them."""
    rank = Rank(2)
    rank.step(("F", FORWARD))
    rank.policy.begin(["F"])
    rank.policy.enter()
    rank.use("embed")
    assert rank.unsharded
    assert rank.step(("F", FORWARD)) == FORWARD


GROUPS = st.sampled_from("abcde")
PASSES = st.lists(st.tuples(st.sampled_from(["F", "B", "E"]), st.lists(GROUPS, max_size=12)), max_size=6)


@given(st.lists(PASSES, min_size=1, max_size=5), st.integers(0, 3))
def test_any_order_is_served(steps, ahead):
    """A use finds its unit; at most `ahead` more are held; nothing outlives its step; two ranks decide alike."""
    rank, twin = Rank(ahead), Rank(ahead)
    for passes in steps:
        assert rank.step(*passes) == twin.step(*passes)
        assert rank.unsharded == set()
    assert rank.peak <= 1 + ahead


@given(PASSES.filter(lambda passes: len({key for key, _ in passes}) == len(passes)), st.integers(1, 3))
def test_a_known_order_is_foreseen(passes, ahead):
    """Once every pass was seen, only the very first use of a step is asked for."""
    rank = Rank(ahead)
    rank.step(*passes)
    gathers = rank.step(*passes)
    assert rank.num_demands == min(1, len(gathers))


@given(st.lists(st.tuples(GROUPS, st.sampled_from([-1, 0, 1])), max_size=30), st.integers(0, 2))
def test_groups_are_kept_until_their_backwards(uses, ahead):
    rank = Rank(ahead)
    kept = dict.fromkeys("abcde", 0)
    rank.policy.begin(["B"])
    rank.policy.enter()
    for group, change in uses:
        kept[group] = max(0, kept[group] + change)
        rank.use(group, change)
        assert {group, *(other for other, number in kept.items() if number)} <= rank.unsharded
    rank.apply(rank.policy.leave())
    assert rank.unsharded == set()


def test_gathers_wait_for_their_launch():
    """A use that does not launch gathers itself only; the first one that does gathers ahead."""
    policy = PrefetchPolicy(1)
    for number in range(2):
        policy.begin(["F"])
        policy.enter()
        found = [policy.use(group, prefetches=starts).unshard for group in "ab" for starts in (False, True, True)]
        policy.leave()
        if number:
            assert found == [["a"], ["b"], [], [], [], []]


def test_stale_weights_are_gathered_again():
    """What was told to be forgotten is not held."""
    policy = PrefetchPolicy(1)
    policy.begin(["F"])
    policy.enter()
    policy.use("a")
    policy.forget("a")
    assert policy.use("a").unshard == ["a"]


@pytest.mark.parametrize("ahead", [1, 2])
def test_two_blocks_are_there_at_most(ahead):
    """The one in use and `ahead` more: two, where one unit is gathered ahead."""
    rank = Rank(ahead)
    for _ in range(3):
        rank.step(*(pass_ for _ in range(4) for pass_ in (("F", FORWARD), ("B", BACKWARD))))
    assert rank.peak == 1 + ahead
