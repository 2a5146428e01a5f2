"""Keeps master weights and optimizer states on the host, where the optimizer updates them. Weights and gradients stay on the
device.

    gradients to the host   0 | 1 | 2 | ...
    optimizer on the host       0 | 1 | 2 | ...
    weights to the device           0 | 1 | 2 | ...        the next forward waits for the last one

This is ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840) without its one-step delay. The norm, the clipping and the decision to
take the step come first, so the results equal those of a step on the device with the same kernels.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from sley_core.api.comm import HostMemory
from sley_core.api.memory import Moved, OptimizerParam, Part, Where
from sley_core.api.parts import ALIGNMENT_BYTES, FlatLayout, Parts
from sley_memory.movers import Mover, Streams, TimedCopies, split_by_bytes

NUM_HOST_BUCKETS = 2
"""The number of buckets for which the host has memory: one is updated while the next is copied."""


class OptimizerBucket(NamedTuple):
    """Parameters that are updated together, with host tensors for their gradients and for weights in the device's dtype."""

    params: Sequence[OptimizerParam]
    gradients: Sequence[Tensor]
    weights: list[Tensor]


class HostOptimizer(Mover):
    """Steps the optimizer on the host, bucket by bucket. Copies gradients to the host and updated weights to the device.

    The master weights and optimizer states are always on the host. counters: the counters of these two parts. All weights must
    have the same dtype.
    """

    is_onloaded_automatically = True

    def __init__(self, parts: Parts, streams: Streams, bucket_bytes: int, counters: Mapping[Part, Moved]) -> None:
        super().__init__(counters["masters"])
        self._where = Where.AWAY
        self._gradient_counters = counters["optimizer_states"]
        self._store = parts.store
        self._device = parts.world.device
        self._streams = streams
        self._bucket_bytes = bucket_bytes
        self._buckets: list[OptimizerBucket] = []
        self._ring: list[HostMemory] = []
        self._sent: dict[int, TimedCopies] = {}
        parts.events.step_in_buckets = self._step

    def _step(self, params: Sequence[OptimizerParam]) -> Iterator[Sequence[OptimizerParam]]:
        """Yields each bucket once its gradients are on the host, and then sends its weights. Finally waits for all copies."""
        self._build_buckets(params)
        streams = self._streams
        streams.to_host.wait_for_device()  # gradients are copied only after they are clipped
        streams.to_device.wait_for_device()  # weights are written only after the backward has read them
        fetches = [self._fetch(index) for index in range(min(NUM_HOST_BUCKETS, len(self._buckets)))]
        try:
            for index, bucket in enumerate(self._buckets):
                fetches[index].finish(self._gradient_counters, to_host=True)
                for param, host_gradient in zip(bucket.params, bucket.gradients, strict=True):
                    param.parameter.grad = host_gradient.to(param.parameter.dtype) if param.param in self._store else None
                yield bucket.params
                for param, host_gradient in zip(bucket.params, bucket.gradients, strict=True):
                    if host_gradient.dtype != param.parameter.dtype:  # frees the converted copy before the next bucket's
                        param.parameter.grad = None
                self._send(index)
                if index + NUM_HOST_BUCKETS < len(self._buckets):
                    fetches.append(self._fetch(index + NUM_HOST_BUCKETS))
        except BaseException:  # if the optimizer fails, earlier buckets stay updated
            streams.wait()  # the next step may write gradients, or have other buckets
            self._sent.clear()
            raise
        streams.to_device.record().hold_device()
        for sent in self._sent.values():
            sent.finish(self._counters, to_host=False)
        self._sent.clear()

    def _fetch(self, index: int) -> TimedCopies:
        """Starts to copy the gradients of bucket `index` to the host."""
        start_s, num_bytes = time.perf_counter(), 0
        for param, host_gradient in zip(self._buckets[index].params, self._buckets[index].gradients, strict=True):
            if param.param in self._store:
                gradient = self._store.part(param.param)
                self._streams.to_host.copy(host_gradient, gradient)
                num_bytes += gradient.nbytes
        self._gradient_counters.copied_out += num_bytes
        return TimedCopies(self._streams.to_host.record(), start_s, num_bytes)

    def _send(self, index: int) -> None:
        """Casts the weights of bucket `index` on the host to their dtype on the device, and starts to copy them there."""
        bucket, _, weights = self._buckets[index]
        masters = [param.parameter.detach() for param in bucket]
        if index % NUM_HOST_BUCKETS in self._sent:
            self._sent[index % NUM_HOST_BUCKETS].finish(self._counters, to_host=False)
        if bucket[0].original.dtype == masters[0].dtype and not self._device.is_async:
            weights = masters
        else:
            torch._foreach_copy_(weights, masters)
        start_s = time.perf_counter()
        for param, value in zip(bucket, weights, strict=True):
            self._streams.to_device.copy(param.working, value)
        num_bytes = sum(value.nbytes for value in weights)
        self._counters.copied_in += num_bytes
        self._sent[index % NUM_HOST_BUCKETS] = TimedCopies(self._streams.to_device.record(), start_s, num_bytes)

    def _build_buckets(self, params: Sequence[OptimizerParam]) -> None:
        """Builds the buckets and their host memory, in the first step and when the number of weights has changed."""
        if sum(len(bucket.params) for bucket in self._buckets) == len(params):
            return
        buckets = split_by_bytes(params, self._bucket_bytes)
        self._ring.clear()
        gradients = self._allocate_views(buckets, self._store.dtype)
        weights = self._allocate_views(buckets, params[0].original.dtype)
        self._gradient_counters.host_bytes = sum(memory.num_bytes for memory in self._ring)
        self._buckets = [OptimizerBucket(*fields) for fields in zip(buckets, gradients, weights, strict=True)]

    def _allocate_views(self, buckets: Sequence[Sequence[OptimizerParam]], dtype: torch.dtype) -> list[list[Tensor]]:
        """Returns host tensors of `dtype` in the shapes of each bucket's weights. Every second bucket uses the same memory."""
        alignment = ALIGNMENT_BYTES // dtype.itemsize
        layouts = [FlatLayout([param.parameter.shape for param in bucket], alignment) for bucket in buckets]
        num_bytes = max(layout.numel for layout in layouts) * dtype.itemsize
        ring = [self._device.host_memory(num_bytes) for _ in range(NUM_HOST_BUCKETS)]
        self._ring += ring
        flats = cycle([memory.data.view(dtype) for memory in ring])
        return [layout.views(flat[: layout.numel]) for layout, flat in zip(layouts, flats, strict=False)]
