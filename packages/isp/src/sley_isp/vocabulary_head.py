"""Vocabulary-parallel head: each rank of `wp` multiplies the tokens of all ranks by its rows of the weight.

    forward    x [n, h] ──all_gather──> [wp n, h] ──local rows──> logits [wp n, v / wp] ──statistics, gathered──> losses [n]
    backward   logits become their gradient P, in place;   P W ──reduce_scatter──> dx [n, h]   while   P^T [wp n, h] ──> store

The head's weight is not gathered and its gradient is not reduced. Instead, there are two exchanges as large as the tokens. The
logits need as much memory as those of a rank's tokens over the full vocabulary, and their gradient overwrites them.

Megatron-LM computes the same cross-entropy with three all-reduces of maxima, targets and sums (Shoeybi et al. 2019, section 3;
megatron/core/tensor_parallel/cross_entropy.py). This module needs only one gather of the statistics of each slice, without a
maximum of all slices. It processes logits in chunks, so the extra memory is one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sley_core.api.model import row_chunks
from sley_core.api.parts import Handover
from sley_core.errors import PlanError, RunError
from sley_core.protocols import SplitLogits
from sley_isp.embedding_columns import TokenGather
from sley_isp.sharded_module import ShardedModule, autocast_input, is_shardable, needs_shard_gradients

if TYPE_CHECKING:
    from sley_core.api.model import Layer
    from sley_core.api.parts import Parts
    from sley_core.protocols import MemoryPool

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
        message = (
            f"the last layer `{last_layer.name}` must have exactly one plain nn.Linear for its vocabulary to be "
            f"sharded, but has {names}"
        )
        raise _head_error(message, "use a separate layer for the head")
    ((path, head),) = linears.items()
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            for attribute, parameter in module._parameters.items():
                if parameter is head.weight and not is_shardable(module, attribute):
                    message = f"`{name}` shares the head's weight, but is not a plain linear or embedding"
                    raise _head_error(message, "use a copy of the weight or a plain linear there")
    return path


def _head_error(message: str, hint: str) -> PlanError:
    return PlanError("head-vocabulary", message, path=("weights", "head"), hint=f'{hint}, or set `head = "gather"`')


class VocabularyHead:
    """Replaces the forward of the linear in `module`.

    All ranks of `wp` run the same microbatches in the same order, and so make the same exchanges.
    """

    def __init__(self, module: ShardedModule, token_gather: TokenGather, parts: Parts, pool: MemoryPool) -> None:
        assert module.weight is not None, f"{module.name} is not sharded"
        shard = module.weight.row_shard
        self.module = module
        self.token_gather = token_gather
        self.group = token_gather.group
        self.store = parts.store
        self.pool = pool
        self.classes = ClassRange(shard.index * shard.size, shard.own_size, shard.shape[0])
        self.sink = Handover(self._accumulate, parts.queue)

    def forward(self, input: Tensor) -> Tensor | LazyLogits:
        """Returns `LazyLogits` for the loss. Outside an action, gathers the weight and returns full logits."""
        module = self.module
        if module.has_replaced_weights or not module.communicator.is_running:
            return module.forward(input)
        if not torch.is_autocast_enabled(input.device.type):
            with torch.no_grad():  # so that torch raises here, and not in the loss, if dtypes or widths differ
                F.linear(input.new_empty((0, input.shape[-1])), self.shard, module.shard("bias"))
        return LazyLogits(self, autocast_input(input))

    @property
    def shard(self) -> Tensor:
        """This rank's rows of the weight."""
        shard = self.module.shard("weight")
        assert shard is not None, self.module.name
        return shard

    def padded_logits(self, inputs: Tensor) -> Tensor:
        """Returns this rank's logits [n, rows of a shard], including the columns of padding rows."""
        bias = self.module.shard("bias")
        return F.linear(inputs, self.shard.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))

    def remove_padding(self, logits: Tensor) -> Tensor:
        """Returns a view of `logits` without the columns of padding rows."""
        return logits[:, : self.classes.size]

    def gather_statistics(self, statistics: Tensor) -> Tensor:
        """Gathers `statistics` [k, n] of this rank's slice, and returns those of all slices, [size, k, n]. Blocks."""
        gathered = statistics.new_empty((self.group.size * statistics.shape[0], statistics.shape[1]))
        self.token_gather.gather([gathered], [statistics], "statistics of logits")
        return gathered.view(self.group.size, *statistics.shape)

    def full_logits(self, x: Tensor) -> Tensor:
        """Returns the logits [n, classes] of this rank's inputs `x` [n, h]. Blocks."""
        (inputs,) = self.token_gather.gather_with_padding([x], [0], "the head's inputs")
        logits = self.padded_logits(inputs).view(self.group.size, len(inputs) // self.group.size, -1)
        output = torch.empty_like(logits)
        work = self.group.transport("reduce").all_to_all(output, logits, label="logits")
        self.token_gather.counters.sent.add(logits, self.group, passes=1)
        work.wait()
        work.wait_sent()
        return output.transpose(0, 1).flatten(1)[: len(x), : self.classes.total]

    @contextmanager
    def reduce_input_gradient(self, gradient: Tensor, num_tokens: int) -> Iterator[list[Tensor]]:
        """Reduce-scatters the gradient of the head's inputs while the block runs.

        gradient: the logits' gradient [size x n, rows]. num_tokens: the number of this rank's tokens. Yields a list, to which
        the end of the block appends the input gradient of this rank's tokens, [num_tokens, h].
        """
        results: list[Tensor] = []
        tokens_per_rank = len(gradient) // self.group.size
        transport = self.group.transport("reduce")
        shape = (len(gradient) + transport.num_scratch_rows(tokens_per_rank), self.shard.shape[1])
        with self.pool.lease(shape, gradient.dtype, gradient.device) as buffer:
            full = buffer[: len(gradient)]
            torch.mm(gradient, self.shard.to(gradient.dtype), out=full)
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


class LazyLogits(SplitLogits):
    """Represents the logits of inputs `x` [..., h], which only the loss computes."""

    def __init__(self, head: VocabularyHead, x: Tensor) -> None:
        self.head = head
        self.x = x

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full logits."""
        return (*self.x.shape[:-1], self.head.classes.total)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the sum of this rank's losses, a scalar. A collective over `wp`.

        labels: the labels of this rank's tokens, with the shape of `x` without its last dim.
        """
        module = self.head.module
        rows = self.x.reshape(-1, self.x.shape[-1])
        targets = labels.reshape(-1)
        targets = targets.masked_fill(targets == ignore_index, NO_TARGET)
        total: Tensor = _LossSum.apply(rows, module.shard("weight"), module.shard("bias"), targets, self.head, smoothing)  # type: ignore[no-untyped-call]
        return total

    def logits(self) -> Tensor:
        """Returns the full logits of this rank's tokens, [..., classes], without a graph. A collective over `wp`."""
        with torch.no_grad():
            return self.head.full_logits(self.x.detach().reshape(-1, self.x.shape[-1])).view(self.shape)

    def __getattr__(self, name: str) -> Any:
        """Raises RunError `logits-split` for all methods of a tensor."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise _split_error(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises RunError `logits-split` for every torch function."""
        raise _split_error(getattr(function, "__name__", str(function)))


def _split_error(name: str) -> RunError:
    return RunError(
        "logits-split",
        f"`{name}` is called on logits that are split across ranks, but the last layer must return them unchanged",
        path=("weights", "head"),
        hint='set `head = "gather"` if a model or a loss processes its logits',
    )


def _raising_method(name: str) -> Callable[..., Any]:
    def method(self: LazyLogits, *args: Any) -> Any:
        raise _split_error(name)

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "pow", "neg", "matmul", "getitem", "len", "iter"):
    setattr(LazyLogits, f"__{_name}__", _raising_method(_name))


