"""Costs of exchanges by hand: rings, groups that share a card, and what a kind of exchange has for itself."""

from __future__ import annotations

import pytest

from sley_core.errors import PlanError
from sley_core.topology import Topology
from sley_estimate.machine import LinksTable
from sley_estimate.step.links import (
    NOTHING,
    all_groups,
    collective_cost,
    concurrent_groups,
    message_cost,
    slowest_cost,
    slowest_message_cost,
)

MB = 1_000_000


def links(per_host=4, shared=False, **same) -> LinksTable:
    return LinksTable.model_validate(
        {
            "ranks_per_host": per_host,
            "same_host": {"latency_s": 1e-5, "bandwidth": 1e9, **same},
            "other_host": {"latency_s": 1e-4, "bandwidth": 1e8, "shared": shared},
        }
    )


def test_a_ring_of_one_host() -> None:
    assert collective_cost("sum", 4 * MB, range(4), links()) == pytest.approx((6e-5, 2 * 3 / 4 * 4e-3, 0.0))
    assert collective_cost("gather", 4 * MB, range(4), links()) == pytest.approx((3e-5, 3 / 4 * 4e-3, 0.0))
    assert collective_cost("reduce", 4 * MB, range(4), links()) == collective_cost("gather", 4 * MB, range(4), links())
    assert collective_cost("sum", 4 * MB, [3], links()) == NOTHING


def test_a_ring_over_two_hosts_uses_the_cards_of_all_its_ranks() -> None:
    whole = collective_cost("gather", 8 * MB, range(8), links())
    assert whole.work_s == pytest.approx(7 / 8 * 8 * MB / 4e8)
    assert whole.latency_s == pytest.approx(7e-4)
    alone = collective_cost("gather", 8 * MB, (0, 4), links())
    assert alone.work_s == pytest.approx(1 / 2 * 8 * MB / 1e8)


def test_groups_that_share_a_card_have_a_part_of_it_each() -> None:
    whole = collective_cost("gather", 8 * MB, range(8), links(shared=True))
    assert whole.work_s == pytest.approx(7 / 8 * 8 * MB / 1e8), "one ring for the card"
    one_of_four = collective_cost("gather", 8 * MB, (0, 4), links(shared=True))
    assert one_of_four.work_s == pytest.approx(1 / 2 * 8 * MB / 1e8 * 4), "four rings for it"


def test_messages() -> None:
    assert message_cost(MB, 0, 3, links()) == pytest.approx((1e-5, 1e-3, 0.0))
    assert message_cost(MB, 3, 4, links()) == pytest.approx((1e-4, 1e-2, 0.0))
    assert message_cost(MB, 3, 4, links(shared=True)) == pytest.approx((1e-4, 4e-2, 0.0))


def test_swaps_go_to_each_peer_directly() -> None:
    assert collective_cost("swap", 8 * MB, range(4), links()) == pytest.approx((1e-5, 3 / 4 * 8e-3, 0.0))
    assert collective_cost("swap", 8 * MB, range(8), links()).work_s == pytest.approx(4 / 8 * 8 * MB / 1e8)


def test_a_kind_of_exchange_may_have_figures_of_its_own() -> None:
    own = links(sum={"latency_s": 0.0, "bandwidth": 5e8}, send={"latency_s": 0.5, "bandwidth": 1e9})
    assert collective_cost("sum", 4 * MB, range(4), own) == pytest.approx((0.0, 2 * 3 / 4 * 8e-3, 0.0))
    assert collective_cost("gather", 4 * MB, range(4), own).latency_s == pytest.approx(3e-5)
    assert message_cost(MB, 0, 1, own).latency_s == 0.5


@pytest.mark.parametrize(
    "cost",
    [
        lambda links: collective_cost("gather", 4 * MB, range(4), links),
        lambda links: collective_cost("swap", 4 * MB, range(4), links),
        lambda links: message_cost(4 * MB, 0, 1, links),
    ],
    ids=["ring", "swap", "message"],
)
def test_what_does_not_overlap_is_work_of_who_waits(cost) -> None:
    """It takes as long in all, where nothing is computed beside it."""
    whole, half, none = (cost(links(overlap=overlap)) for overlap in (1.0, 0.5, 0.0))
    assert half == pytest.approx((whole.latency_s / 2, whole.work_s / 2, sum(whole) / 2))
    assert none == pytest.approx((0.0, 0.0, sum(whole)))


def test_a_kind_overlaps_as_its_own_figures_say() -> None:
    own = links(gather={"latency_s": 0.0, "bandwidth": 1e9, "overlap": 0.0})
    assert collective_cost("gather", 4 * MB, range(4), own).work_s == 0.0
    assert collective_cost("reduce", 4 * MB, range(4), own).member_work_s == 0.0


def test_a_link_that_the_file_does_not_have_is_told() -> None:
    with pytest.raises(PlanError, match="other_host"):
        message_cost(MB, 0, 4, LinksTable.model_validate({"ranks_per_host": 4}))
    with pytest.raises(PlanError, match="same_host"):
        collective_cost("sum", MB, (0, 1), LinksTable())


def test_of_groups_that_lie_on_hosts_in_different_ways_the_slowest_counts() -> None:
    topology = Topology.of(
        12, pp=2, sp=3
    )  # hosts of ranks 0-3, 4-7, 8-11; the first group lies on one host, the second crosses
    first, crossing = range(3), range(3, 6)
    assert topology.ranks_of("sp", 3) == tuple(crossing)
    groups = concurrent_groups(topology, "sp", first, links())
    assert slowest_cost("swap", MB, groups, links()) == collective_cost("swap", MB, crossing, links())
    assert slowest_cost(
        "sum", MB, concurrent_groups(topology, "sp", first, links(per_host=3)), links(per_host=3)
    ) == collective_cost("sum", MB, first, links(per_host=3))
    assert [len(all_groups(topology, "sp", links(per_host=each))) for each in (3, 4, 12)] == [1, 2, 1]


def test_ties_of_all_ranks_of_a_stage_are_priced() -> None:
    topology = Topology.of(6, pp=2)  # rank 0 and 3 share a host of four, 1 and 4 do not
    groups = concurrent_groups(topology, "tie[a]", (0, 3), links())
    assert slowest_cost("sum", MB, groups, links()) == collective_cost("sum", MB, (1, 4), links())


def test_of_messages_between_two_stages_the_slowest_counts() -> None:
    topology = Topology.of(6, pp=2)
    assert slowest_message_cost(MB, (0, 1), topology, links()) == message_cost(MB, 1, 4, links())
    assert slowest_message_cost(MB, (0, 1), topology, links(per_host=6)) == message_cost(MB, 0, 3, links(per_host=6))
    assert slowest_message_cost(MB, (0, 1), Topology.of(16, pp=2), links()) == message_cost(MB, 0, 8, links())
