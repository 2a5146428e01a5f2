"""Heads with sharded weights, which compute their loss in chunks of tokens: no rank has the logits of more than a chunk.

    GatheredHead     unshard W ──> chunks: logits, their gradient ──> gradients of the hidden states and of W ──> reduce-scatter

    VocabularyHead   x [n, h] ──all_gather──> [wp n, h] ──> chunks: local rows ──> logits [c, v / wp] ──statistics, gathered──>
                     losses, the logits' gradient P, in place;   P W ──reduce_scatter──> dx [n, h]   while   P^T x ──> store

Here n is the number of tokens of a rank, c that of a chunk, h the size of a hidden state, v the size of the vocabulary, and wp
the number of ranks. Without `chunk_tokens`, a vocabulary-parallel head has one chunk, of the tokens of all ranks.

Both heads compute the gradients in the forward, so their backward does not communicate. The vocabulary-parallel head needs
one gather, of the statistics of each slice, where Megatron-LM needs three all-reduces (Shoeybi et al. 2019, section 3).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.api.comm import Work
from sley_core.api.model import Layer, row_chunks
from sley_core.api.weights import HeadChunks, HeadLoss, LazyLogits, LogitsHead, autocast_input
from sley_core.errors import PlanError
from sley_isp.sharded_module import ShardedModule, find_parameter_users, is_shardable

NO_TARGET = -(1 << 62)
"""The target of a token with an ignored label. It differs from every label, so that invalid labels are not ignored too."""


def find_head(layers: Sequence[Layer]) -> HeadChunks:
    """Returns the model's last linear as a head with a single chunk. Raises PlanError "head-chunks" unless the last layer has
    exactly one plain linear, and "head-vocabulary" if another module holds the same weight and needs it in full. The first
    forward checks that the layer returns the linear's output.
    """
    head = HeadChunks.find(layers, sys.maxsize, *VocabularyHead.refusal)
    weight = cast(nn.Parameter, layers[-1].module.get_submodule(head.path).weight)
    if (name := find_parameter_users(layers, lambda *location: not is_shardable(*location)).get(weight)) is not None:
        message = f"`{name}` shares the head's weight, but is not a plain linear or embedding"
        hint = 'use a copy of the weight or a plain linear there, or set `head = "gather"`'
        raise PlanError("head-vocabulary", message, path=("weights", "head"), hint=hint)
    return head


class GatheredHead(LogitsHead):
    """A head whose weight `sharded` gathers once per microbatch. All ranks of `wp` must compute losses in the same order."""

    is_collective = True

    def __init__(self, chunks: HeadChunks, sharded: ShardedModule) -> None:
        assert isinstance(sharded.module, nn.Linear), sharded.name
        super().__init__(chunks, sharded.module)
        self.sharded = sharded

    def forward(self, input: Tensor) -> Any:
        """Returns `LazyLogits` if a loss computes the logits in chunks, and the logits otherwise."""
        if self.sharded.has_replaced_weights or not self.chunks.is_active:
            return self.sharded.forward(input)
        return LazyLogits(self, autocast_input(input))

    @property
    def parameters(self) -> tuple[Any, Any]:
        """The shards of the weight and the bias, which are leaves of the graph. The bias is None if the head has none."""
        bias = self.sharded.bias
        return self.sharded.weight.parameter, None if bias is None else bias.parameter

    @contextmanager
    def weights(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields the full weight [classes, h] and the full bias [classes], which is None if the head has none."""
        sharded = self.sharded
        with sharded.communicator.unshard(sharded.group) as unsharded:
            unsharded.wait()
            yield unsharded.full_tensors[sharded.weight], None if sharded.bias is None else unsharded.full_tensors[sharded.bias]

    def accumulate(self, gradient: Tensor, inputs: Tensor) -> None:
        """Adds a chunk's weight and bias gradients, from the logits' `gradient` [c, classes] and the `inputs` [c, h]."""
        self.sharded.sink(gradient, inputs)


