"""Vocabulary-parallel head: each rank of `wp` multiplies the tokens of all ranks by its own rows of the weight.

    forward    x [n, h] ──all_gather──> [wp n, h] ──own rows──> logits [wp n, v / wp] ──statistics, gathered──> losses [n]
    backward   logits become their gradient P, in place;   P W ──reduce_scatter──> dx [n, h]   while   P^T [wp n, h] ──> store

The head's weight is not gathered and its gradient not reduced: the exchanges are as large as the tokens, twice. The logits
take as much memory as a rank's own would, once: their gradient overwrites them.

Megatron-LM computes the same cross-entropy with three all-reduces, of maxima, targets and sums (Shoeybi et al. 2019, section 3;
megatron/core/tensor_parallel/cross_entropy.py). Here one gather has every slice's log of its sum, its target and its sum, and
waits for no maximum. Logits are processed in chunks, so the extra memory is one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sley_core.api.model import chunks
from sley_core.api.parts import Handover
from sley_core.errors import PlanError, RunError
from sley_core.protocols import SplitLogits
from sley_isp.embedding_columns import TokenGather
from sley_isp.param_group import shard_of
from sley_isp.sharded_module import ShardedModule, as_autocast, is_plain, is_summed

if TYPE_CHECKING:
    from sley_core.api.model import Layer
    from sley_core.api.parts import Parts
    from sley_core.protocols import MemoryPool

NO_TARGET = -(1 << 62)
"""The target of a token whose label is ignored; no label has this value, so that a wrong label is not ignored too."""


def find_head(layers: Sequence[Layer]) -> str:
    """Returns the name, within the last of the model's `layers`, of its one plain linear.

    Raises PlanError "head-vocabulary" if there is none, or several, or if a module that needs the full weight holds it
    too. The first forward checks that the layer returns the linear's output.
    """
    last = layers[-1]
    linears: dict[str, nn.Linear] = {name: module for name, module in last.module.named_modules() if type(module) is nn.Linear}
    if len(linears) != 1:
        names = ", ".join(f"`{name}`" for name in linears) or "none"
        message = f"the last layer `{last.name}` needs one plain nn.Linear whose vocabulary can be sharded; it has: {names}"
        raise _refused(message, "give the head a layer of its own")
    ((path, head),) = linears.items()
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            for attribute, parameter in module._parameters.items():
                if parameter is head.weight and not is_plain(module, attribute):
                    message = f"`{name}` holds the head's weight too, and is no plain linear or embedding"
                    raise _refused(message, "copy the weight there, or call a linear")
    return path


def _refused(message: str, hint: str) -> PlanError:
    return PlanError("head-vocabulary", message, path=("weights", "head"), hint=f'{hint}; or `head = "gather"`')


class VocabularyHead:
    """Replaces the forward of the linear of `module`. All ranks of `wp` run the same micro-batches in the same order, and so
    call its exchanges alike.
    """

    def __init__(self, module: ShardedModule, tokens: TokenGather, parts: Parts, pool: MemoryPool) -> None:
        assert module.weight is not None, f"{module.name} is not sharded"
        shard = shard_of(module.weight)
        self.module = module
        self.tokens = tokens
        self.group = tokens.group
        self.store = parts.store
        self.pool = pool
        self.classes = Classes(shard.index * shard.size, shard.own_size, shard.shape[0])
        self.sink = Handover(self._accumulate, parts.queue)

    def forward(self, input: Tensor) -> Tensor | LazyLogits:
        """Returns `LazyLogits`, which only the loss computes; outside an action full logits, with the weight gathered."""
        module = self.module
        if module.is_replaced or not module.communicator.is_running:
            return module.forward(input)
        if not torch.is_autocast_enabled(input.device.type):
            with torch.no_grad():  # torch's own error here, and not in the loss, if dtypes or widths differ
                F.linear(input.new_empty((0, input.shape[-1])), self.shard, module.shard("bias"))
        return LazyLogits(self, as_autocast(input))

    @property
    def shard(self) -> Tensor:
        """This rank's rows of the weight."""
        shard = self.module.shard("weight")
        assert shard is not None, self.module.name
        return shard

    def logits(self, inputs: Tensor) -> Tensor:
        """Returns this rank's logits [n, rows of a shard]; `own` removes the columns of padding rows."""
        bias = self.module.shard("bias")
        return F.linear(inputs, self.shard.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))

    def own(self, logits: Tensor) -> Tensor:
        """Returns the columns of real classes, a view."""
        return logits[:, : self.classes.size]

    def gather_statistics(self, statistics: Tensor) -> Tensor:
        """Returns every slice's `statistics` [k, n], in the order of the group: [size, k, n]; blocks."""
        every = statistics.new_empty((self.group.size * statistics.shape[0], statistics.shape[1]))
        self.tokens.gather([every], [statistics], "statistics of logits")
        return every.view(self.group.size, *statistics.shape)

    def full_logits(self, x: Tensor) -> Tensor:
        """Returns all classes' logits [n, classes] of this rank's `x` [n, h]; blocks."""
        (inputs,) = self.tokens.all_tokens([x], [0], "the head's inputs")
        own = self.logits(inputs).view(self.group.size, len(inputs) // self.group.size, -1)
        received = torch.empty_like(own)
        work = self.group.transport("reduce").all_to_all(received, own, what="logits")
        self.tokens.counters.sent.add(own, self.group, passes=1)
        work.wait()
        work.wait_sent()
        return received.transpose(0, 1).flatten(1)[: len(x), : self.classes.total]

    @contextmanager
    def reduce_input_gradient(self, gradient: Tensor, num_tokens: int) -> Iterator[list[Tensor]]:
        """Reduce-scatters the logits' gradient [size x n, rows] times the weight, by tokens, while the block runs.

        Yields a list, which after the block has the gradient of this rank's tokens [num_tokens, h], in its own memory.
        """
        result: list[Tensor] = []
        own_tokens = len(gradient) // self.group.size
        transport = self.group.transport("reduce")
        shape = (len(gradient) + transport.num_scratch_rows(own_tokens), self.shard.shape[1])
        with self.pool.lease(shape, gradient.dtype, gradient.device) as buffer:
            full = buffer[: len(gradient)]
            torch.mm(gradient, self.shard.to(gradient.dtype), out=full)
            work = transport.reduce_scatter([full], [buffer[len(gradient) :]], what="the head's input gradient")
            self.tokens.counters.sent.add(full, self.group, passes=1)
            yield result
            work.wait()
            result.append(full.narrow(0, self.group.coord * own_tokens, num_tokens).clone())
            work.wait_sent()

    @torch.no_grad()
    def _accumulate(self, gradient: Tensor, inputs: Tensor) -> None:
        """Adds the shards' gradients to the store; they are summed over all tokens of `wp` already."""
        for param in self.module.trained:
            if param is self.module.bias:
                self.store.add(param, gradient.sum(0, dtype=self.store.dtype))
            else:
                self.store.add_product(param, gradient, inputs)


class LazyLogits(SplitLogits):
    """Stands for logits that are not computed yet: the loss computes its sum of losses from `x` [..., h]."""

    def __init__(self, head: VocabularyHead, x: Tensor) -> None:
        self.head = head
        self.x = x

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the full logits would have."""
        return (*self.x.shape[:-1], self.head.classes.total)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the sum of this rank's losses, a scalar; gathers over `wp`, so all its ranks must call it.

        labels: of this rank's tokens, shaped as `x` without its last dim.
        """
        module = self.head.module
        rows = self.x.reshape(-1, self.x.shape[-1])
        targets = labels.reshape(-1)
        targets = targets.masked_fill(targets == ignore_index, NO_TARGET)
        total: Tensor = _LossSum.apply(rows, module.shard("weight"), module.shard("bias"), targets, self.head, smoothing)  # type: ignore[no-untyped-call]  # torch's
        return total

    def logits(self) -> Tensor:
        """Returns this rank's full logits, [..., classes], without a graph; a collective of `wp`."""
        with torch.no_grad():
            return self.head.full_logits(self.x.detach().reshape(-1, self.x.shape[-1])).view(self.shape)

    def __getattr__(self, name: str) -> Any:
        """Raises RunError `logits-split` for the methods of a tensor, which do not exist here."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise _split(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises RunError `logits-split` for every torch function."""
        raise _split(getattr(function, "__name__", str(function)))


def _split(name: str) -> RunError:
    return RunError(
        "logits-split",
        f"`{name}` of logits that are split over ranks: the last layer must return its linear's result unchanged",
        path=("weights", "head"),
        hint='use `head = "gather"` for a model or a loss that does something with its logits',
    )


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(self: LazyLogits, *args: Any) -> Any:
        raise _split(name)

    return refuse


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "pow", "neg", "matmul", "getitem", "len", "iter"):
    setattr(LazyLogits, f"__{_name}__", _refuse(_name))


