"""`dp.bucketed`: sums each bucket of gradients as soon as its last gradient is complete.

A bucket is a slice of the gradient store, so nothing is copied to reduce it and the optimizer reads the result in place.
Buckets are filled in reverse order of use, and after the first step once more, in the order in which that step's backward
actually completed the gradients.

    backward   |---- block 7 ----|---- block 6 ----|---- block 5 ----| ...
    reduction                    |-- bucket 0 --|  |-- bucket 1 --|

The model is PyTorch's DistributedDataParallel (Li et al., 2020, section 3.2); it is tested against `core.each`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sley_core.api.comm import SentBytes, broadcast
from sley_core.api.parts import ALIGNMENT_BYTES, Layout, Sums, round_up, split_by_size
from sley_core.protocols import GradientHandler
from sley_dp.sums import Exact, Narrow

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.api.comm import Group, Groups, Pending
    from sley_core.api.parts import GradientBuffer, Param, Parts, StepState
    from sley_dp.config import BucketedConfig

CHUNK_BYTES = 64 << 20
"""Bytes of first values in flight after which their broadcasts are awaited."""


@dataclass(eq=False)
class Bucket:
    """Holds a buffer of the store, and the number of its gradients that are not complete yet in this step."""

    buffer: GradientBuffer
    missing: int = 0


class Bucketed(GradientHandler):
    """Sums each parameter over its reduce group once per optimizer step, overlapped with the last backward: exactly as
    `core.each` does, or with `reduction = "bf16"` within 2^-7 of that.
    """

    def __init__(self, config: BucketedConfig) -> None:
        self._config = config
        self._sent = SentBytes()
        self.buckets: list[Bucket] = []
        self._order: list[Param] | None = None
        self._restored_order: list[Param] = []
        self._bucket_of: dict[Param, Bucket] = {}
        self._layout = -1
        self._has_finished_a_step = False

    def attach(self, parts: Parts) -> None:
        """Lays the store out in buckets. With `start = "broadcast"` copies the first replica's values, a collective on all
        ranks.
        """
        self._parts = parts
        self._store = parts.store
        self.sums: Sums = Narrow(self._sent)
        if self._config.reduction != "bf16":
            self.sums = parts.store.reduction.sums(parts.store, self._sent) or Exact(self._sent)
        self._store.lay_out(self._plan)
        if self._config.start == "broadcast":
            broadcast_values(parts)

    def begin_step(self, step: StepState) -> None:
        """Resets the counts of missing gradients. Before the second step, lays buckets out again in the order in which
        gradients were complete; a collective of the stage.
        """
        self.sums.forget()
        self._sent.begin_step()
        if self._order is None and self._has_finished_a_step:
            self._order = self._agreed_order()
            self._store.lay_out(self._plan)
        if self._layout != self._store.num_layouts:
            self._layout = self._store.num_layouts
            self.buckets = [Bucket(buffer) for buffer in self._store.buffers]
            self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.buffer.params}
        for bucket in self.buckets:
            bucket.missing = len(bucket.buffer.params)

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """Starts the sum of the bucket of `param` if it is complete now. Called in one order on all ranks of the group."""
        bucket = self._bucket_of.get(param)
        if bucket is None:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            self.sums.start(bucket.buffer, self._parts.groups[bucket.buffer.reduce_group])

    def finish_step(self, step: StepState) -> None:
        """Blocks until every bucket holds its sum."""
        assert_complete(self.buckets)
        self.sums.finish()
        self._sent.end_step()
        self._has_finished_a_step = True

    def trim(self) -> int:
        """Frees, between two steps, what the next sums can allocate again; returns the number of bytes."""
        return self.sums.trim()

    def messages(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of the memory that `trim` would free."""
        return self.sums.messages() if isinstance(self.sums, Narrow) else iter(())

    def counts(self) -> dict[str, float]:
        """Returns the bytes that this rank sent in the last step, for its sums."""
        return self._sent.counts()

    def kept(self) -> dict[str, Tensor]:
        """Returns, for a checkpoint, the order of the buckets, or that in which the first step completed gradients.

        The order decides where buckets lie and in which order norms and sums are added, so the bits depend on it.
        """
        if self._order is None and not self._has_finished_a_step:
            return {}
        name, order = ("seen", self._first_order()) if self._order is None else ("order", self._order)
        return {name: torch.tensor([param.index for param in order])}

    def restore_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Lays buckets out as they were, or will be from the next step on; with an empty mapping, changes nothing."""
        self._has_finished_a_step |= "seen" in kept or "order" in kept
        params = self._parts.registry.params
        if "seen" in kept:
            self._order, self._restored_order = None, [params[index] for index in kept["seen"].tolist()]
        if "order" in kept:
            self._order = [params[index] for index in kept["order"].tolist()]
            self._store.lay_out(self._plan)

    def _first_order(self) -> list[Param]:
        """Returns the order in which the first step completed gradients on this rank."""
        return self._restored_order or self._store.seen_order

    def _plan(self, params: list[Param]) -> Layout:
        """Returns buckets per family, filled in the agreed order; parameters without a place in it come last.

        Drops the old buckets, since the store allocates the new ones next and both should not exist at once.
        """
        self.buckets, self._bucket_of = [], {}
        if self._order is not None:
            place = {param: at for at, param in enumerate(self._order)}
            params = sorted(params, key=lambda param: place.get(param, len(place)))
        families, loose = families_of(params, self._parts.groups)
        buckets = [
            bucket for family in families for bucket in split_by_size(family, self._num_bytes, self._config.bucket_bytes)
        ]
        return Layout(buckets, params, loose)

    def _num_bytes(self, param: Param) -> int:
        """Returns the bytes of `param` in a flat buffer, alignment included."""
        return round_up(param.numel * self._store.dtype.itemsize, ALIGNMENT_BYTES)

    def _agreed_order(self) -> list[Param]:
        """Returns the order in which gradients were complete on the stage's first rank, broadcast to the stage's ranks.

        Parameters without a gradient there come last, frozen ones too. So the order has the same length on all ranks even
        if they have frozen different parameters, which is detected only after this.
        """
        order = self._first_order()
        missing = [param for param in self._parts.registry if param not in set(order)]
        indices = torch.tensor([param.index for param in [*order, *missing]], device=self._parts.world.device.torch_device)
        # Over the stage, whose ranks hold the same parameters; all of them get here at the start of their second step.
        broadcast(indices, self._parts.groups["stage"], what="the order of gradients").wait()
        return [self._parts.registry.params[index] for index in indices.tolist()]


def assert_complete(buckets: Iterable[Bucket]) -> None:
    """Asserts that every gradient of the step was complete."""
    for bucket in buckets:
        assert bucket.missing == 0, f"{bucket.missing} gradients of {bucket.buffer.params} never came"


def families_of(params: Iterable[Param], groups: Groups) -> tuple[list[list[Param]], list[Param]]:
    """Returns `params` by family, each of which may share buckets; and apart, those whose reduce group has one rank."""
    families: dict[tuple[object, ...], list[Param]] = {}
    loose: list[Param] = []
    for param in params:
        is_alone = groups[param.reduce_group].size == 1
        (loose if is_alone else families.setdefault(param.family, [])).append(param)
    return list(families.values()), loose


def broadcast_values(parts: Parts) -> None:
    """Overwrites weights and buffers with those of the first rank of each group, so that replicas start equal; core then checks
    that they are. Blocks; all ranks must call it.

    Values are sent as bytes: gloo supports few dtypes, a parameter may have any.
    """
    active: list[tuple[Tensor, Tensor, Pending]] = []
    num_bytes = 0
    for name, value, group in _replicated(parts):
        copy = value.contiguous()
        # Over the group that holds copies of this value; all of its ranks iterate over the registry in one order.
        active.append((value, copy, broadcast(_bytes(copy), group, what=name)))
        num_bytes += value.nbytes
        if num_bytes > CHUNK_BYTES:
            _write_back(active)
            num_bytes = 0
    _write_back(active)


def _replicated(parts: Parts) -> Iterator[tuple[str, Tensor, Group]]:
    """Yields name, value and group: parameters with their reduce group, buffers with the stage's; in the order of the
    registry.
    """
    for param in parts.registry:
        group = parts.groups[param.reduce_group]
        if group.has_peers and param.numel:
            yield param.name, param.parameter.detach(), group
    stage = parts.groups["stage"]
    for layer in parts.layers if stage.has_peers else ():
        for name, buffer in layer.module.named_buffers(layer.name):
            if buffer.numel():
                yield name, buffer, stage


def _write_back(active: list[tuple[Tensor, Tensor, Pending]]) -> None:
    """Waits for all broadcasts and writes contiguous copies back to their values, if these differ: an expanded tensor cannot be
    written.
    """
    for value, copy, pending in active:
        pending.wait()
        if copy.data_ptr() != value.data_ptr() and not torch.equal(_bytes(copy), _bytes(value.contiguous())):
            value.copy_(copy)
    active.clear()


def _bytes(value: Tensor) -> Tensor:
    """Returns the memory of `value`, which is contiguous, as a uint8 view."""
    return value.reshape(-1).view(torch.uint8)
