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
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, cycle
from typing import NamedTuple

import torch
from torch import Tensor

from sley_core.api.comm import HostMemory
from sley_core.api.memory import Moved, Part, Stepped, Where
from sley_core.api.parts import ALIGNMENT_BYTES, Parts, round_up
from sley_memory.movers import Mover, Streams, TimedCopies, split_by_bytes

RING = 2  # buckets with gradients on the host: one is updated while the next is copied


class SteppedBucket(NamedTuple):
    """Parameters that are updated together. gradients, weights: host memory for the gradients, and for the weights in the
    device's dtype. Every second bucket uses the same memory.
    """

    stepped: Sequence[Stepped]
    gradients: Sequence[Tensor]
    weights: list[Tensor]


class HostOptimizer(Mover):
    """Steps the optimizer on the host, bucket by bucket, and moves gradients there and weights back.

    The master weights and optimizer states are always on the host. counters: the counters of both parts.
    """

    comes_back = True

    def __init__(self, parts: Parts, streams: Streams, bucket_bytes: int, counters: Mapping[Part, Moved]) -> None:
        super().__init__(counters["masters"])
        self._where = Where.AWAY
        self._gradients_moved = counters["optimizer_states"]
        self._store = parts.store
        self._device = parts.world.device
        self._streams = streams
        self._bucket_bytes = bucket_bytes
        self._buckets: list[SteppedBucket] = []
        self._ring: list[HostMemory] = []
        self._sent: dict[int, TimedCopies] = {}
        parts.events.step_in_buckets = self._step

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
                fetches[index].finish(self._gradients_moved, is_out=True)
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
            sent.finish(self._moved, is_out=False)
        self._sent.clear()

    def _fetch(self, index: int) -> TimedCopies:
        """Starts to copy the gradients of bucket `index` to the host."""
        start_s, num_bytes = time.perf_counter(), 0
        for param, host_gradient in zip(self._buckets[index].stepped, self._buckets[index].gradients, strict=True):
            if param.param in self._store:
                gradient = self._store.part(param.param)
                self._streams.out.copy(host_gradient, gradient)
                num_bytes += gradient.nbytes
        self._gradients_moved.copied_out += num_bytes
        return TimedCopies(self._streams.out.record(), start_s, num_bytes)

    def _send(self, index: int) -> None:
        """Casts the weights of bucket `index` to the device's dtype on the host, and starts their copies to the device."""
        bucket, _, weights = self._buckets[index]
        masters = [param.parameter.detach() for param in bucket]
        if index % RING in self._sent:
            self._sent[index % RING].finish(self._moved, is_out=False)
        if bucket[0].original.dtype == masters[0].dtype and not self._device.is_async:
            weights = masters
        else:
            torch._foreach_copy_(weights, masters)
        start_s = time.perf_counter()
        for param, value in zip(bucket, weights, strict=True):
            self._streams.into.copy(param.working, value)
        num_bytes = sum(value.nbytes for value in weights)
        self._moved.copied_in += num_bytes
        self._sent[index % RING] = TimedCopies(self._streams.into.record(), start_s, num_bytes)

    def _build_buckets(self, stepped: Sequence[Stepped]) -> None:
        """Builds the buckets and host memory for two of them, in the first step and after weights were unfrozen."""
        if sum(len(bucket.stepped) for bucket in self._buckets) == len(stepped):
            return
        buckets, wide = split_by_bytes(stepped, self._bucket_bytes), self._store.dtype
        wide_size = max((_offsets(bucket, wide)[-1] for bucket in buckets), default=0)
        narrow_size = max((_offsets(bucket, bucket[0].original.dtype)[-1] for bucket in buckets), default=0)
        self._ring = [self._device.host_memory(size) for size in (wide_size, narrow_size) * RING]
        self._gradients_moved.host_bytes = sum(memory.num_bytes for memory in self._ring)
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
