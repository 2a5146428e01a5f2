"""Keeps master weights and optimizer states on the host, where the optimizer updates them. Weights and gradients stay on the
device.

    gradients to the host   0 | 1 | 2 | ...
    optimizer on the host       0 | 1 | 2 | ...
    weights to the device           0 | 1 | 2 | ...        the next forward waits for the last one

This is ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840) without its one-step delay. The norm, the clipping and the decision to
take the step come first, so the results equal those of a step on the device with the same kernels.
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
from sley_memory.movers import MB, Streams, split_by_bytes
from sley_memory.plugin import HostOptimizerConfig

RING = 2  # buckets with gradients on the host: one is updated while the next is copied


class SteppedBucket(NamedTuple):
    """Parameters that are updated together. gradients, weights: host memory for the gradients, and for the weights in the
    device's dtype. Every second bucket uses the same memory.
    """

    stepped: Sequence[Stepped]
    gradients: Sequence[Tensor]
    weights: list[Tensor]


class BucketCopies(NamedTuple):
    """The copies of one bucket in one direction: the event at their end, their start time, and their bytes."""

    end: CopyEvent
    start_s: float
    num_bytes: int


class HostOptimizer(OffloadManager):
    """Steps the optimizer on the host, bucket by bucket, and moves gradients there and weights back."""

    def __init__(self, config: HostOptimizerConfig) -> None:
        self.config = config
        self._moved: dict[Part, Moved] = {part: Moved() for part in config.moves}
        self._buckets: list[SteppedBucket] = []
        self._ring: list[HostMemory] = []
        self._sent: dict[int, BucketCopies] = {}

    @property
    def parts(self) -> Sequence[Part]:
        return self.config.moves

    def attach(self, parts: Parts, inventory: MemoryInventory) -> None:
        """Creates the copy streams, and registers the bucket step with the run."""
        self._store = parts.store
        self._device = parts.world.device
        self._streams = Streams(self._device.copy_stream)
        parts.events.step_in_buckets = self._step

    def offload(self, part: Part) -> Callable[[], None]:
        """Does nothing: the part is always on the host."""
        return lambda: None

    def onload(self, part: Part) -> Callable[[], None]:
        """Does nothing: the part stays on the host."""
        return self.offload(part)

    def require(self, part: Part, caller: str) -> None: ...

    def where(self, part: Part) -> Where:
        return Where.AWAY

    def moved(self, part: Part) -> Moved:
        return self._moved[part]

    def detach(self) -> None:
        self._streams.wait()  # for copies of a failed step; host memory is freed with this object

    def _step(self, stepped: Sequence[Stepped]) -> Iterator[Sequence[Stepped]]:
        """Yields each bucket once its gradients are on the host, then copies its stepped weights to the device. Waits for all
        copies at the end.
        """
        self._build_buckets(stepped)
        streams = self._streams
        streams.out.wait_for_device()  # gradients are clipped
        streams.into.wait_for_device()  # the backward has read the weights
        fetches = [self._fetch(index) for index in range(min(RING, len(self._buckets)))]
        try:
            for index, bucket in enumerate(self._buckets):
                self._finish_fetch(fetches[index])
                for param, host_gradient in zip(bucket.stepped, bucket.gradients, strict=True):
                    param.parameter.grad = host_gradient.to(param.parameter.dtype) if param.param in self._store else None
                yield bucket.stepped
                for param, host_gradient in zip(bucket.stepped, bucket.gradients, strict=True):
                    if host_gradient.dtype != param.parameter.dtype:  # a converted copy: only one bucket has copies at a time
                        param.parameter.grad = None
                self._send(index)
                if index + RING < len(self._buckets):
                    fetches.append(self._fetch(index + RING))
        except BaseException:  # if the optimizer fails, earlier buckets stay stepped
            streams.wait()  # the next step may write gradients, or have other buckets
            self._sent.clear()
            raise
        streams.into.record().hold_device()
        for sent in self._sent.values():
            self._finish_send(sent)
        self._sent.clear()

    def _fetch(self, index: int) -> BucketCopies:
        """Starts to copy the gradients of bucket `index` to the host."""
        start_s, num_bytes = time.perf_counter(), 0
        for param, host_gradient in zip(self._buckets[index].stepped, self._buckets[index].gradients, strict=True):
            if param.param in self._store:
                gradient = self._store.part(param.param)
                self._streams.out.copy(host_gradient, gradient)
                num_bytes += gradient.nbytes
        self._moved["optimizer_states"].copied_out += num_bytes
        return BucketCopies(self._streams.out.record(), start_s, num_bytes)

    def _send(self, index: int) -> None:
        """Casts the weights of bucket `index` to the device's dtype on the host, and starts their copies to the device."""
        bucket, _, weights = self._buckets[index]
        masters = [param.parameter.detach() for param in bucket]
        if index % RING in self._sent:
            self._finish_send(self._sent[index % RING])
        if bucket[0].original.dtype == masters[0].dtype and not self._device.is_async:
            weights = masters
        else:
            torch._foreach_copy_(weights, masters)
        start_s = time.perf_counter()
        for param, value in zip(bucket, weights, strict=True):
            self._streams.into.copy(param.working, value)
        num_bytes = sum(value.nbytes for value in weights)
        self._moved["masters"].copied_in += num_bytes
        self._sent[index % RING] = BucketCopies(self._streams.into.record(), start_s, num_bytes)

    def _finish_fetch(self, copies: BucketCopies) -> None:
        """Waits for gradient copies, and counts their seconds and bytes, as measured on the host."""
        copies.end.wait()
        self._moved["optimizer_states"].seconds_out += time.perf_counter() - copies.start_s
        self._moved["optimizer_states"].timed_out += copies.num_bytes

    def _finish_send(self, copies: BucketCopies) -> None:
        """Waits for weight copies, and counts their seconds and bytes, as measured on the host."""
        copies.end.wait()
        self._moved["masters"].seconds_in += time.perf_counter() - copies.start_s
        self._moved["masters"].timed_in += copies.num_bytes

    def _build_buckets(self, stepped: Sequence[Stepped]) -> None:
        """Builds the buckets and host memory for two of them, in the first step and after weights were unfrozen."""
        if sum(len(bucket.stepped) for bucket in self._buckets) == len(stepped):
            return
        buckets, wide = split_by_bytes(stepped, int(self.config.bucket_mb * MB)), self._store.dtype
        wide_size = max((_offsets(bucket, wide)[-1] for bucket in buckets), default=0)
        narrow_size = max((_offsets(bucket, bucket[0].original.dtype)[-1] for bucket in buckets), default=0)
        self._ring = [self._device.host_memory(size) for size in (wide_size, narrow_size) * RING]
        self._moved["optimizer_states"].host_bytes = sum(memory.num_bytes for memory in self._ring)
        self._buckets = [
            SteppedBucket(bucket, _views(gradients.data, bucket, wide), _views(weights.data, bucket, bucket[0].original.dtype))
            for bucket, gradients, weights in zip(buckets, cycle(self._ring[::2]), cycle(self._ring[1::2]), strict=False)
        ]


def _offsets(bucket: Sequence[Stepped], dtype: torch.dtype) -> list[int]:
    """Returns the byte offsets of a bucket's weights in one buffer of `dtype`, aligned to 256 bytes, and the buffer's size."""
    sizes = (round_up(param.parameter.numel() * dtype.itemsize, ALIGNMENT_BYTES) for param in bucket)
    return list(accumulate(sizes, initial=0))


def _views(memory: Tensor, bucket: Sequence[Stepped], dtype: torch.dtype) -> list[Tensor]:
    """Returns a view of `memory`, uint8 [bytes], with dtype `dtype` and the weight's shape for each weight of `bucket`."""
    shapes = [param.parameter.shape for param in bucket]
    return [
        memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for start, shape in zip(_offsets(bucket, dtype), shapes, strict=False)
    ]
