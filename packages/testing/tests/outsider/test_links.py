"""A link of somebody else's holds the contract of stage links; one that is broken does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from sley_core.errors import RunError
from sley_testing.link_contract import StageLinkContract
from sley_testing.ranks import Ranks

pytestmark = pytest.mark.usefixtures("installed")

ORDER = "test_what_is_sent_comes_as_it_was"
LENGTHS = "test_micro_batches_may_have_any_lengths"
KEPT = "test_what_is_taken_stays_while_anything_has_it"
PEER = "test_a_stage_on_another_walk_is_told_on_both_ends"
ABORT = "test_an_abort_waits_for_nobody"


class TestWaveLink(StageLinkContract):
    link: ClassVar[dict[str, Any]] = {"use": "wave.link"}
    num_walks: ClassVar[int] = 2


@pytest.mark.campaign
class TestWaveLinkOnMoreWalks(TestWaveLink):
    num_walks: ClassVar[int] = 8


@pytest.mark.parametrize(
    ("name", "test", "arguments", "words"),
    [
        ("reusing", KEPT, ("two stages",), "what was taken and kept became"),
        ("disorderly", ORDER, ("a wave",), "forward of F0.* came as"),
        ("rigid", LENGTHS, ("two stages",), r"came .*\(5, 3\).*, not .*\(7, 3\)"),
        ("late", ORDER, ("two stages",), "tensor 0 came as .*77"),
        ("deaf", PEER, ([(3, 3), (3, 3, 3)],), "came .*, not"),
        ("patient", ABORT, (), "Timed out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_link_fails(ranks: Callable[..., Ranks], name: str, test: str, arguments: Any, words: str) -> None:
    class Broken(StageLinkContract):
        link: ClassVar[dict[str, Any]] = {"use": f"broken.{name}"}

    with pytest.raises((AssertionError, RunError), match=f"(?s){words}"):
        getattr(Broken(), test)(ranks, *arguments)
