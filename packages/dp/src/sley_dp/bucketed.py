"""`dp.bucketed`: sums gradients in flat buckets, each as soon as its last gradient is complete.

A bucket is a slice of the gradient store, so nothing is copied to reduce it and the optimizer reads the result in place.
Buckets are filled in reverse order of use, and after the first step once more, in the order in which that step's backward
actually completed the gradients.

    backward   |---- block 7 ----|---- block 6 ----|---- block 5 ----| ...
    reduction                    |-- bucket 0 --|  |-- bucket 1 --|

The model is PyTorch's DistributedDataParallel (Li et al., 2020, section 3.2); it is tested against `core.each`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from sley_core.api.comm import SentBytes, broadcast
from sley_core.api.parts import ALIGNMENT_BYTES, Layout, Sums, round_up, split_by_size
from sley_core.protocols import GradientHandler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from sley_core.api.comm import Group, Work
    from sley_core.api.parts import GradientBuffer, Param, Parts, StepState
    from sley_dp.config import BucketedConfig
    from sley_dp.narrow import Narrow


class Exact(Sums):
    """All-reduces in place, in the gradients' dtype, by the transport of the group.

    Some transports progress only when called. So each start also advances the earlier sums as far as possible without
    waiting, while the peers compute.
    """

    def __init__(self, sent: SentBytes) -> None:
        self.sent = sent
        self._works: list[Work] = []
        self._moving: list[Work] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts the all-reduce of `buffer`, in place, and advances the earlier ones without waiting."""
        # Over the bucket's reduce group, whose ranks start their buckets in one order.
        work = group.transport().all_reduce(buffer.data, what=described(buffer), contents=buffer.contents)
        self.sent.add(buffer.data, group, passes=2)
        self._works.append(work)
        self._moving = [one for one in (*self._moving, work) if not one.test()]

    def finish(self) -> None:
        """Blocks until all sums are complete and the peers have read this rank's data."""
        for work in self._works:
            work.wait()
        # After all sums: a peer that is slow to read one must not delay the others.
        for work in self._works:
            work.wait_sent()
        self._works.clear()
        self._moving.clear()

    def forget(self) -> None:
        """Blocks until all sums are complete."""
        self.finish()


def described(buffer: GradientBuffer) -> str:
    """Returns the name of a bucket for the error of a failed collective."""
    return f"the bucket of {buffer.params[0].name}"


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
        self._sent = SentBytes()
        self._cap_bytes = config.bucket_bytes
        self._start = config.start
        self._narrow: Narrow | None = None
        if config.reduction == "bf16":
            from sley_dp.narrow import Narrow  # most plans do without

            self._narrow = Narrow(self._sent)
        self.buckets: list[Bucket] = []
        self._order: list[Param] | None = None
        self._seen: list[Param] = []
        self._bucket_of: dict[Param, Bucket] = {}
        self._layout = -1
        self._has_finished_a_step = False

    def attach(self, parts: Parts) -> None:
        """Lays the store out in buckets.

        With `start = "broadcast"` copies the first replica's values, a collective on all ranks.
        """
        self._parts = parts
        self._store = parts.store
        self._groups = parts.groups
        self.sums: Sums = self._narrow or self._store.reduction.sums(self._store, partial(Exact, self._sent), self._sent)
        self._store.lay_out(self._plan)
        if self._start == "broadcast":
            from sley_dp.replicas import broadcast_values  # few plans need it

            broadcast_values(parts)

    def begin_step(self, step: StepState) -> None:
        """Resets the counts of missing gradients.

        Before the second step, lays buckets out again in the order in which gradients were complete; a collective of
        the stage.
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
            self.sums.start(bucket.buffer, self._groups[bucket.buffer.reduce_group])

    def finish_step(self, step: StepState) -> None:
        """Blocks until every bucket holds its sum; asserts that every gradient was complete."""
        for bucket in self.buckets:
            assert bucket.missing == 0, f"{bucket.missing} gradients of {bucket.buffer.params} never came"
        self.sums.finish()
        self._sent.end_step()
        self._has_finished_a_step = True

    def trim(self) -> int:
        """Frees what the sums of the next step can allocate again; returns the number of bytes. Called between two steps."""
        return self.sums.trim()

    def messages(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of what `trim` would free."""
        return self._narrow.messages() if self._narrow is not None else iter(())

    def counts(self) -> dict[str, float]:
        """Returns the bytes that this rank sent in the last step, for its sums."""
        return self._sent.counts()

    def kept(self) -> dict[str, Tensor]:
        """Returns, for a checkpoint, the order of the buckets, or that in which the first step completed gradients.

        The order decides where buckets lie and in which order norms and sums are added, so the bits depend on it.
        """
        if self._order is None and not self._has_finished_a_step:
            return {}
        name, order = ("seen", self._seen_first()) if self._order is None else ("order", self._order)
        return {name: torch.tensor([param.index for param in order])}

    def restore_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Lays buckets out as they were, or will be from the next step on; with an empty mapping, changes nothing."""
        self._has_finished_a_step |= "seen" in kept or "order" in kept
        params = self._parts.registry.params
        if "seen" in kept:
            self._order, self._seen = None, [params[index] for index in kept["seen"].tolist()]
        if "order" in kept:
            self._order = [params[index] for index in kept["order"].tolist()]
            self._store.lay_out(self._plan)

    def _seen_first(self) -> list[Param]:
        return self._seen or self._store.seen_order

    def _plan(self, params: list[Param]) -> Layout:
        """Returns buckets per family, filled in the agreed order, as the store's `Planner`; parameters without a place in it
        come last.

        Parameters whose reduce group has one rank lie in no bucket. The old buckets are dropped here, since the store allocates
        the new ones next and both should not exist at once.
        """
        self.buckets, self._bucket_of = [], {}
        if self._order is not None:
            place = {param: at for at, param in enumerate(self._order)}
            params = sorted(params, key=lambda param: place.get(param, len(place)))
        families: dict[tuple[object, ...], list[Param]] = {}
        loose: list[Param] = []
        for param in params:
            alone = self._groups[param.reduce_group].size == 1
            (loose if alone else families.setdefault(param.family, [])).append(param)
        buckets = [bucket for family in families.values() for bucket in split_by_size(family, self._num_bytes, self._cap_bytes)]
        return Layout(buckets, params, loose)

    def _num_bytes(self, param: Param) -> int:
        """Returns the bytes of `param` in a flat buffer, alignment included."""
        return round_up(param.numel * self._store.dtype.itemsize, ALIGNMENT_BYTES)

    def _agreed_order(self) -> list[Param]:
        """Returns the order in which gradients were complete on the stage's first rank, broadcast to the stage's ranks.

        Parameters without a gradient there come last, frozen ones too. So the order has the same length on all ranks even
        if they have frozen different parameters, which is detected only after this.
        """
        seen = self._seen_first()
        unseen = [param for param in self._parts.registry if param not in set(seen)]
        indices = torch.tensor([param.index for param in [*seen, *unseen]], device=self._parts.world.device.torch_device)
        # Over the stage, whose ranks hold the same parameters; all of them get here at the start of their second step.
        broadcast(indices, self._groups["stage"], what="the order of gradients").wait()
        return [self._parts.registry.params[index] for index in indices.tolist()]
