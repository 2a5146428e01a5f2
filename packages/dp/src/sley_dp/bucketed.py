"""`dp.bucketed`: every gradient summed in flat buckets while the backward runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.api.comm import SentBytes
from sley_core.api.parts import TreeSums
from sley_core.protocols import HandlerExchange
from sley_dp.narrow import WIRE, Narrow
from sley_dp.reducer import BucketReducer
from sley_dp.sums import Exact

if TYPE_CHECKING:
    from sley_core.api.parts import Parts
    from sley_dp.config import BucketedConfig


class Bucketed(BucketReducer):
    """The same sums as `core.each`, or with `reduction = "bf16"` within 2^-7 of them."""

    def __init__(self, config: BucketedConfig) -> None:
        sent = SentBytes()
        super().__init__(config, Narrow(sent) if config.reduction == "bf16" else Exact(sent), sent)
        self._wire = WIRE if config.reduction == "bf16" else None

    def attach(self, parts: Parts) -> None:
        """As `BucketReducer.attach`; where the run's sums are canonical, sums are those."""
        if parts.store.canonical is not None:
            self.sums = TreeSums(parts.store, self._sent)
        super().attach(parts)

    def exchanges(self) -> list[HandlerExchange] | None:
        """Returns the sum of each bucket, in the order in which they are filled; None where sums are canonical."""
        if self._store.canonical is not None:
            return None
        itemsize = (self._wire or self._store.dtype).itemsize
        return [
            HandlerExchange("sum", one.reduce_group, one.data.numel() * itemsize, tuple(one.entries))
            for one in self._store.buffers
        ]
