"""Heads with sharded weights, whose loss is computed in chunks of tokens: no rank has the logits of more than a chunk.

    GatheredHead     unshard W ──> chunks: logits, their gradient ──> gradients of the hidden states and of W ──> reduce-scatter
    VocabularyHead   all-gather the tokens ──> chunks: logits of this rank's rows of W ──statistics, gathered──> their gradient
                     ──> gradient of the tokens ──> reduce-scatter,   gradient of the rows ──> store

Both compute the gradients in the forward, so their backward does not communicate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.api.model import HeadChunks, HeadLoss, LazyLogits, LogitsHead, autocast_input
from sley_isp.vocabulary_head import NO_TARGET, VocabularyHead, logits_to_gradient

if TYPE_CHECKING:
    from sley_isp.sharded_module import ShardedModule


class GatheredHead(LogitsHead):
    """The head whose weight `sharded` gathers once per microbatch. All ranks of `wp` compute their losses in the same order."""

    is_collective = True

    def __init__(self, chunks: HeadChunks, sharded: ShardedModule) -> None:
        assert isinstance(sharded.module, nn.Linear), sharded.name
        super().__init__(chunks, sharded.module)
        self.sharded = sharded

    def forward(self, input: Tensor) -> Any:
        """Returns `LazyLogits` if the loss follows, and logits otherwise."""
        if self.sharded.has_replaced_weights or not self.chunks.is_active:
            return self.sharded.forward(input)
        return LazyLogits(self, autocast_input(input))

    @property
    def parameters(self) -> tuple[Any, Any]:
        """The shards, which are leaves of the graph."""
        bias = self.sharded.bias
        return self.sharded.weight.parameter, None if bias is None else bias.parameter

    @contextmanager
    def weights(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        sharded = self.sharded
        with sharded.communicator.unshard(sharded.group, can_prefetch=sharded.can_prefetch) as unsharded:
            unsharded.wait()
            yield unsharded.full_tensors[sharded.weight], None if sharded.bias is None else unsharded.full_tensors[sharded.bias]

    def accumulate(self, gradient: Tensor, inputs: Tensor) -> None:
        if self.sharded.trainable_params:
            self.sharded.sink(gradient, inputs)


class ChunkedVocabularyHead(GatheredHead):
    """The vocabulary-parallel `head` in chunks. All ranks of `wp` have the same chunks, and make the same exchanges."""

    def __init__(self, chunks: HeadChunks, head: VocabularyHead) -> None:
        super().__init__(chunks, head.module)
        self.head = head

    def accumulate(self, gradient: Tensor, inputs: Tensor) -> None:
        if self.sharded.trainable_params:
            self.head.sink(gradient, inputs)

    def full_logits(self, logits: LazyLogits) -> Tensor:
        """Returns the full logits of this rank's tokens, [..., classes]. A collective over `wp`."""
        return logits.apply(self.head.full_logits(logits))

    def sum_losses(self, loss: HeadLoss, hidden: Tensor, labels: Tensor) -> Tensor:
        """Returns the sum of the losses of this rank's `hidden` [n, h]. A collective over `wp`."""
        head, group = self.head, self.head.group
        targets = labels.masked_fill(labels == loss.ignore_index, NO_TARGET)
        inputs, targets = head.token_gather.gather_with_padding([hidden, targets], [0, NO_TARGET], "the head's inputs")
        tokens_per_rank = len(inputs) // group.size
        losses: list[Tensor] = []
        transport = group.transport("reduce")
        num_rows = len(inputs) + transport.num_scratch_rows(tokens_per_rank) if loss.hidden_gradient is not None else 0
        gradient = inputs.new_empty((num_rows, inputs.shape[1]))
        for tokens in self.chunks.slices(len(inputs), max(1, head.module.weight.parameter.shape[0]), inputs.element_size()):
            logits = head.padded_logits(inputs[tokens])
            losses.append(self._chunk_losses(logits, targets[tokens], loss))
            if loss.hidden_gradient is not None:
                torch.mm(logits, head.module.weight.parameter.to(logits.dtype), out=gradient[tokens])
            if loss.has_weight:
                self.accumulate(logits, inputs[tokens])
            del logits  # before the next chunk is allocated
        if loss.hidden_gradient is not None:
            full = gradient[: len(inputs)]
            work = transport.reduce_scatter([full], [gradient[len(inputs) :]], label="the head's input gradient")
            head.token_gather.counters.sent.add(full, group, passes=1)
            work.wait()
            loss.hidden_gradient.copy_(full.narrow(0, group.coord * tokens_per_rank, len(hidden)))
            work.wait_sent()
        return torch.cat(losses).narrow(0, group.coord * tokens_per_rank, len(hidden)).sum()

    def _chunk_losses(self, logits: Tensor, targets: Tensor, loss: HeadLoss) -> Tensor:
        """Returns the losses [c] of a chunk. Overwrites its `logits` with their gradient if `loss` has a scale."""
        head = self.head
        output, pull_back = loss.apply(logits[:, : head.classes.size])
        losses, log_sum = head.losses(output, targets, loss.smoothing)
        if loss.scale is not None:
            logits_to_gradient(output, targets, head.classes, log_sum, loss.scale, loss.smoothing)
            pull_back(output)
            logits[:, head.classes.size :].zero_()
        return losses
