"""A wire that is late: what is hidden of a latency that holds no core.

Every reduction is done `LATENCY_S` after it really is, and one reduction at a time, as on a wire that only waits. Each form
is timed with the latency and without it, so that only what was injected counts: what the reduction itself costs, and what of
that is hidden, is in both.
"""

import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from protocol import RESAMPLES, Step, interleave

LATENCY_S = 0.050
FORMS = ("overlapped", "overlapped, late", "blocking", "blocking, late")
Seconds = Mapping[str, Sequence[float]]


class Wire:
    """Makes `start`, which returns something to wait for, late or blocking or both."""

    def __init__(self) -> None:
        self._under_way: queue.SimpleQueue[tuple[Any, threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def form(self, start: Callable[..., Any], name: str) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            pending = start(*args, **kwargs)
            if name.endswith("late"):
                pending = _Late(pending, self._after(pending))
            if name.startswith("blocking"):
                pending.wait()
            return pending

        return started

    def _after(self, pending: Any) -> threading.Event:
        is_done = threading.Event()
        self._under_way.put((pending, is_done))
        return is_done

    def _run(self) -> None:
        while True:
            pending, is_done = self._under_way.get()
            pending.wait()
            time.sleep(LATENCY_S)
            is_done.set()


class _Late:
    """A `Work` that is complete later than `pending`."""

    def __init__(self, pending: Any, is_done: threading.Event) -> None:
        self._pending = pending
        self._is_done = is_done

    def is_completed(self) -> bool:
        return self._is_done.is_set()

    def wait(self) -> None:
        self._is_done.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)


def time_forms(step: Callable[[str], object], rounds: int, barrier: Step) -> dict[str, list[float]]:
    """Returns the seconds of `step(form)` by form, in a shuffled order in each round, with `barrier` before each step."""
    return interleave({form: partial(step, form) for form in FORMS}, rounds, warmup=0, barrier=barrier)


def hidden(seconds: Seconds, num_exchanges: int, *, latency_s: float = LATENCY_S, num_visible: int = 1) -> dict[str, object]:
    """The share of the injected latency that is hidden, with its 95 % bootstrap interval; milliseconds are medians.

    num_visible: exchanges beside which nothing is computed, so that they cannot be hidden.
    """
    chance = random.Random(0)
    rounds = range(len(seconds[FORMS[0]]))
    injected = latency_s * num_exchanges
    picks = [[chance.choice(rounds) for _ in rounds] for _ in range(RESAMPLES)]
    shares = sorted(_share(seconds, pick, injected) for pick in picks)
    visible = sorted(_visible(seconds, pick) for pick in picks)
    return {
        **{f"{name}, ms": round(1e3 * statistics.median(values), 1) for name, values in seconds.items()},
        "exchanges": num_exchanges,
        "injected, ms": round(1e3 * injected, 1),
        "hidden": round(_share(seconds, list(rounds), injected), 3),
        "interval": [round(shares[int(part * RESAMPLES)], 3) for part in (0.025, 0.975)],
        "visible, ms": round(1e3 * _visible(seconds, list(rounds)), 1),
        "visible, interval": [round(1e3 * visible[int(part * RESAMPLES)], 1) for part in (0.025, 0.975)],
        "1 - visible / injected": round(1 - _visible(seconds, list(rounds)) / injected, 3),
        "at most": round(1 - num_visible / num_exchanges, 3),
    }


def _share(seconds: Seconds, picks: Sequence[int], injected: float) -> float:
    """(what latency adds where every reduction is awaited at once - what it adds overlapped) / injected."""
    return (_added(seconds, "blocking", picks) - _visible(seconds, picks)) / injected


def _visible(seconds: Seconds, picks: Sequence[int]) -> float:
    return _added(seconds, "overlapped", picks)


def _added(seconds: Seconds, form: str, picks: Sequence[int]) -> float:
    """Seconds by which `form` is longer when it is late."""
    late, plain = (statistics.median(seconds[name][pick] for pick in picks) for name in (f"{form}, late", form))
    return late - plain
