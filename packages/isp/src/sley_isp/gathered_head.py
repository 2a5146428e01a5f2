"""The head with a sharded weight whose loss is computed in chunks of tokens: a microbatch gathers the weight once.

forward    unshard W ──> chunks: logits, their gradient ──> gradients of the hidden states and of W ──> reduce-scatter
backward   returns the gradient of the hidden states, without a gather
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sley_core.api.model import HeadChunks, LazyLogits, LogitsHead, autocast_input

if TYPE_CHECKING:
    from sley_isp.sharded_module import ShardedModule


class GatheredHead(LogitsHead):
    """The head whose weight `sharded` gathers. All ranks of `wp` compute their losses in the same order."""

    def __init__(self, chunks: HeadChunks, sharded: ShardedModule) -> None:
        super().__init__(chunks, sharded.module)  # type: ignore[arg-type]  # a linear
        self.sharded = sharded

    def forward(self, input: Tensor) -> Any:
        """Returns `LazyLogits` if the loss follows, and logits otherwise."""
        if self.sharded.has_replaced_weights or not self.chunks.is_active:
            return self.sharded.forward(input)
        return LazyLogits(self, autocast_input(input))

    @property
    def parameters(self) -> tuple[Any, Any]:
        """The shards, which are leaves of the graph."""
        return self.sharded.shard("weight"), self.sharded.shard("bias")

    @contextmanager
    def weights(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        sharded = self.sharded
        with sharded.communicator.unshard(sharded.group, sharded.params, can_prefetch=sharded.can_prefetch) as unsharded:
            unsharded.wait()
            yield sharded.full_tensor(unsharded, "weight"), sharded.full_tensor(unsharded, "bias")

    def accumulate(self, gradient: Tensor, inputs: Tensor) -> None:
        if self.sharded.trainable_params:
            self.sharded.sink(gradient, inputs)
