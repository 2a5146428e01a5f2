"""Keeps masters and optimizer states on the host, where the optimizer steps them: the device has weights and gradients.

    gradients to the host   0 | 1 | 2 | ...
    optimizer on the host       0 | 1 | 2 | ...
    weights to the device           0 | 1 | 2 | ...        the next forward waits for the last one

As ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840) without its one-step delay: the norm, the clipping and the vote whether
a step is taken come first, so the numbers are those of a step on the device with the same kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, cycle
from typing import NamedTuple

import torch
from torch import Tensor

from sley_core.api.comm import CopyEvent, HostMemory
from sley_core.api.memory import MemoryInventory, Moved, OffloadManager, Part, Stepped, Where
from sley_core.api.parts import ALIGNMENT_BYTES, Parts, round_up
from sley_memory.config import HostOptimizerConfig
from sley_memory.movers import MB, Streams, by_bytes

RING = 2  # buckets whose gradients are on the host at once: one is stepped while the next arrives


class SteppedBucket(NamedTuple):
    """Parameters that are stepped together. landed: host memory for each gradient; rounded: for each weight in the format of
    the device. Both are used by every second bucket.
    """

    stepped: Sequence[Stepped]
    landed: Sequence[Tensor]
    rounded: list[Tensor]


class Copies(NamedTuple):
    """Copies of one bucket, one way: their end, when they began, and their bytes."""

    end: CopyEvent
    began: float
    num_bytes: int


class HostOptimizer(OffloadManager):
    """Steps the optimizer on the host, bucket by bucket, and moves gradients there and weights back."""

    def __init__(self, config: HostOptimizerConfig) -> None:
        self.config = config
        self._moved: dict[Part, Moved] = {part: Moved() for part in config.moves}
        self._buckets: list[SteppedBucket] = []
        self._ring: list[HostMemory] = []
        self._sent: dict[int, Copies] = {}

    @property
    def parts(self) -> Sequence[Part]:
        return self.config.moves

    def attach(self, parts: Parts, inventory: MemoryInventory) -> None:
        """Takes the run's gradient store and two copy streams of its device, and registers itself for the update."""
        self._store = parts.store
        self._device = parts.world.device
        self._streams = Streams(self._device.copy_stream)
        parts.events.step_in_buckets = self._step

    def offload(self, part: Part) -> Callable[[], None]:
        """Only counts the call: they are on the host."""
        self._moved[part].num_no_ops += 1
        return lambda: None

    def onload(self, part: Part) -> Callable[[], None]:
        """Only counts the call: they stay on the host."""
        return self.offload(part)

    def require(self, part: Part, what: str) -> None: ...

    def where(self, part: Part) -> Where:
        return Where.AWAY

    def moved(self, part: Part) -> Moved:
        return self._moved[part]

    def detach(self) -> None:
        self._streams.wait()  # of a step that failed; host memory goes with this object

    def _step(self, stepped: Sequence[Stepped]) -> Iterator[Sequence[Stepped]]:
        """Yields each bucket when its gradients are on the host, to be stepped there, and sends its weights to the device
        afterwards; waits for those copies at the end.
        """
        self._plan(stepped)
        streams = self._streams
        streams.out.follow()  # gradients are clipped
        streams.into.follow()  # the backward has read the weights
        arriving = [self._fetch(at) for at in range(min(RING, len(self._buckets)))]
        try:
            for at, bucket in enumerate(self._buckets):
                arriving[at].end.wait()
                if self._device.is_async:
                    self._arrived(arriving[at])
                for param, landed in zip(bucket.stepped, bucket.landed, strict=True):
                    param.parameter.grad = landed.to(param.parameter.dtype) if param.param in self._store else None
                yield bucket.stepped
                for param, landed in zip(bucket.stepped, bucket.landed, strict=True):
                    if landed.dtype != param.parameter.dtype:  # a copy: the host has those of one bucket at a time
                        param.parameter.grad = None
                self._send(at)
                if at + RING < len(self._buckets):
                    arriving.append(self._fetch(at + RING))
        except BaseException:  # an optimizer that fails leaves the buckets before stepped
            streams.wait()  # the next step may write gradients, or have other buckets
            self._sent.clear()
            raise
        streams.into.record().hold_device()
        for sent in self._sent.values():
            sent.end.wait()
            if self._device.is_async:
                self._returned(sent)
        self._sent.clear()

    def _fetch(self, at: int) -> Copies:
        """Starts to copy a bucket's gradients to the host."""
        began, num_bytes = time.perf_counter(), 0
        for param, landed in zip(self._buckets[at].stepped, self._buckets[at].landed, strict=True):
            if param.param in self._store:
                gradient = self._store.part(param.param)
                self._streams.out.copy(landed, gradient)
                num_bytes += gradient.nbytes
        self._moved["optimizer_states"].copied_out += num_bytes
        fetched = Copies(self._streams.out.record(), began, num_bytes)
        if not self._device.is_async:  # they are done
            self._arrived(fetched)
        return fetched

    def _send(self, at: int) -> None:
        """Rounds the weights of bucket number `at` to the device's format on the host, and starts to copy them there."""
        bucket, _, weights = self._buckets[at]
        masters = [param.parameter.detach() for param in bucket]
        if bucket[0].original.dtype == masters[0].dtype and not self._device.is_async:
            weights = masters
        else:
            if at % RING in self._sent:
                self._sent[at % RING].end.wait()
                if self._device.is_async:
                    self._returned(self._sent[at % RING])
            torch._foreach_copy_(weights, masters)
        began = time.perf_counter()
        for param, value in zip(bucket, weights, strict=True):
            self._streams.into.copy(param.working, value)
        num_bytes = sum(value.nbytes for value in weights)
        self._moved["masters"].copied_in += num_bytes
        sent = self._sent[at % RING] = Copies(self._streams.into.record(), began, num_bytes)
        if not self._device.is_async:
            self._returned(sent)

    def _arrived(self, fetched: Copies) -> None:
        """Notes how long gradients took, as far as the host sees it."""
        self._moved["optimizer_states"].seconds_out += time.perf_counter() - fetched.began
        self._moved["optimizer_states"].timed_out += fetched.num_bytes

    def _returned(self, sent: Copies) -> None:
        """Notes how long weights took, as far as the host sees it."""
        self._moved["masters"].seconds_in += time.perf_counter() - sent.began
        self._moved["masters"].timed_in += sent.num_bytes

    def _plan(self, stepped: Sequence[Stepped]) -> None:
        """Makes buckets, and host memory for two of them, in the first step and where weights were unfrozen since."""
        if sum(len(bucket.stepped) for bucket in self._buckets) == len(stepped):
            return
        buckets, wide = by_bytes(stepped, int(self.config.bucket_mb * MB)), self._store.dtype
        num_wide = max((_offsets(bucket, wide)[-1] for bucket in buckets), default=0)
        num_narrow = max((_offsets(bucket, bucket[0].original.dtype)[-1] for bucket in buckets), default=0)
        self._ring = [self._device.host_memory(size) for size in (num_wide, num_narrow) * RING]
        self._moved["optimizer_states"].host_bytes = sum(memory.num_bytes for memory in self._ring)
        self._buckets = [
            SteppedBucket(bucket, _views(gradients.data, bucket, wide), _views(weights.data, bucket, bucket[0].original.dtype))
            for bucket, gradients, weights in zip(buckets, cycle(self._ring[::2]), cycle(self._ring[1::2]), strict=False)
        ]


def _offsets(bucket: Sequence[Stepped], dtype: torch.dtype) -> list[int]:
    """Returns where each weight of a bucket starts in memory for all of them in `dtype`, aligned to 256 bytes, and its size."""
    sizes = (round_up(param.parameter.numel() * dtype.itemsize, ALIGNMENT_BYTES) for param in bucket)
    return list(accumulate(sizes, initial=0))


def _views(memory: Tensor, bucket: Sequence[Stepped], dtype: torch.dtype) -> list[Tensor]:
    """Returns one view of `memory`, uint8 [bytes], for each weight of `bucket`: its shape, in `dtype`."""
    shapes = [param.parameter.shape for param in bucket]
    return [
        memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for start, shape in zip(_offsets(bucket, dtype), shapes, strict=False)
    ]
