"""Reads a stream epoch after epoch, from any position, with the stream's own state if it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import count, islice
from typing import Any, TypeAlias

from sley_core.data.dataset import Sample, Stream
from sley_core.errors import PlanError, RunError, note_origin
from sley_core.plan.factory import cause

Read: TypeAlias = Callable[[int, Callable[[], Sample]], Sample]

STATE_NAMES = (("state", "restore"), ("state_dict", "load_state_dict"))
STREAM = "stream"
"""Key of the stream's state in the state of a feed."""


def stream_state(stream: Stream) -> dict[str, Any]:
    """Returns `{"stream": a copy of the stream's own state}`, or `{}` if it has none."""
    names = _state_names(stream)
    return {} if names is None else {STREAM: deepcopy(getattr(stream, names[0])())}


def walk(
    stream: Stream, state: Mapping[str, Any], beginning: Mapping[str, Any], read: Read = lambda _, take: take()
) -> Iterator[Sample]:
    """Yields the samples after the first `state["samples"]`, endlessly: after an epoch ends the next one starts.

    A stream with a state of its own is restored to its position. Any other is read from its beginning up to that
    position. beginning: what `stream_state` returned before the stream was first read. read: called with each sample's
    number, from 0 over all epochs, and a function that takes it from the stream; returns it.
    """
    names = _state_names(stream)
    if names is not None:
        getattr(stream, names[1])(deepcopy(state.get(STREAM, beginning[STREAM])))
    num_behind = 0 if STREAM in state else state["samples"]
    samples = _endless(stream, resumed=names is not None)
    numbers = count(state["samples"] - num_behind)
    return islice((read(number, partial(next, samples)) for number in numbers), num_behind, None)


def _endless(stream: Stream, *, resumed: bool) -> Iterator[Sample]:
    """Yields the samples of epoch after epoch; raises PlanError "data-empty" for an empty epoch.

    Only the first epoch of a resumed stream may be empty: its state may lie just before its end.
    """
    while True:
        empty = True
        for sample in _samples(stream):
            empty = False
            yield sample
        if empty and not resumed:
            raise PlanError("data-empty", "the stream ended without a sample", path=("data",))
        resumed = False


def _samples(stream: Stream) -> Iterator[Sample]:
    """Yields one epoch; an error of the stream gets a note of its origin, SystemExit becomes RunError."""
    try:
        yield from stream
    except SystemExit as error:  # would end this process without a message
        raise RunError("data-sample", f"the stream failed: {cause(error)}") from error
    except Exception as error:
        note_origin(error, "the stream of the data set", stream)
        raise


def _state_names(stream: Stream) -> tuple[str, str] | None:
    return next((names for names in STATE_NAMES if all(hasattr(stream, name) for name in names)), None)
