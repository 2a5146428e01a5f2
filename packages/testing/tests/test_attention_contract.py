"""The contract of sequence attentions holds for the simplest one, and finds what is wrong with each that is broken."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from sley_testing.attention_contract import SequenceAttentionContract

pytestmark = pytest.mark.usefixtures("naive")


class TestNaive(SequenceAttentionContract):
    sequence: ClassVar[dict[str, Any]] = {"use": "naive.naive"}


def broken(name: str) -> SequenceAttentionContract:
    contract = SequenceAttentionContract()
    contract.sequence = {"use": f"naive.{name}"}  # type: ignore[misc]  # of this one alone
    return contract


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("local", r"\(4, 4, False\): a slice's context or gradients are off by "),
        ("unsummed", r"\(4, 4, False\): a slice's context or gradients are off by "),
        ("together", r"\(4, 4, True\): a slice's context or gradients are off by "),
        ("stays", "no attention of whole sequences"),
    ],
)
def test_what_is_wrong_with_a_slice_is_told_by_its_case(ranks: Any, name: str, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        broken(name).test_a_slice_gets_what_the_whole_sequence_would_give_it(ranks)


def test_gradients_that_are_not_summed_show_in_a_run(ranks: Any) -> None:
    with pytest.raises(AssertionError, match=r"kv\.weight"):
        broken("unsummed").test_runs_give_the_numbers_of_one_process(ranks, 0.0)


def test_a_model_that_nobody_refuses(ranks: Any) -> None:
    with pytest.raises(AssertionError, match="a model without attention is not refused: no slice would see another"):
        broken("silent").test_a_model_without_attention_is_refused(ranks)
