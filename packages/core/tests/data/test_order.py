from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sley_core.data.feed import Order

GOLDEN = [8, 1, 9, 7, 6, 5, 3, 2, 4, 0]


@pytest.mark.parametrize("num_samples", [*range(1, 40), 256, 257, 1000])
def test_each_sample_comes_once(num_samples: int) -> None:
    order = Order(num_samples, seed=3, epoch=1)
    assert sorted(order[place] for place in range(num_samples)) == list(range(num_samples))


@given(st.integers(1, 500), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_each_sample_comes_once_for_any_seed_and_epoch(num_samples: int, seed: int, epoch: int) -> None:
    order = Order(num_samples, seed=seed, epoch=epoch)
    assert {order[place] for place in range(num_samples)} == set(range(num_samples))


@given(st.integers(2**40, 2**62), st.integers(0, 2**40 - 1))
def test_an_epoch_of_any_size_costs_no_memory(num_samples: int, place: int) -> None:
    assert 0 <= Order(num_samples, seed=0, epoch=0)[place] < num_samples


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    order = Order(10, seed=1, epoch=2)
    assert [order[place] for place in range(10)] == GOLDEN


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    def first(seed: int, epoch: int) -> tuple[int, ...]:
        order = Order(1000, seed=seed, epoch=epoch)
        return tuple(order[place] for place in range(5))

    assert len({first(seed, epoch) for seed in range(10) for epoch in range(10)}) == 100


@pytest.mark.parametrize("num_samples", [2, 3, 5, 12])
def test_every_sample_is_equally_likely_at_every_place(num_samples: int) -> None:
    num_epochs = 2000
    for place in (0, num_samples - 1):
        found = Counter(Order(num_samples, seed=0, epoch=epoch)[place] for epoch in range(num_epochs))
        expected = num_epochs / num_samples
        chi_squared = sum((found[sample] - expected) ** 2 / expected for sample in range(num_samples))
        # The 99.9 % point of chi squared with up to 11 degrees of freedom is 31.3.
        assert chi_squared < 31.3


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    order = Order(7, seed=1, epoch=3, shuffle=False)
    assert [order[place] for place in range(7)] == list(range(7))


def test_a_place_beyond_the_epoch_is_an_error() -> None:
    with pytest.raises(IndexError):
        Order(7, seed=1, epoch=0)[7]
