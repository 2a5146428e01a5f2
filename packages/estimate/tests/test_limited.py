"""Steps without values that do not end are interrupted, in the process that takes them, and nothing is left of the limit."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.limited import limited
from sley_estimate.bytes.rank import rank_bytes
from sley_testing.plans import small_plan

FOR_EVER_S = 20.0
"""What waits here would else end by itself, so that a limit that does nothing fails the test and hangs nothing."""


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_layer_that_waits_is_interrupted(own_layers):
    plan = plan_from_dict(
        small_plan(
            model={"factory": "waiting_layer:layers", "options": {"seconds": FOR_EVER_S}}, limits={"estimate_timeout_s": 2.0}
        ),
        folder=own_layers,
    )
    began = time.monotonic()
    with pytest.raises(RunError, match=r"estimate-late.*not done after 2 s") as caught:
        rank_bytes(plan, 0, 1)
    assert time.monotonic() - began < FOR_EVER_S / 2
    assert "[limits] estimate_timeout_s" in caught.value.diagnostics[0].hint


def test_what_is_done_in_time_is_left_alone():
    with limited(0.05):
        pass
    time.sleep(0.1)


def test_a_timer_that_is_due_before_stays():
    """Somebody else's limit on all of this."""

    def due(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, due)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(TimeoutError), limited(FOR_EVER_S):
            threading.Event().wait(FOR_EVER_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_timer_that_is_due_later_goes_on_behind_the_block():
    came = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda number, frame: came.set())
    signal.setitimer(signal.ITIMER_REAL, 0.4)
    try:
        with pytest.raises(RunError, match="estimate-late"), limited(0.1):
            threading.Event().wait(FOR_EVER_S)
        assert came.wait(FOR_EVER_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_thread_has_no_limit():
    found = []

    def work():
        with limited(0.05):
            time.sleep(0.2)
            found.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(FOR_EVER_S)
    assert found == ["done"]
