"""The contract of offload managers holds for the simplest one, and says what is wrong with each that is wrong on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_testing.offload_contract import OffloadManagerContract

pytestmark = pytest.mark.usefixtures("wrong")

WRONG = [  # each test of the contract meets one of the sample
    ("careless", "what_leaves_comes_back", "is resized while copy .* may be under way: `hold_device` is missing"),
    ("twice", "a_second_call_does_nothing", "weights: a second offload counts 0 times as one with nothing to do"),
    ("open", "what_is_away_is_refused", "a step while weights are away is not refused"),
    ("vague", "what_is_away_is_refused", "the refusal of a step without weights does not name it"),
    ("skips", "what_leaves_comes_back", "tensors have other bits: weights"),
    ("stays", "a_run_may_close_while_its_memory_is_away", "after the run these weights have no memory: "),
    ("half", "what_leaves_comes_back", "weights are away, and .* bytes of them are still on the device"),
    ("silent", "it_says_what_it_moves", "weights had .* bytes, and 0 are said to be given back"),
]


class TestNaive(OffloadManagerContract):
    offload: ClassVar[dict[str, Any]] = {"use": "wrong.naive"}


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "test", "words"), WRONG)
def test_what_is_wrong_is_said(texts: Path, name: str, test: str, words: str) -> None:
    class Wrong(OffloadManagerContract):
        offload: ClassVar[dict[str, Any]] = {"use": f"wrong.{name}"}

    with pytest.raises(AssertionError, match=words):
        getattr(Wrong(), f"test_{test}")(texts)
