"""`dp.bucketed`: sums gradients in flat buckets during the backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.api.comm import SentBytes
from sley_core.api.parts import TreeSums
from sley_dp.reducer import BucketReducer
from sley_dp.sums import Exact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from sley_core.api.parts import Parts
    from sley_dp.config import BucketedConfig
    from sley_dp.narrow import Narrow


class Bucketed(BucketReducer):
    """Sums gradients in buckets, exactly as `core.each` does, or with `reduction = "bf16"` within 2^-7 of that."""

    def __init__(self, config: BucketedConfig) -> None:
        sent = SentBytes()
        self._narrow: Narrow | None = None
        if config.reduction == "bf16":
            from sley_dp.narrow import Narrow  # most plans do without

            self._narrow = Narrow(sent)
        super().__init__(config, self._narrow or Exact(sent), sent)

    def attach(self, parts: Parts) -> None:
        """Lays the store out as `BucketReducer.attach` does; with canonical sums in the run, uses those."""
        if parts.store.canonical is not None:
            self.sums = TreeSums(parts.store, self._sent)
        super().attach(parts)

    def messages(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of what `trim` would free."""
        return self._narrow.messages() if self._narrow is not None else iter(())
