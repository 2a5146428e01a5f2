"""Vocabulary-parallel head: each rank of `wp` multiplies the tokens of all ranks by its rows of the weight.

    forward    x [n, h] ──all_gather──> [wp n, h] ──local rows──> logits [wp n, v / wp] ──statistics, gathered──> losses [n]
    backward   logits become their gradient P, in place;   P W ──reduce_scatter──> dx [n, h]   while   P^T [wp n, h] ──> store

The head's weight is not gathered and its gradient is not reduced. Instead, there are two exchanges as large as the tokens. The
logits need as much memory as those of a rank's tokens over the full vocabulary, and their gradient overwrites them.

Megatron-LM computes the same cross-entropy with three all-reduces of maxima, targets and sums (Shoeybi et al. 2019, section 3).
This module needs one gather of the statistics of each slice. It processes logits in chunks, so the extra memory is one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sley_core.api.model import LazyLogits, LogitsHead, autocast_input, row_chunks
from sley_core.api.parts import Handover
from sley_core.errors import PlanError
from sley_isp.embedding_columns import TokenGather
from sley_isp.sharded_module import ShardedModule, is_shardable, needs_shard_gradients, parameter_users

if TYPE_CHECKING:
    from sley_core.api.model import Layer
    from sley_core.api.parts import Parts

NO_TARGET = -(1 << 62)
"""The target of a token with an ignored label. It equals no label, so that an invalid label is not ignored too."""


def find_head(layers: Sequence[Layer]) -> str:
    """Returns the name, within the last layer, of that layer's only plain linear.

    Raises PlanError "head-vocabulary" unless there is exactly one, and if a module that needs the full weight also holds it.
    The first forward checks that the layer returns the linear's output.
    """
    last_layer = layers[-1]
    modules = last_layer.module.named_modules()
    linears: dict[str, nn.Linear] = {name: module for name, module in modules if type(module) is nn.Linear}
    if len(linears) != 1:
        names = ", ".join(f"`{name}`" for name in linears) or "none"
        message = f"the last layer `{last_layer.name}` must have exactly one plain nn.Linear to be split, but has {names}"
        raise _head_error(message, "use a separate layer for the head")
    ((path, head),) = linears.items()
    if (
        name := parameter_users(layers, lambda *location: not is_shardable(*location)).get(cast(nn.Parameter, head.weight))
    ) is not None:
        message = f"`{name}` shares the head's weight, but is not a plain linear or embedding"
        raise _head_error(message, "use a copy of the weight or a plain linear there")
    return path


def _head_error(message: str, hint: str) -> PlanError:
    return PlanError("head-vocabulary", message, path=("weights", "head"), hint=f'{hint}, or set `head = "gather"`')


class VocabularyHead(LogitsHead):
    """Replaces the forward of the linear in `module`.

    All ranks of `wp` run the same microbatches in the same order, and so make the same exchanges.
    """

    refusal = (("weights", "head"), 'set `head = "gather"`')
    elementwise = frozenset()
    is_collective = True

    def __init__(self, module: ShardedModule, token_gather: TokenGather, parts: Parts) -> None:
        assert isinstance(module.module, nn.Linear), module.name
        self.linear = module.module  # without chunks
        shard = module.weight.row_shard
        self.module = module
        self.token_gather = token_gather
        self.group = token_gather.group
        self.store = parts.store
        self.classes = ClassRange(shard.index * shard.size, shard.own_size, shard.shape[0])
        self.sink = Handover(self._accumulate, parts.queue)

    def forward(self, input: Tensor) -> Tensor | LazyLogits:
        """Returns `LazyLogits` for the loss. Outside an action, gathers the weight and returns full logits."""
        module = self.module
        if module.has_replaced_weights or module.communicator.action is None:
            return module.forward(input)
        return LazyLogits(self, autocast_input(input))

    def padded_logits(self, inputs: Tensor) -> Tensor:
        """Returns this rank's logits [n, rows of a shard], including the columns of padding rows."""
        shards = [param.parameter.to(inputs.dtype) for param in self.module.params]
        return F.linear(inputs, *shards)

    def cross_entropy(self, logits: LazyLogits, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the sum of this rank's losses, a scalar. A collective over `wp`."""
        targets = labels.reshape(-1).masked_fill(labels.reshape(-1) == ignore_index, NO_TARGET)
        shards = [param.parameter for param in self.module.params]
        total: Tensor = _LossSum.apply(logits.hidden.flatten(0, -2), self, smoothing, targets, *shards)  # type: ignore[no-untyped-call]
        return total

    def full_logits(self, logits: LazyLogits) -> Tensor:
        """Returns this rank's logits, [..., classes]. A collective over `wp`."""
        x = logits.hidden.flatten(0, -2)
        (inputs,) = self.token_gather.gather_with_padding([x], [0], "the head's inputs")
        parts = self.padded_logits(inputs).view(self.group.size, len(inputs) // self.group.size, -1)
        output, work = self.token_gather.all_to_all(parts, "reduce", "logits")
        work.wait()
        work.wait_sent()
        return output.transpose(0, 1).flatten(1)[: len(x), : self.classes.total].view(logits.shape)

    def losses(self, logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """Returns the losses of the tokens of all ranks and the logs of their sums of exponentials, as `token_losses`. Blocks.

        logits: the logits of this rank's classes, [n, size].
        """
        local = logit_statistics(logits, targets, self.classes, smoothing)
        statistics = local.new_empty((self.group.size * local.shape[0], local.shape[1]))
        self.token_gather.gather([statistics], [local], "statistics of logits")
        return token_losses(statistics.view(-1, *local.shape), targets, self.classes.total, smoothing)

    @contextmanager
    def reduce_input_gradient(self, gradient: Tensor, num_tokens: int) -> Iterator[list[Tensor]]:
        """Reduce-scatters the gradient of the head's inputs while the block runs.

        gradient: the logits' gradient [size x n, rows]. num_tokens: the number of this rank's tokens. Yields a list, to which
        the end of the block appends the input gradient of this rank's tokens, [num_tokens, h].
        """
        results: list[Tensor] = []
        tokens_per_rank = len(gradient) // self.group.size
        transport = self.group.transport("reduce")
        shape = (len(gradient) + transport.num_scratch_rows(tokens_per_rank), self.module.weight.shape[1])
        with self.module.group.pool.lease(shape, gradient.dtype, gradient.device) as buffer:
            full = buffer[: len(gradient)]
            torch.mm(gradient, self.module.weight.parameter.to(gradient.dtype), out=full)
            work = transport.reduce_scatter([full], [buffer[len(gradient) :]], label="the head's input gradient")
            self.token_gather.counters.sent.add(full, self.group, passes=1)
            yield results
            work.wait()
            results.append(full.narrow(0, self.group.coord * tokens_per_rank, num_tokens).clone())
            work.wait_sent()

    @torch.no_grad()
    def _accumulate(self, gradient: Tensor, inputs: Tensor) -> None:
        """Adds the shards' gradients, which include all tokens of `wp`, to the store."""
        for param in self.module.trainable_params:
            if param is self.module.bias:
                self.store.add(param, gradient.sum(0, dtype=self.store.dtype))
            else:
                self.store.add_product(param, gradient, inputs)


class _LossSum(torch.autograd.Function):
    """Makes the sum of this rank's losses differentiable. The shards are inputs, whose gradients are None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: VocabularyHead, smoothing: float, targets: Tensor, *_shards: Tensor) -> Tensor:
        """Gathers the tokens of `wp` and the statistics of all slices. Saves the logits, which the backward overwrites."""
        inputs, all_targets = head.token_gather.gather_with_padding([x, targets], [0, NO_TARGET], "the head's inputs")
        logits = head.padded_logits(inputs)
        losses, log_sum = head.losses(logits[:, : head.classes.size], all_targets, smoothing)
        start = head.group.coord * (len(inputs) // head.group.size)
        ctx.head, ctx.smoothing, ctx.num_tokens = head, smoothing, len(x)
        ctx.save_for_backward(logits, inputs if head.module.trainable_params else None, all_targets, log_sum)
        return losses[start : start + len(x)].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Overwrites the logits with their gradient. Reduces the input's gradient while it computes that of the weight."""
        head: VocabularyHead = ctx.head
        logits, inputs, targets, log_sum = ctx.saved_tensors
        logits_to_gradient(logits[:, : head.classes.size], targets, head.classes, log_sum, scale, ctx.smoothing)
        logits[:, head.classes.size :].zero_()

        reduction = head.reduce_input_gradient(logits, ctx.num_tokens) if ctx.needs_input_grad[0] else nullcontext([None])
        with reduction as results:
            if head.module.trainable_params and needs_shard_gradients(ctx):
                assert inputs is not None, f"{head.module.name} was unfrozen between a forward and its backward"
                head.sink(logits, inputs)
        return results[0], None, None, None, *(None for _ in head.module.params)


class ClassRange(NamedTuple):
    """The classes of a slice: `size` of all `total` classes, from `start` on. The last slices may be empty."""

    start: int
    size: int
    total: int


def logit_statistics(logits: Tensor, targets: Tensor, classes: ClassRange, smoothing: float) -> Tensor:
    """Returns statistics of a slice's `logits` [n, size] as [2, n], or [3, n] with smoothing, in fp32 or higher precision.

    They are the log-sum-exp of the logits, the target's logit, or -inf if the slice does not contain the target, and the sum of
    all logits. targets: int64 [n], indices over all classes, or NO_TARGET.
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

    statistics: the statistics of all slices, [slices, 2 or 3, n]. The loss is log_sum - (1 - smoothing) target - smoothing
    mean, and 0 for tokens without a target. If no slice has the target, it is infinite, which ends the run without a device
    synchronisation here.
    """
    log_sum = statistics[:, 0].logsumexp(0)
    losses = log_sum - (1.0 - smoothing) * statistics[:, 1].amax(0)
    if smoothing:
        losses -= smoothing / num_classes * statistics[:, 2].sum(0)
    return torch.where(targets == NO_TARGET, 0.0, losses), log_sum


def logits_to_gradient(
    logits: Tensor, targets: Tensor, classes: ClassRange, log_sum: Tensor, scale: Tensor, smoothing: float
) -> None:
    """Overwrites a slice's `logits` [n, size] with the gradient of the sum of losses, times the scalar `scale`.

    The gradient is the softmax minus the smoothed target, and 0 for tokens without a target.
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
    """Returns whether each target is in the slice [n], and its index there [n, 1], clamped to a valid index."""
    indices = targets - classes.start
    is_local = (indices >= 0) & (indices < classes.size)
    return is_local, indices.clamp(0, classes.size - 1).unsqueeze(-1)