class _LossSum(torch.autograd.Function):
    """Makes the sum of this rank's losses differentiable. The shards are inputs, whose gradients are None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _weight: Tensor, _bias: Tensor | None, targets: Tensor, head: VocabularyHead, smoothing: float
    ) -> Tensor:
        """Gathers the tokens of `wp` and the statistics of all slices. Saves the logits, which the backward overwrites."""
        inputs, all_targets = head.token_gather.gather_with_padding([x, targets], [0, NO_TARGET], "the head's inputs")
        logits = head.padded_logits(inputs)
        slice_statistics = logit_statistics(head.remove_padding(logits), all_targets, head.classes, smoothing)
        statistics = combine_statistics(head.gather_statistics(slice_statistics))
        start = head.group.coord * (len(inputs) // head.group.size)
        ctx.head, ctx.smoothing, ctx.num_tokens = head, smoothing, len(x)
        ctx.save_for_backward(logits, inputs if head.module.trainable_params else None, all_targets, statistics.log_sum)
        return token_losses(statistics, all_targets, head.classes.total, smoothing)[start : start + len(x)].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        """Overwrites the logits with their gradient. Reduces the input's gradient while it computes that of the weight."""
        head: VocabularyHead = ctx.head
        logits, inputs, targets, log_sum = ctx.saved_tensors
        logits_to_gradient(head.remove_padding(logits), targets, head.classes, log_sum, scale, ctx.smoothing)
        logits[:, head.classes.size :].zero_()

        def accumulate() -> None:
            if head.module.trainable_params and needs_shard_gradients(ctx):
                assert inputs is not None, f"{head.module.name} was unfrozen between a forward and its backward"
                head.sink(logits, inputs)

        if not ctx.needs_input_grad[0]:
            accumulate()
            return None, None, None, None, None, None
        with head.reduce_input_gradient(logits, ctx.num_tokens) as results:
            accumulate()
        return results[0], None, None, None, None, None


class ClassRange(NamedTuple):
    """The classes of a slice: `size` of all `total` classes, from `start` on. The last slices may be empty."""

    start: int
    size: int
    total: int


class Statistics(NamedTuple):
    """Statistics of the logits of n tokens, each [n].

    log_sum: the log of the sum of all exponentials. target: the target's logit, or -inf if no slice has the target; then the
    loss is infinite, which ends the run without a device synchronisation here. logit_sum: the sum of all logits, or None.
    """

    log_sum: Tensor
    target: Tensor
    logit_sum: Tensor | None


def logit_statistics(logits: Tensor, targets: Tensor, classes: ClassRange, smoothing: float) -> Tensor:
    """Returns the `Statistics` of a slice's `logits` [n, size] as [2, n], or [3, n] with smoothing, at least in fp32.

    targets: int64 [n], indices over all classes, or NO_TARGET.
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


def combine_statistics(slice_statistics: Tensor) -> Statistics:
    """Combines the statistics of all slices, [slices, 2 or 3, n]."""
    logit_sum = slice_statistics[:, 2].sum(0) if slice_statistics.shape[1] == 3 else None
    return Statistics(slice_statistics[:, 0].logsumexp(0), slice_statistics[:, 1].amax(0), logit_sum)


def token_losses(statistics: Statistics, targets: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Returns the cross-entropy [n] with label smoothing: log_sum - (1 - smoothing) target - smoothing mean.

    The result is 0 for tokens without a target.
    """
    result = statistics.log_sum - (1.0 - smoothing) * statistics.target
    if statistics.logit_sum is not None:
        result -= smoothing / num_classes * statistics.logit_sum
    return torch.where(targets == NO_TARGET, 0.0, result)


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
