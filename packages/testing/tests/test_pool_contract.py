"""The contract of memory pools holds for the simplest one, and says what is wrong with each that is wrong on purpose."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from sley_testing.pool_contract import MemoryPoolContract

pytestmark = pytest.mark.usefixtures("wrong")

WRONG = [
    ("shared", "what_is_lent_is_nobody_elses", "was lent to someone else before it was given back"),
    ("elements", "a_buffer_is_what_was_asked_for", r"asked for \(15,\) torch.float32, lent \(\(3, 5\)"),
    ("inferred", "a_buffer_is_what_was_asked_for", "cannot be used in training"),
    ("hoards", "memory_does_not_grow_with_time", r"the same leases, four times: the pool holds \["),
    ("loses", "memory_does_not_grow_with_time", r"the same leases, four times: the pool holds \["),
    ("counts", "trim_frees_what_is_not_lent", "trim says that it freed .* bytes, and the pool holds .* less"),
    ("frees", "trim_frees_what_is_not_lent", "trim freed the memory of a buffer that is lent"),
    ("keeps", "what_is_trimmed_is_free", "after trim 9 of 9 buffers still have their memory"),
    ("silent", "it_says_what_it_holds", r"`held` says nothing of the buffer of \(\) torch.float32 that is lent"),
    ("again", "a_lease_that_is_over_gives_no_ones_buffer", "a lease that is used twice gives a buffer that is lent"),
]


class TestNaive(MemoryPoolContract):
    pool: ClassVar[dict[str, Any]] = {"use": "wrong.naive"}


@pytest.mark.parametrize(("name", "test", "words"), WRONG)
def test_what_is_wrong_is_said(name: str, test: str, words: str) -> None:
    class Wrong(MemoryPoolContract):
        pool: ClassVar[dict[str, Any]] = {"use": f"wrong.{name}"}

    with pytest.raises(AssertionError, match=words):
        getattr(Wrong(), f"test_{test}")()
