"""Walking a stream: epoch after epoch, from any place, with the stream's own state where it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any

from sley_core.data.dataset import Sample, Stream
from sley_core.errors import PlanError

STATE_NAMES = (("state", "restore"), ("state_dict", "load_state_dict"))


def walk(stream: Stream, state: Mapping[str, Any]) -> Iterator[Sample]:
    """The samples after the first `state["samples"]`, without end: an epoch that ends is followed by the next.

    A stream with a state of its own is put back where it was; any other is walked from its beginning to that place.
    """
    names = _state_names(stream)
    if names is None or "stream" not in state:
        return islice(_endless(stream, resumed=False), state["samples"], None)
    getattr(stream, names[1])(deepcopy(state["stream"]))
    return _endless(stream, resumed=True)


def _endless(stream: Stream, *, resumed: bool) -> Iterator[Sample]:
    """Epochs of `stream`. Only a resumed one may be empty: it was left just before it noticed its end."""
    while True:
        empty = True
        for sample in stream:
            empty = False
            yield sample
        if empty and not resumed:
            raise PlanError("data-empty", "the stream ended without a sample", path=("data",))
        resumed = False


def own_state(stream: Stream) -> Callable[[], dict[str, Any]]:
    """A function that gives `{"stream": a copy of the stream's state}`, or `{}` where it has none."""
    names = _state_names(stream)
    if names is None:
        return dict
    get = getattr(stream, names[0])
    return lambda: {"stream": deepcopy(get())}


def _state_names(stream: Stream) -> tuple[str, str] | None:
    return next((names for names in STATE_NAMES if all(hasattr(stream, name) for name in names)), None)
