"""Reads a stream epoch after epoch from any position. Digests of samples detect data that differ from the checkpoint's run."""

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
from sley_core.errors import PlanError, RunError, format_cause, note_origin
from sley_core.model.tensors import flat_bytes


def digest_of(samples: Iterable[Any]) -> str:
    """Returns a digest of the names, dtypes, shapes and values of all tensors in `samples`."""
    digest = SamplesDigest()
    for sample in samples:
        digest.add(sample)
    return digest.text


class SamplesDigest:
    """Computes the digest of a sequence of samples."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, value: Any) -> None:
        """Adds a sample, or a value of a sample. Only the type of values other than tensors, numbers and text is included."""
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
    """Returns the bytes of a tensor of any dtype and device. Does not copy a contiguous CPU tensor."""
    return flat_bytes(value.cpu()).numpy().data


def probe_digest(count: int, read: Callable[[int], Any]) -> str | None:
    """Returns a digest of three of `count` samples and of `count`; None if two reads differ. read: returns a sample by
    index.
    """
    try:
        indices = (0, count // 2, count - 1)
        first, second = (digest_of(map(read, indices)) for _ in range(2))
    except Exception:
        return None
    return f"{count}:{first}" if first == second else None


ReadSample: TypeAlias = Callable[[int, Callable[[], Sample]], Sample]

STATE_METHODS = (("state", "restore"), ("state_dict", "load_state_dict"))
INEXACT = (
    "the data stream cannot return to its saved position, for example because of a shuffle buffer; "
    "{count} samples were read again from its start"
)
CHANGED = (
    "the data stream yields different samples than before the checkpoint: "
    "its data have changed, or its order is random at each start"
)


class StreamReader:
    """Reads the samples of a stream without end.

    A position is `{"epoch": the number of completed epochs, "stream": the stream's state}`, without "stream" if the stream has
    no state. read_sample: a function that is called with the number of each sample, over all epochs, and a function that reads
    the sample; returns the sample.
    """

    def __init__(self, stream: Stream, read_sample: ReadSample = lambda _, read: read()) -> None:
        self._read_sample = read_sample
        self._stream = stream
        self._methods = next((names for names in STATE_METHODS if all(hasattr(stream, name) for name in names)), None)
        self._epoch = 0
        self._start = self.position()

    def position(self) -> dict[str, Any]:
        state = {} if self._methods is None else {"stream": deepcopy(getattr(self._stream, self._methods[0])())}
        return {"epoch": self._epoch, **state}

    def read(self, state: Mapping[str, Any], add_note: Callable[[str], None]) -> Iterator[Sample]:
        """Returns the samples after the first `state["samples"]`.

        state: may have `replay`, which describes the last batch: the number of "samples" and the position ("place") before it,
        and its "digest". The batch is then read again. If it differs, or if the stream has no state, the stream is read from
        its start.
        add_note: a function that receives messages for the user.
        """
        done, replay = state["samples"], state.get("replay")
        batch_start = replay["samples"] if replay else done
        if replay and "stream" in replay["place"] and self._methods is not None:
            samples = self._read_samples_after(replay["place"], batch_start)
            if digest_of(islice(samples, done - batch_start)) == replay["digest"]:
                return samples
            add_note(INEXACT.format(count=done))
        samples = self._read_samples_after(self._start, 0)
        for _ in islice(samples, batch_start):
            pass
        if replay and digest_of(islice(samples, done - batch_start)) != replay["digest"]:
            add_note(CHANGED)
        return samples

    def _read_samples_after(self, position: Mapping[str, Any], start: int) -> Iterator[Sample]:
        """Moves the stream to `position` and returns the samples after it. start: the number of the first sample."""
        self._epoch = position["epoch"]
        if self._methods is not None:
            getattr(self._stream, self._methods[1])(deepcopy(position["stream"]))
        samples = self._repeat_epochs(is_resumed=self._methods is not None)
        return (self._read_sample(number, partial(next, samples)) for number in count(start))

    def _repeat_epochs(self, *, is_resumed: bool) -> Iterator[Sample]:
        """Yields the samples of all epochs. Raises PlanError "data-empty" for an empty epoch, except the first epoch of a
        resumed stream, whose state may be just before the end.
        """
        while True:
            set_epoch(self._stream, self._epoch)
            is_empty = True
            for sample in self._read_epoch():
                is_empty = False
                yield sample
            if is_empty and not is_resumed:
                raise PlanError("data-empty", "the stream ended without a sample", path=("data",))
            is_resumed = False
            self._epoch += 1

    def _read_epoch(self) -> Iterator[Sample]:
        """Yields the samples of one epoch. Adds the origin to errors of the stream; converts SystemExit to RunError."""
        try:
            yield from self._stream
        except SystemExit as error:  # would end this process without a message
            raise RunError("data-sample", f"the stream failed: {format_cause(error)}") from error
        except Exception as error:
            note_origin(error, "the stream of the dataset", self._stream)
            raise


def set_epoch(dataset: Any, epoch: int) -> None:
    """Calls the dataset's `set_epoch`, if it has one, with the number of the next epoch, counted from 0."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