class VocabularyHead(GatheredHead):
    """The vocabulary-parallel head: each rank of `wp` multiplies the tokens of all ranks by its rows of the weight."""

    refusal = (("weights", "head"), 'set `head = "gather"`')

    def __init__(self, chunks: HeadChunks, sharded: ShardedModule) -> None:
        super().__init__(chunks, sharded)
        shard = sharded.weight.row_shard
        self.token_gather = sharded.communicator.token_gather
        self.group = self.token_gather.group
        self.store = sharded.parts.store
        self.classes = ClassRange(shard.index * shard.size, shard.unpadded_size, shard.shape[0])

    def local_logits(self, inputs: Tensor) -> Tensor:
        """Returns the logits [tokens, rows of a shard] of this rank's classes, including columns for padding rows."""
        return F.linear(inputs, *(param.parameter.to(inputs.dtype) for param in self.sharded.params))

    def full_logits(self, logits: LazyLogits) -> Tensor:
        """Returns the full logits of this rank's tokens, [..., classes]. A collective over `wp`."""
        x = logits.hidden.flatten(0, -2)
        (inputs,) = self.token_gather.gather_with_padding([x], [0], "the head's inputs")
        parts = self.local_logits(inputs).view(self.group.size, len(inputs) // self.group.size, -1)
        output, work = self.token_gather.all_to_all(parts, "reduce", "logits")
        work.wait()
        work.wait_sent()
        return logits.apply(output.transpose(0, 1).flatten(1)[: len(x), : self.classes.total].view(logits.shape))

    def accumulate(self, gradient: Tensor, inputs: Tensor) -> None:
        for param in self.sharded.trainable_params:
            if param is self.sharded.bias:
                self.store.add(param, gradient.sum(0, dtype=self.store.dtype))
            else:
                self.store.add_product(param, gradient, inputs)

    def sum_losses(self, loss: HeadLoss, hidden: Tensor, labels: Tensor) -> Tensor:
        """Returns the sum of the losses of this rank's `hidden` [n, h] with `labels` [n]. A collective over `wp`. If gradients
        are needed, also reduce-scatters the gradient of `hidden` into `loss.hidden_gradient`.
        """
        targets = labels.masked_fill(labels == loss.ignore_index, NO_TARGET)
        inputs, targets = self.token_gather.gather_with_padding([hidden, targets], [0, NO_TARGET], "the head's inputs")
        tokens_per_rank = len(inputs) // self.group.size
        transport = self.group.transport("reduce")
        weight = self.sharded.weight.parameter
        work: Work | None = None
        losses = inputs.new_zeros(len(inputs), dtype=torch.promote_types(inputs.dtype, torch.float32))
        with ExitStack() as stack:
            if loss.hidden_gradient is not None:
                shape = (len(inputs) + transport.num_scratch_rows(tokens_per_rank), inputs.shape[1])
                buffer = stack.enter_context(self.sharded.group.pool.lease(shape, inputs.dtype, inputs.device))
                gradient, scratch = buffer[: len(inputs)], buffer[len(inputs) :]
            for tokens in self.chunks.slices(len(inputs), max(1, len(weight)), inputs.element_size()):
                logits = self.local_logits(inputs[tokens])
                losses[tokens] = self._chunk_losses(logits, targets[tokens], loss)
                if loss.hidden_gradient is not None:
                    torch.mm(logits, weight.to(logits.dtype), out=gradient[tokens])
                    if tokens.stop >= len(inputs):
                        work = transport.reduce_scatter([gradient], [scratch], label="the head's input gradient")
                        self.token_gather.counters.add(gradient, self.group, passes=1)
                if loss.has_weight:
                    self.accumulate(logits, inputs[tokens])
                del logits  # before the next chunk is allocated
            if loss.hidden_gradient is not None and work is not None:  # an estimate may not reach the last chunk
                work.wait()
                loss.hidden_gradient.copy_(gradient.narrow(0, self.group.coord * tokens_per_rank, len(hidden)))
                work.wait_sent()
        return losses.narrow(0, self.group.coord * tokens_per_rank, len(hidden)).sum()

    def _chunk_losses(self, logits: Tensor, targets: Tensor, loss: HeadLoss) -> Tensor:
        """Returns the losses [c] of a chunk. If `loss` has a scale, overwrites `logits` with their gradient. Blocks."""
        output, run_backward = loss.apply(logits[:, : self.classes.size])
        local = logit_statistics(output, targets, self.classes, loss.smoothing)
        statistics = local.new_empty((self.group.size * local.shape[0], local.shape[1]))
        self.token_gather.gather([statistics], [local], "statistics of logits")
        losses, log_sum = token_losses(statistics.view(-1, *local.shape), targets, self.classes.total, loss.smoothing)
        if loss.scale is not None:
            logits_to_gradient(output, targets, self.classes, log_sum, loss.scale, loss.smoothing)
            run_backward(output)
            logits[:, self.classes.size :].zero_()
        return losses


class ClassRange(NamedTuple):
    """The classes of a slice: `size` classes from `start` on, of `total` classes in all. The last slices may be empty."""

    start: int
    size: int
    total: int


def logit_statistics(logits: Tensor, targets: Tensor, classes: ClassRange, smoothing: float) -> Tensor:
    """Returns statistics of a slice's `logits` [n, size] as [2, n], or [3, n] with smoothing, in fp32 or higher precision:
    their log-sum-exp; the target's logit, or -inf if the slice does not contain the target; and with smoothing the sum of the
    logits. targets: int64 [n], indices over all classes, or NO_TARGET.
    """
    result = logits.new_full(
        (3 if smoothing else 2, len(logits)), -torch.inf, dtype=torch.promote_types(logits.dtype, torch.float32)
    )
    result[2:] = 0.0
    if not classes.size:
        return result
    is_local, indices = _local_targets(targets, classes)
    for rows in row_chunks(logits):
        chunk = logits[rows].to(result.dtype)
        torch.logsumexp(chunk, -1, out=result[0, rows])
        result[1, rows] = torch.where(is_local[rows], chunk.gather(-1, indices[rows]).squeeze(-1), -torch.inf)
        if smoothing:
            torch.sum(chunk, -1, out=result[2, rows])
    return result


def token_losses(statistics: Tensor, targets: Tensor, num_classes: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy [n] with label smoothing, and the log-sum-exp [n] of all logits.

    statistics: the statistics of all slices, [slices, 2 or 3, n]. The loss is log_sum - (1 - smoothing) * (target's logit) -
    smoothing * (mean logit), 0 for tokens without a target, and infinite if no slice contains the target.
    """
    log_sum = statistics[:, 0].logsumexp(0)
    losses = log_sum - (1.0 - smoothing) * statistics[:, 1].amax(0)
    if smoothing:
        losses -= smoothing / num_classes * statistics[:, 2].sum(0)
    return torch.where(targets == NO_TARGET, 0.0, losses), log_sum


def logits_to_gradient(
    logits: Tensor, targets: Tensor, classes: ClassRange, log_sum: Tensor, scale: Tensor, smoothing: float
) -> None:
    """Overwrites a slice's `logits` [n, size] with the gradient of the sum of losses, times the scalar `scale`. The gradient is
    0 for tokens without a target. log_sum: the log-sum-exp [n] over all classes.
    """
    if not classes.size:
        return
    is_local, indices = _local_targets(targets, classes)
    target_terms = torch.where(is_local, log_sum.new_full((), smoothing - 1.0), 0.0).unsqueeze(-1)
    scales = torch.where(targets == NO_TARGET, 0.0, scale.to(log_sum.dtype)).unsqueeze(-1)
    for rows in row_chunks(logits):
        chunk = (logits[rows] - log_sum[rows].unsqueeze(-1)).exp_()
        if smoothing:
            chunk -= smoothing / classes.total
        chunk.scatter_add_(-1, indices[rows], target_terms[rows])
        torch.mul(chunk, scales[rows], out=logits[rows])


def _local_targets(targets: Tensor, classes: ClassRange) -> tuple[Tensor, Tensor]:
    """Returns whether each target is in the slice, bool [n], and its index within the slice, int64 [n, 1], clamped if not."""
    indices = targets - classes.start
    is_local = (indices >= 0) & (indices < classes.size)
    return is_local, indices.clamp(0, classes.size - 1).unsqueeze(-1)
