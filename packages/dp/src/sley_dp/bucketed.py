"""`dp.bucketed`: sums each bucket of gradients as soon as its last gradient is complete.

A bucket is a slice of the gradient store. So it is reduced without a copy, and the optimizer reads the sum in place. Buckets
are filled in reverse order of use. After the first step, they are filled again in the order in which that step completed the
gradients.

    backward   |---- block 7 ----|---- block 6 ----|---- block 5 ----| ...
    reduction                    |-- bucket 0 --|  |-- bucket 1 --|

The design follows PyTorch's DistributedDataParallel (Li et al., 2020, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from sley_core.api.comm import SentBytes
from sley_core.api.parts import Layout, Sums, split_by_size
from sley_core.protocols import GradientHandler
from sley_dp.sums import Bf16Sums, ExactSums

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.api.comm import Group
    from sley_core.api.parts import GradientBuffer, Param, Parts, StepState
    from sley_dp.config import BucketedConfig


class BucketCounts:
    """Counts the gradients of each of `buffers` that are still missing in this step."""

    def __init__(self, buffers: Sequence[GradientBuffer]) -> None:
        self.buffers = buffers
        self._index_of_param = {param: index for index, buffer in enumerate(buffers) for param in buffer.params}
        self._num_missing: list[int] = []

    def reset(self) -> None:
        """Counts all gradients as missing."""
        self._num_missing = [len(buffer.params) for buffer in self.buffers]

    def add(self, param: Param) -> GradientBuffer | None:
        """Counts the gradient of `param` as complete. Returns its buffer if that has no missing gradient anymore."""
        index = self._index_of_param.get(param)
        if index is None:
            return None
        self._num_missing[index] -= 1
        return None if self._num_missing[index] else self.buffers[index]

    def assert_complete(self) -> None:
        """Asserts that every gradient of the step was complete."""
        for buffer, num_missing in zip(self.buffers, self._num_missing, strict=True):
            assert num_missing == 0, f"{num_missing} gradients of {buffer.params} are missing"


class BucketedReducer(GradientHandler):
    """Sums each gradient over its reduce group once per optimizer step, overlapped with the last backward.

    The sums equal those of `core.each`. With `reduction = "bf16"`, they differ by at most 2^-7, relatively.
    """

    def __init__(self, config: BucketedConfig) -> None:
        self._config = config
        self._sent = SentBytes()
        self._counts = BucketCounts([])
        self._order: list[Param] | None = None
        self._restored_order: list[Param] = []
        self._num_layouts = -1
        self._has_finished_step = False

    def attach(self, parts: Parts) -> None:
        """Lays the store out in buckets."""
        self._parts = parts
        self._store = parts.store
        self.sums: Sums = Bf16Sums(self._sent)
        if self._config.reduction != "bf16":
            self.sums = parts.store.reduction.sums(parts.store, self._sent) or ExactSums(self._sent)
        self._store.lay_out(self._plan_layout)

    def begin_step(self, step: StepState) -> None:
        """Resets the counts of missing gradients. Before the second step, also lays the buckets out in their final order.

        The latter is a collective over the stage.
        """
        self.sums.discard()
        self._sent.begin_step()
        if self._order is None and self._has_finished_step:
            self._order = self._broadcast_order()
            self._store.lay_out(self._plan_layout)
        if self._num_layouts != self._store.num_layouts:
            self._num_layouts = self._store.num_layouts
            self._counts = BucketCounts(self._store.buffers)
        self._counts.reset()

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """Counts the gradient of `param` as complete. If it is the last of its bucket, starts the bucket's sum.

        All ranks of a reduce group call this in the same order.
        """
        if (buffer := self._counts.add(param)) is not None:
            self.sums.start(buffer, self._parts.groups[buffer.reduce_group])

    def finish_step(self, step: StepState) -> None:
        """Blocks until every bucket holds its sum."""
        self._counts.assert_complete()
        self.sums.finish()
        self._sent.end_step()
        self._has_finished_step = True

    def trim(self) -> int:
        """Frees the scratch memory between steps, and returns its size in bytes. The next sums allocate it again."""
        return self.sums.trim()

    def messages(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and tensor of each buffer that `trim` would free."""
        return self.sums.messages() if isinstance(self.sums, Bf16Sums) else iter(())

    def counts(self) -> dict[str, float]:
        """Returns the number of bytes that this rank sent for the sums of the last step."""
        return self._sent.counts()

    def saved_state(self) -> dict[str, Tensor]:
        """Returns the order of the buckets for a checkpoint, or after the first step the order in which it completed gradients.

        The bits of a run depend on this order, since norms and sums are added in it.
        """
        if self._order is None and not self._has_finished_step:
            return {}
        name, order = ("seen", self._first_step_order()) if self._order is None else ("order", self._order)
        return {name: torch.tensor([param.index for param in order])}

    def restore_saved_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the result of `saved_state`. An empty mapping changes nothing."""
        self._has_finished_step |= "seen" in state or "order" in state
        params = self._parts.registry.params
        if "seen" in state:
            self._order, self._restored_order = None, [params[index] for index in state["seen"].tolist()]
        if "order" in state:
            self._order = [params[index] for index in state["order"].tolist()]
            self._store.lay_out(self._plan_layout)

    def _first_step_order(self) -> list[Param]:
        """Returns the order in which the first step completed gradients on this rank."""
        return self._restored_order or self._store.completion_order

    def _plan_layout(self, params: list[Param]) -> Layout:
        """Returns buckets for each family, filled in the agreed order. Parameters that the order lacks come last.

        Drops the old buckets first, so that their memory is free when the store allocates the new ones.
        """
        self._counts = BucketCounts([])
        if self._order is not None:
            rank_of_param = {param: index for index, param in enumerate(self._order)}
            params = sorted(params, key=lambda param: rank_of_param.get(param, len(rank_of_param)))
        families, unreduced = split_by_family(params, self._parts.groups)
        size_of, bucket_bytes = self._store.aligned_bytes, self._config.bucket_bytes
        buckets = [bucket for family in families for bucket in split_by_size(family, size_of, bucket_bytes)]
        return Layout(buckets, params, unreduced)

    def _broadcast_order(self) -> list[Param]:
        """Broadcasts the order in which gradients were complete on the stage's first rank, and returns it on all its ranks.

        Parameters without a gradient, such as frozen ones, come last. So the order has the same length on all ranks, even if
        they differ in frozen parameters, which is detected only later.
        """
        order = self._first_step_order()
        order = [*order, *(param for param in self._parts.registry if param not in set(order))]
        indices = torch.tensor([param.index for param in order], device=self._parts.world.device.torch_device)
        # Over the stage, whose ranks hold the same parameters. All of them call this at the start of their second step.
        self._parts.groups["stage"].broadcast(indices, label="the order of gradients").wait()
        return [self._parts.registry.params[index] for index in indices.tolist()]


def split_by_family(params: Iterable[Param], groups: Mapping[str, Group]) -> tuple[list[list[Param]], list[Param]]:
    """Returns `params` by family, since those of a family may share buckets, and the params whose reduce group has one rank."""
    families: dict[tuple[object, ...], list[Param]] = {}
    unreduced: list[Param] = []
    for param in params:
        is_reduced = groups[param.reduce_group].size > 1
        (families.setdefault(param.family, []) if is_reduced else unreduced).append(param)
    return list(families.values()), unreduced
