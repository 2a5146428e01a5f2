"""The contract of weight communicators holds for the simplest one, and finds what is wrong with each that is broken."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from sley_testing.weight_contract import WeightCommunicatorContract, load, rewrite

pytestmark = pytest.mark.usefixtures("naive")


class TestNaive(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "naive.naive"}


def broken(name: str) -> WeightCommunicatorContract:
    contract = WeightCommunicatorContract()
    contract.weights = {"use": f"naive.{name}"}  # type: ignore[misc]  # of this one alone
    return contract


@pytest.mark.parametrize("name", ["mean", "own"])
def test_gradients_that_are_no_sums_over_ranks(ranks: Any, name: str) -> None:
    with pytest.raises(AssertionError, match=r"differ.*\n  (first|second)\.(often|wide|narrow)\.weight"):
        broken(name).test_every_layout_gives_the_numbers_of_whole_weights(ranks, 2, 2, 1, {})


def test_weights_that_are_kept_too_long(ranks: Any) -> None:
    with pytest.raises(AssertionError, match=r"rank 0, step 2: loss .*, not "):
        broken("cached").test_every_layout_gives_the_numbers_of_whole_weights(ranks, 2, 2, 1, {})
    for change in (rewrite, load):
        with pytest.raises(AssertionError, match=r"rank 0, step .: loss .*, not "):
            broken("cached").test_what_is_done_between_steps_counts_from_the_next_one_on(ranks, change)


def test_weights_that_nobody_waited_for(ranks: Any) -> None:
    broken("eager").test_every_layout_gives_the_numbers_of_whole_weights(ranks, 2, 2, 2, {})
    with pytest.raises(AssertionError, match="weights that come late"):
        broken("eager").test_weights_are_waited_for(ranks)


def test_layers_that_are_still_exchanged_for_after_the_run(ranks: Any) -> None:
    with pytest.raises(AssertionError, match="embed gives a result after the run"):
        broken("left").test_exchanges_counts_reads_and_what_the_run_leaves(ranks)


def test_shards_that_are_taken_for_weights(ranks: Any) -> None:
    with pytest.raises(AssertionError, match=r"first.often.weight reads as \[3, 6\] that is not the weight"):
        broken("shards").test_exchanges_counts_reads_and_what_the_run_leaves(ranks)


def test_what_a_failed_step_left(ranks: Any) -> None:
    broken("hoards").test_every_layout_gives_the_numbers_of_whole_weights(ranks, 2, 2, 2, {})
    with pytest.raises(AssertionError, match="after a failed step"):
        broken("hoards").test_a_step_that_failed_leaves_nothing(ranks)
