"""Reads a stream epoch after epoch, from any position, with the stream's own state if that leads back there.

Digests of samples show a resumed run whose data are not those of its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from hashlib import blake2b
from itertools import count, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sley_core.data.dataset import Sample, Stream
from sley_core.errors import PlanError, RunError, cause, note_origin


def digest_of(samples: Iterable[Any]) -> str:
    """Returns a digest of names, dtypes, shapes and values of the tensors in samples."""
    digest = SamplesDigest()
    for sample in samples:
        digest.add(sample)
    return digest.text


class SamplesDigest:
    """Computes a digest of samples as they come."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, value: Any) -> None:
        """Adds a sample, or a value in it; of what is neither tensor, number nor text only the type counts."""
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                self._hash.update(f"{key}=".encode())
                self.add(value[key])
        elif isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
            self._hash.update(f"{value.dtype}{tuple(value.shape)}".encode())
            self._hash.update(byte_view(value))
        else:
            is_plain = isinstance(value, int | float | str | bytes)
            self._hash.update((repr(value) if is_plain else type(value).__qualname__).encode())

    @property
    def text(self) -> str:
        return self._hash.hexdigest()


def byte_view(value: Tensor) -> memoryview:
    """Returns the bytes of a tensor of any dtype and device in order; on the CPU, if it is contiguous, without a copy."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def probe(count: int, read: Callable[[int], Any]) -> str | None:
    """Returns a digest of the number of samples and of three; None if they cannot be read twice alike. read: by index."""
    try:
        places = (0, count // 2, count - 1)
        first, second = (digest_of(map(read, places)) for _ in range(2))
    except Exception:
        return None
    return f"{count}:{first}" if first == second else None


Read: TypeAlias = Callable[[int, Callable[[], Sample]], Sample]

STATE_NAMES = (("state", "restore"), ("state_dict", "load_state_dict"))
INEXACT = (
    "the state of the data stream does not lead back to where it was, as with a shuffle buffer; "
    "the {count} samples before were read again from its beginning"
)
CHANGED = (
    "the data stream gives other samples than those that were read before the checkpoint: "
    "its data have changed, or their order is drawn anew each time"
)


class StreamReader:
    """Iterates over the samples of a stream, endlessly, and knows the place from which the next one comes.

    beginning: the stream's place before it is first read. A place is `{"epoch": epochs before, "stream": the stream's own
    state}`, without "stream" if it has none. take: called with each sample's number, from 0 over all epochs, and a function
    that takes it from the stream; returns it.
    """

    def __init__(self, stream: Stream, take: Read = lambda _, sample: sample()) -> None:
        self._take = take
        self._stream = stream
        self._names = next((names for names in STATE_NAMES if all(hasattr(stream, name) for name in names)), None)
        self._epoch = 0
        self.beginning = self.place()

    def place(self) -> dict[str, Any]:
        own = {} if self._names is None else {"stream": deepcopy(getattr(self._stream, self._names[0])())}
        return {"epoch": self._epoch, **own}

    def read(self, state: Mapping[str, Any], note: Callable[[str], None]) -> Iterator[Sample]:
        """Returns the samples after the first `state["samples"]`: after an epoch ends the next one begins.

        state: may have `replay`: the number of samples before the last batch, their "place" and the "digest" of the batch. The
        batch is then read again. If that gives other samples, the stream is read from its beginning, which any stream without a
        state needs anyway. note: called with what the user has to know about that.
        """
        done, replay = state["samples"], state.get("replay")
        before = replay["samples"] if replay else done
        if replay and "stream" in replay["place"] and self._names is not None:
            samples = self._from(replay["place"], before)
            if digest_of(islice(samples, done - before)) == replay["digest"]:
                return samples
            note(INEXACT.format(count=done))
        samples = self._from(self.beginning, 0)
        for _ in islice(samples, before):
            pass
        if replay and digest_of(islice(samples, done - before)) != replay["digest"]:
            note(CHANGED)
        return samples

    def _from(self, place: Mapping[str, Any], number: int) -> Iterator[Sample]:
        """Moves the stream to a place, and returns the samples from there on. number: of the first one."""
        self._epoch = place["epoch"]
        if self._names is not None:
            getattr(self._stream, self._names[1])(deepcopy(place["stream"]))
        samples = self._endless(resumed=self._names is not None)
        return (self._take(each, partial(next, samples)) for each in count(number))

    def _endless(self, *, resumed: bool) -> Iterator[Sample]:
        """Yields the samples of epoch after epoch; raises PlanError "data-empty" for an empty epoch.

        Only the first epoch of a resumed stream may be empty: its state may lie just before its end.
        """
        while True:
            set_epoch(self._stream, self._epoch)
            empty = True
            for sample in self._samples():
                empty = False
                yield sample
            if empty and not resumed:
                raise PlanError("data-empty", "the stream ended without a sample", path=("data",))
            resumed = False
            self._epoch += 1

    def _samples(self) -> Iterator[Sample]:
        """Yields one epoch; an error of the stream gets a note of its origin, SystemExit becomes RunError."""
        try:
            yield from self._stream
        except SystemExit as error:  # would end this process without a message
            raise RunError("data-sample", f"the stream failed: {cause(error)}") from error
        except Exception as error:
            note_origin(error, "the stream of the data set", self._stream)
            raise


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tells a data set that has `set_epoch`, as those of torch and Hugging Face may, which epoch follows; 0 is the first."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
