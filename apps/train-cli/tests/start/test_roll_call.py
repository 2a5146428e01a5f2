"""Rank 0 hears the others in a thread: whatever ends that thread is no agreement."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch exports it

from train_cli.start.roll_call import BUILT, Board, EarlyVerdict, RollCall

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("kind", [KeyError, OSError, SystemExit])
def test_what_ends_the_hearing_is_raised_and_is_no_agreement(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fails(*_: object) -> None:
        raise kind("a line of another kind")

    monkeypatch.setattr(RollCall, "verdict", fails)
    early = EarlyVerdict(RollCall(Board(HashStore(), 0, 0), 2, "host0", BUILT), None)
    with pytest.raises(kind, match="a line of another kind"):
        early.verdict(5)


def test_a_list_that_is_no_list_is_raised() -> None:
    board = Board(HashStore(), 0, 0)
    board.set("line 1", {"host": "host1"})  # whose rank is not said
    with pytest.raises(KeyError):
        EarlyVerdict(RollCall(board, 2, "host0", BUILT), None).verdict(5)


def interrupted_wait(early: EarlyVerdict) -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    early.verdict(20)


def test_who_waits_and_is_interrupted_leaves_no_thread() -> None:
    """It would look at connections that are closed by then."""

    class Interrupted(BaseException):
        """As a KeyboardInterrupt, which would end all tests if it came late."""

    def interrupted(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        early = EarlyVerdict(RollCall(Board(HashStore(), 0, 0), 2, "host0", BUILT), None)
        with pytest.raises(Interrupted):
            interrupted_wait(early)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "sley-roll-call" not in [one.name for one in threading.enumerate()]