class _LossSum(torch.autograd.Function):
    """Makes the sum of this rank's losses differentiable; the shards are inputs, with None as their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _weight: Tensor, _bias: Tensor | None, targets: Tensor, head: VocabularyHead, smoothing: float
    ) -> Tensor:
        """Gathers all tokens of `wp` and the slices' statistics; saves the logits, which the backward overwrites."""
        inputs, all_targets = head.tokens.all_tokens([x, targets], [0, NO_TARGET], "the head's inputs")
        logits = head.logits(inputs)
        combined = combine(head.gather_statistics(statistics(head.own(logits), all_targets, head.classes, smoothing)))
        first = head.group.coord * (len(inputs) // head.group.size)
        ctx.head, ctx.smoothing, ctx.num_tokens = head, smoothing, len(x)
        ctx.save_for_backward(logits, inputs if head.module.trained else None, all_targets, combined.log_sum)
        return losses(combined, all_targets, head.classes.total, smoothing)[first : first + len(x)].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        """Turns the logits into their gradient in place; the input's gradient is reduced while the weight's is computed."""
        head: VocabularyHead = ctx.head
        logits, inputs, targets, log_sum = ctx.saved_tensors
        to_gradient(head.own(logits), targets, head.classes, log_sum, scale, ctx.smoothing)
        logits[:, head.classes.size :].zero_()

        def accumulate() -> None:
            if head.module.trained and is_summed(ctx):
                assert inputs is not None, f"{head.module.name} was unfrozen between a forward and its backward"
                head.sink(logits, inputs)

        if not ctx.needs_input_grad[0]:
            accumulate()
            return None, None, None, None, None, None
        with head.reduce_input_gradient(logits, ctx.num_tokens) as result:
            accumulate()
        return result[0], None, None, None, None, None


class Classes(NamedTuple):
    """Names the classes of a slice: `size` from `first` on, of `total`. The last slices may be empty."""

    first: int
    size: int
    total: int


class Combined(NamedTuple):
    """Holds per token [n]: the log of the sum of all exponentials, the target's logit, and the sum of all logits or None.

    A target that no slice has is -inf: the loss is then infinite, which ends the run without a device synchronisation here.
    """

    log_sum: Tensor
    target: Tensor
    logit_sum: Tensor | None


def statistics(logits: Tensor, targets: Tensor, classes: Classes, smoothing: float) -> Tensor:
    """Returns what peers need of a slice's `logits` [n, size]: [3, n] with smoothing, else [2, n]; fp32 at least.

    targets: int64 [n], of all classes, or NO_TARGET.
    """
    result = logits.new_full(
        (3 if smoothing else 2, len(logits)), -torch.inf, dtype=torch.promote_types(logits.dtype, torch.float32)
    )
    result[2:] = 0.0
    if not classes.size:
        return result
    inside, local = _local(targets, classes)
    for rows in chunks(logits):
        part = logits[rows].to(result.dtype)
        torch.logsumexp(part, -1, out=result[0, rows])
        result[1, rows] = torch.where(inside[rows], part.gather(-1, local[rows]).squeeze(-1), -torch.inf)
        if smoothing:
            torch.sum(part, -1, out=result[2, rows])
    return result


def combine(parts: Tensor) -> Combined:
    """Combines the `statistics` of all slices, [slices, k, n]."""
    logit_sum = parts[:, 2].sum(0) if parts.shape[1] == 3 else None
    return Combined(parts[:, 0].logsumexp(0), parts[:, 1].amax(0), logit_sum)


def losses(combined: Combined, targets: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Returns the cross-entropy of every token against its smoothed target, [n]; 0 for a token without a target.

    A share `smoothing` of the target is spread evenly: log_sum - (1 - smoothing) target - smoothing mean.
    """
    result = combined.log_sum - (1.0 - smoothing) * combined.target
    if combined.logit_sum is not None:
        result -= smoothing / num_classes * combined.logit_sum
    return torch.where(targets == NO_TARGET, 0.0, result)


def to_gradient(logits: Tensor, targets: Tensor, classes: Classes, log_sum: Tensor, scale: Tensor, smoothing: float) -> None:
    """Overwrites a slice's `logits` [n, size] with the gradient of the sum of losses, times the scalar `scale`.

    It is softmax minus the smoothed target; 0 for a token without a target.
    """
    if not classes.size:
        return
    inside, local = _local(targets, classes)
    of_target = torch.where(inside, log_sum.new_full((), smoothing - 1.0), 0.0).unsqueeze(-1)
    scales = torch.where(targets == NO_TARGET, 0.0, scale.to(log_sum.dtype)).unsqueeze(-1)
    for rows in chunks(logits):
        part = (logits[rows] - log_sum[rows].unsqueeze(-1)).exp_()
        if smoothing:
            part -= smoothing / classes.total
        part.scatter_add_(-1, local[rows], of_target[rows])
        torch.mul(part, scales[rows], out=logits[rows])


def _local(targets: Tensor, classes: Classes) -> tuple[Tensor, Tensor]:
    """Returns whether the slice has each target [n], and its index there [n, 1]; some valid index if not."""
    local = targets - classes.first
    inside = (local >= 0) & (local < classes.size)
    return inside, local.clamp(0, classes.size - 1).unsqueeze(-1)
