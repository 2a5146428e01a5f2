"""Tests the decisions of the prefetch policy for all orders of uses, passes and depths."""

from hypothesis import given
from hypothesis import strategies as st

from sley_isp.prefetch import PrefetchPolicy

BLOCKS = ["a", "b", "c", "d"]
FORWARD = ["embed", *BLOCKS, "head"]
BACKWARD = ["head", *reversed(BLOCKS)]


class Rank:
    """Executes decisions, and fails if one unshards an unsharded group or reshards a sharded one."""

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

    def use(self, group, num_holds=0):
        decision = self.policy.use(group, num_holds=num_holds)
        assert group not in decision.unshard[1:], "the group that is needed now comes first"
        self.num_demands += decision.unshard[:1] == [group]
        self.apply(decision)
        assert group in self.unsharded

    def step(self, *passes):
        """Runs passes of (key, uses) and returns the gathers. A use is a group or (group, num_holds)."""
        self.gathers = []
        self.num_demands = 0
        self.policy.begin([key for key, _ in passes])
        self.unsharded.clear()
        for _, uses in passes:
            self.policy.begin_pass()
            for use in uses:
                self.use(*(use if isinstance(use, tuple) else (use,)))
            self.apply(self.policy.end_pass())
        return self.gathers


def test_a_block_is_gathered_twice_and_the_first_use_is_a_demand():
    """A block is gathered once per forward and once per backward. The last block and the head stay unsharded."""
    rank = Rank(1)
    for _ in range(3):
        gathers = rank.step(("F", FORWARD), ("B", BACKWARD))
    assert gathers == ["embed", "a", "b", "c", "d", "head", "c", "b", "a"]
    assert rank.num_demands == 1, "the first use of a step"
    assert rank.peak == 2
    assert rank.unsharded == set()


def test_recomputed_weights_stay_until_their_backward():
    """A block's recomputation and its backward share one gather per module."""
    modules = [f"{block}{number}" for block in "ab" for number in range(3)]
    again = [(group, 1) for group in modules[:3]] + [(group, -1) for group in reversed(modules[:3])]
    backward = [(group, 1) for group in modules[3:]] + [(group, -1) for group in reversed(modules[3:])] + again
    rank = Rank(1)
    for _ in range(3):
        gathers = rank.step(("F", modules), ("B", backward))
    assert all(gathers.count(group) == 2 for group in modules), gathers
    assert rank.peak <= 4, "a block, and one module"


def test_an_order_that_changes_is_learned_again():
    """A pass that leaves the order gathers on demand, and the next pass knows the new order."""
    rank = Rank(1)
    for order, num_demands in (("abc", 3), ("abc", 1), ("acb", 3), ("acb", 1)):
        rank.step(("F", order))
        assert rank.num_demands == num_demands, "c and b, gathered when they were used"
    assert rank.gathers == ["a", "c", "b"]


GROUPS = st.sampled_from("abcde")
KEYS, USES = st.sampled_from(["F", "B", "E"]), st.lists(GROUPS, max_size=12)
PASSES = st.lists(st.tuples(KEYS, USES), max_size=6)
ONCE = st.dictionaries(KEYS, USES).map(lambda uses: list(uses.items()))
"""Each kind of pass once at most."""


@given(st.lists(PASSES, min_size=1, max_size=5), st.integers(0, 3))
def test_any_order_of_uses(steps, ahead):
    """A used group and at most `ahead` others are unsharded, none after its step, and two ranks decide equally."""
    rank, twin = Rank(ahead), Rank(ahead)
    for passes in steps:
        assert rank.step(*passes) == twin.step(*passes)
        assert rank.unsharded == set()
    assert rank.peak <= 1 + ahead


@given(ONCE, st.integers(1, 3))
def test_a_known_order_is_prefetched(passes, ahead):
    """After each pass has run once, only the first use of a step is a demand gather."""
    rank = Rank(ahead)
    rank.step(*passes)
    gathers = rank.step(*passes)
    assert rank.num_demands == min(1, len(gathers))


@given(st.lists(st.tuples(GROUPS, st.sampled_from([-1, 0, 1])), max_size=30), st.integers(0, 2))
def test_groups_are_kept_until_their_backwards(uses, ahead):
    rank = Rank(ahead)
    kept = dict.fromkeys("abcde", 0)
    rank.policy.begin(["B"])
    rank.policy.begin_pass()
    for group, change in uses:
        kept[group] = max(0, kept[group] + change)
        rank.use(group, change)
        assert {group, *(other for other, number in kept.items() if number)} <= rank.unsharded
    rank.apply(rank.policy.end_pass())
    assert rank.unsharded == set()


def test_prefetches_wait_for_their_launch():
    """A use that may not prefetch gathers only its group."""
    policy = PrefetchPolicy(1)
    for number in range(2):
        policy.begin(["F"])
        policy.begin_pass()
        found = [policy.use(group, can_prefetch=starts).unshard for group in "ab" for starts in (False, True, True)]
        policy.end_pass()
        if number:
            assert found == [["a"], ["b"], [], [], [], []]
