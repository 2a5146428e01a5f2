"""The contract of datasets holds for simple ones, and says what is wrong with each that is wrong on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_core.errors import RunError
from sley_testing.dataset_contract import DatasetContract

pytestmark = pytest.mark.usefixtures("wrong")

WRONG = [
    ("Draws", "it_leaves_the_default_generator_alone", "draws from torch's default generator"),
    ("Fresh", "a_number_names_one_sample", "sample 29 is another one when it is read again"),
    ("Own", "a_number_names_one_sample", "sample 0 is another one on another rank"),
    ("Own", "ranks_share_one_sequence", "batch 0: the samples of two ranks are not those of one"),
    ("Threaded", "a_number_names_one_sample", "is another one on another rank, or in another thread"),
    ("Reuses", "a_sample_stays_as_it_is", "sample 0 changes while others are read"),
    ("Wider", "samples_are_what_it_declares", "the field `tokens` has 5 positions; declared are 4"),
    ("Odd", "samples_are_what_it_declares", "token-out-of-range"),
    ("Leaks", "held_out_samples_are_others", "the held-out sample 0 is trained on too"),
    ("Shrinks", "a_number_names_one_sample", "the length changes when samples are read"),
    ("Restarts", "a_restart_goes_on_where_it_was", "a run that goes on after batch 4 has another batch 4"),
    ("Ahead", "a_restart_goes_on_where_it_was", "a run that goes on after batch 4 has another batch 4"),
]


class TestNaive(DatasetContract):
    data: ClassVar[dict[str, Any]] = {"factory": "wrong_data:Naive"}
    holds_out = True


class TestStream(DatasetContract):
    data: ClassVar[dict[str, Any]] = {"factory": "wrong_data:Stream"}
    holds_out = True


@pytest.mark.parametrize(("name", "test", "words"), WRONG)
def test_what_is_wrong_is_said(name: str, test: str, words: str, tmp_path: Path) -> None:
    class Wrong(DatasetContract):
        data: ClassVar[dict[str, Any]] = {"factory": f"wrong_data:{name}"}
        holds_out = True

    with pytest.raises((AssertionError, RunError), match=words):
        getattr(Wrong(), f"test_{test}")(tmp_path)
