"""Layers that exchange tokens instead of weights, and heads that compute their loss in chunks of tokens.

    ColumnEmbedding  ids [n] ──all_gather──> [wp n] ──local columns──> [wp, n, h / wp] ──all_to_all──> local vectors [n, h]
       its backward  g [n, h] ──all_to_all, in the background──> local columns' g [wp n, h / wp] ──summed by id──> store

    GatheredHead     unshard W ──> chunks: logits, their gradient ──> gradients of the hidden states and of W ──> reduce-scatter

    VocabularyHead   x [n, h] ──all_gather──> [wp n, h] ──> chunks: local rows ──> logits [c, v / wp] ──statistics, gathered──>
                     losses, the logits' gradient P, in place;   P W ──reduce_scatter──> dx [n, h]   while   P^T x ──> store

Here n is the number of tokens of a rank, c of a chunk, h the size of a hidden state, v the size of the vocabulary, and wp
the number of ranks. Ranks may have different numbers of tokens, which are padded to the largest number.

No rank holds the full table of a column-sharded embedding. Each rank sums its columns' gradient over the tokens of all ranks,
so no reduction over `wp` follows.

Both heads compute the gradients in the forward, so their backward does not communicate, and no rank has the logits of more than
a chunk. Without `chunk_tokens`, a vocabulary-parallel head has one chunk, of the tokens of all ranks. It needs one gather, of
the statistics of each slice, where Megatron-LM needs three all-reduces (Shoeybi et al. 2019, section 3).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.api.comm import Device, Group, Work
from sley_core.api.model import Layer, row_chunks
from sley_core.api.weights import HeadChunks, HeadLoss, LazyLogits, LogitsHead, autocast_input
from sley_core.errors import PlanError
from sley_isp.reduce_scatter import Counters, Reduction
from sley_isp.sharded_modules import ShardedModule, find_parameter_users, is_shardable

NO_TARGET = -(1 << 62)
"""The target of a token with an ignored label. It differs from every label, so that no invalid label is ignored."""


class TokenGather:
    """Gathers tensors with one row per token over `group`, whose ranks must run the same microbatches in the same order."""

    def __init__(self, group: Group, device: Device, counters: Counters) -> None:
        self.group = group
        self.device = device
        self.counters = counters

    def gather_with_padding(self, tensors: Sequence[Tensor], fill_values: Sequence[int], label: str) -> list[Tensor]:
        """Gathers `tensors[i]` [n, ...] from all ranks, and returns the results [size x largest n, ...], in which the rows of
        each rank are padded with `fill_values[i]`. Blocks.
        """
        num_tokens, device = len(tensors[0]), self.device.torch_device
        counts = torch.empty(self.group.size, dtype=torch.int64, device=device)
        self.gather([counts], [torch.full((1,), num_tokens, dtype=torch.int64, device=device)], "numbers of tokens")
        length = int(self.device.read_values(counts.max(), [num_tokens])[0])
        paddings = [[0, 0] * (tensor.ndim - 1) + [0, length - num_tokens] for tensor in tensors]
        padded = [
            F.pad(tensor, padding, value=value) if num_tokens < length else tensor.contiguous()
            for tensor, padding, value in zip(tensors, paddings, fill_values, strict=True)
        ]
        full = [tensor.new_empty((self.group.size * length, *tensor.shape[1:])) for tensor in padded]
        self.gather(full, padded, label)
        return full

    def gather(self, full: Sequence[Tensor], tensors: Sequence[Tensor], label: str) -> None:
        """Gathers `tensors[i]` [n, ...] from all ranks into `full[i]` [size x n, ...]. Blocks until sends are complete."""
        work = self.group.transport("gather").all_gather(full, tensors, label=label)
        for tensor in full:
            self.counters.add(tensor, self.group, passes=1)
        work.wait()
        work.wait_sent()

    def all_to_all(self, tensor: Tensor, channel: str, label: str) -> tuple[Tensor, Work]:
        """Starts an all-to-all of the rows of `tensor` [size, ...]. Returns the output of the exchange and the handle."""
        output = torch.empty_like(tensor)
        self.counters.add(tensor, self.group, passes=1)
        return output, self.group.transport(channel).all_to_all(output, tensor, label=label)


class ColumnEmbedding(ShardedModule):
    """Replaces the forward of an embedding whose table is sharded by columns. All ranks of the group must call it for the same
    microbatches in the same order.
    """

    def compute(self, x: Tensor, *, num_holds: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the vectors [..., h] of the tokens `x` [...], and the tokens of all ranks [size x n]. Blocks."""
        self.parts.waits.wait_for(self.group.layer)
        gather, name = self.communicator.token_gather, self.weight.name
        (ids,) = gather.gather_with_padding([x.reshape(-1)], [0], f"the tokens of {name}")
        columns = F.embedding(ids, self.weight.parameter.detach()).view(gather.group.size, len(ids) // gather.group.size, -1)
        output, work = gather.all_to_all(columns, "gather", f"the vectors of {name}")
        work.wait()
        work.wait_sent()
        vectors = output[:, : x.numel()].transpose(0, 1).flatten(1)[:, : self.weight.shape[1]]  # without padding
        return vectors.reshape(*x.shape, -1), ids

    def _reduce(self, output_gradient: Tensor, inputs: Tensor) -> None:
        """Starts to send the gradient [n, h] of the vectors to the ranks that hold the columns. A callback adds the received
        gradients to the store. inputs: the tokens of all ranks.
        """
        gather, store = self.communicator.token_gather, self.parts.store
        store.check_open(self.weight)  # before anything is sent
        size, width = gather.group.size, self.weight.parameter.shape[1]
        padding = [0, size * width - output_gradient.shape[1], 0, len(inputs) // size - len(output_gradient)]
        columns = F.pad(output_gradient, padding).view(-1, size, width).transpose(0, 1).contiguous()
        output, work = gather.all_to_all(columns, "reduce", f"the gradient of the vectors of {self.weight.name}")

        @torch.no_grad()
        def add_rows() -> None:
            rows = output.flatten(0, 1)
            if isinstance(self.module, nn.Embedding) and self.module.padding_idx is not None:
                rows.masked_fill_((inputs == self.module.padding_idx).unsqueeze(1), 0.0)
            store.add_rows(self.weight, rows, inputs)  # without a temporary tensor as large as the shard

        self.communicator.enqueue_reduction(Reduction([work], add_rows, ExitStack(), sent=columns))


def check_embeddings(layers: Sequence[Layer]) -> None:
    """Raises PlanError "embedding-hidden" if there is no plain embedding, or if another module, such as a tied head, also holds
    a table and needs its full rows.
    """

    def is_table(module: nn.Module, attribute: str) -> bool:
        return type(module) is nn.Embedding and is_shardable(module, attribute)

    tables = find_parameter_users(layers, is_table)
    if not tables:
        raise _embedding_error("no layer has a plain nn.Embedding, so there is no table to shard by columns", "remove the key")
    for table, name in find_parameter_users(layers, lambda *location: not is_table(*location)).items():
        if table in tables:
            raise _embedding_error(
                f'`{name}` shares the embedding table of `{tables[table]}` and needs its full rows, but `embedding = "hidden"` '
                "splits each row between ranks",
                "use a separate weight in that module (in `models.llama`, set `tie_embeddings = false`)",
            )


def _embedding_error(message: str, hint: str) -> PlanError:
    return PlanError("embedding-hidden", message, path=("weights", "embedding"), hint=f'{hint}, or set `embedding = "gather"`')


def find_head(layers: Sequence[Layer]) -> HeadChunks:
    """Returns the model's last linear as a head with a single chunk. Raises PlanError "head-chunks" unless the last layer has
    exactly one plain linear, and "head-vocabulary" if another module holds the same weight and needs it in full. The first
    forward checks that the layer returns the linear's output.
    """
    head = HeadChunks.find(layers, sys.maxsize, *VocabularyHead.refusal)
    weight = cast(nn.Parameter, layers[-1].module.get_submodule(head.path).weight)
    if (name := find_parameter_users(layers, lambda *location: not is_shardable(*location)).get(weight)) is not None:
        message = f"`{name}` shares the head's weight, but is neither a plain nn.Linear nor a plain nn.Embedding"
        hint = 'use a copy of the weight or a plain nn.Linear in that module, or set `head = "gather"`'
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
        """Adds the gradients of weight and bias for c tokens. gradient: the logits' gradient [c, classes]. inputs: [c, h]."""
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
    """Returns statistics of the `logits` [n, size] of a slice, [2, n] or, with smoothing, [3, n], in fp32 or higher precision:
    the log-sum-exp of the logits; the logit of the target, or -inf if the slice does not contain it; and, with smoothing, the
    sum of the logits. targets: int64 [n], indices over all classes, or NO_TARGET.
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
    """Returns the cross-entropy [n] with label smoothing, and the log-sum-exp [n] of all logits. statistics: the statistics of
    all slices, [slices, 2 or 3, n]. The loss is log_sum - (1 - smoothing) * (target's logit) - smoothing * (mean logit), 0 for
    tokens without a target, and infinite if no slice contains the target.
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
    0 for tokens without a target. targets: int64 [n], indices over all classes, or NO_TARGET. log_sum: the log-sum-exp [n] over
    all classes. smoothing: the label smoothing.
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
    """Returns whether the slice contains each target, bool [n], and the clamped index of each in the slice, int64 [n, 1]."""
    indices = targets - classes.start
    is_local = (indices >= 0) & (indices < classes.size)
    return is_local, indices.clamp(0, classes.size - 1).unsqueeze(-1)
