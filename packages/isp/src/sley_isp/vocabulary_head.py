"""Vocabulary-parallel head: each rank of `wp` multiplies the tokens of all ranks by its own rows of the weight.

    forward    x [n, h] ──gather──> [wp n, h] ──own rows──> logits [wp n, v / wp] ──statistics, gathered──> own tokens' losses
    backward   logits become their gradient P, in place;   P W ──reduce──> dx [n, h]   while   P^T [wp n, h] ──> store

The head's weight is not gathered and its gradient not reduced: the exchanges are as large as the tokens, twice. The logits
take as much memory as a rank's own would, once: their gradient overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sley_core.api.comm import REDUCE
from sley_core.api.parts import Handover
from sley_core.errors import PlanError, RunError
from sley_core.protocols import SplitLogits
from sley_isp import vocabulary_sums as sums
from sley_isp.sites import Site, as_autocast, is_plain, is_summed, linear_forward
from sley_isp.tokens import AllTokens, padded
from sley_isp.units import shard_of

if TYPE_CHECKING:
    from sley_core.api.model import Layer
    from sley_core.api.parts import GradientStore, WeightQueue
    from sley_core.protocols import MemoryPool


def find_head(layers: Sequence[Layer]) -> str:
    """Returns the name, within the last of the model's `layers`, of its one plain linear.

    Raises PlanError "head-vocabulary" if there is none, or several, or if a module that needs the full weight holds it
    too. The first forward checks that the layer returns the linear's output.
    """
    last = layers[-1]
    linears: dict[str, nn.Linear] = {name: module for name, module in last.module.named_modules() if type(module) is nn.Linear}
    if len(linears) != 1:
        found = ", ".join(f"`{name}`" for name in linears) or "none"
        message = f"the last layer `{last.name}` has one plain nn.Linear where its vocabulary can be shared; found: {found}"
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
    """Returns the PlanError "head-vocabulary"."""
    return PlanError("head-vocabulary", message, path=("weights", "head"), hint=f'{hint}; or `head = "gather"`')


class VocabularyHead:
    """Replaces the forward of the linear at `site`. is_running: returns whether an action runs; outside of one the weight is
    gathered.
    """

    def __init__(
        self,
        site: Site,
        tokens: AllTokens,
        store: GradientStore,
        pool: MemoryPool,
        queue: WeightQueue,
        is_running: Callable[[], bool],
    ) -> None:
        assert site.weight is not None, f"{site.unit} is not sharded"
        shard = shard_of(site.weight)
        self.site = site
        self.group = tokens.group
        self.store = store
        self.pool = pool
        self.is_running = is_running
        self.tokens = tokens
        self.classes = sums.Classes(shard.index * shard.size, shard.own_size, shard.shape[0])
        self.sink = Handover(self._accumulate, queue)

    def forward(self, input: Tensor) -> Tensor | Scores:
        """Returns `Scores`, whose logits only the loss computes; outside an action the full logits, with the weight
        gathered.
        """
        if self.site.is_replaced or not self.is_running():
            return linear_forward(self.site, input)
        if not torch.is_autocast_enabled(input.device.type):
            self._check(input)
        return Scores(self, as_autocast(input))

    def _check(self, x: Tensor) -> None:
        """Raises torch's own error here, and not only in the loss, if `x` has another dtype or width than the weight."""
        weight, bias = self.site.own("weight"), self.site.own("bias")
        assert weight is not None, self.site.unit
        with torch.no_grad():
            F.linear(x.new_empty((0, x.shape[-1])), weight, bias)

    # -- communication: all ranks of `wp` run the same micro-batches in the same order, so they call these alike

    def all_tokens(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns every rank's `x` [n, h] and `targets` [n], in the order of the group, each padded to one size; blocks."""
        inputs, all_targets = self.tokens.of_all([x, targets], [0, sums.NO_TARGET], "the head's inputs")
        return inputs, all_targets

    def all_slices(self, statistics: Tensor) -> Tensor:
        """Returns every slice's `statistics` [k, n], in the order of the group: [size, k, n]; blocks."""
        wholes = statistics.new_empty((self.group.size * statistics.shape[0], statistics.shape[1]))
        self.tokens.gather([wholes], [statistics], "statistics of logits")
        return wholes.view(self.group.size, *statistics.shape)

    def whole_logits(self, x: Tensor) -> Tensor:
        """Returns all classes' logits [n, classes] of this rank's `x` [n, h]; blocks."""
        most = self.tokens.most(len(x))
        inputs = x.new_empty((self.group.size * most, x.shape[1]))
        self.tokens.gather([inputs], [padded(x, most)], "the head's inputs")
        own = self.logits(inputs).view(self.group.size, most, -1)
        received = torch.empty_like(own)
        work = self.group.transport(REDUCE).all_to_all(received, own, what="logits")
        self.tokens.sent.add(own, self.group, passes=1)
        work.wait()
        work.wait_sent()
        return received.transpose(0, 1).reshape(most, -1)[: len(x), : self.classes.total]

    # -- this rank's slice

    def logits(self, inputs: Tensor) -> Tensor:
        """Returns this rank's logits [n, rows of a shard]; `own` removes the columns of padding rows."""
        weight, bias = self.site.own("weight"), self.site.own("bias")
        assert weight is not None, self.site.unit
        return F.linear(inputs, weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))

    def own(self, logits: Tensor) -> Tensor:
        """Returns the columns of real classes, a view."""
        return logits[:, : self.classes.size]

    def start_input_gradient(self, gradient: Tensor) -> _Reducing:
        """Starts the reduce-scatter of the logits' gradient [size x n, rows] times the weight, by tokens."""
        weight = self.site.own("weight")
        assert weight is not None, self.site.unit
        return _Reducing(self, gradient, weight.to(gradient.dtype))

    @torch.no_grad()
    def _accumulate(self, gradient: Tensor, inputs: Tensor) -> None:
        """Adds the shards' gradients to the store; they are summed over all tokens of `wp` already."""
        for param in self.site.trained:
            if param is self.site.bias:
                self.store.add(param, gradient.sum(0, dtype=self.store.dtype))
            else:
                self.store.add_product(param, gradient, inputs)


class _Reducing:
    """Holds the input gradient in flight; a leased buffer holds it until `finish`."""

    def __init__(self, head: VocabularyHead, gradient: Tensor, weight: Tensor) -> None:
        size = head.group.size
        own_tokens = len(gradient) // size
        transport = head.group.transport(REDUCE)
        num_scratch = transport.num_scratch_rows(own_tokens)
        self._stack = ExitStack()
        shape = (len(gradient) + num_scratch, weight.shape[1])
        buffer = self._stack.enter_context(head.pool.lease(shape, gradient.dtype, gradient.device))
        whole, scratch = buffer[: len(gradient)], buffer[len(gradient) :]
        torch.mm(gradient, weight, out=whole)
        first = head.group.coord * own_tokens
        self._own = whole[first : first + own_tokens]
        self._work = transport.reduce_scatter([whole], [scratch], what="the head's input gradient")
        head.tokens.sent.add(whole, head.group, passes=1)

    def finish(self, num_tokens: int) -> Tensor:
        """Blocks until the gradient of this rank's tokens is complete; returns it [num_tokens, h], in its own memory."""
        self._work.wait()
        result = self._own[:num_tokens].clone()
        self._work.wait_sent()
        self._stack.close()
        return result


class Scores(SplitLogits):
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
        """The dtype that the logits would have."""
        return self.x.dtype

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the sum of this rank's losses, a scalar; gathers over `wp`, so all its ranks must call it.

        labels: of this rank's tokens, shaped as `x` without its last dim.
        """
        site = self.head.site
        rows = self.x.reshape(-1, self.x.shape[-1])
        targets = labels.reshape(-1)
        targets = targets.masked_fill(targets == ignore_index, sums.NO_TARGET)
        total: Tensor = _LossSum.apply(rows, site.own("weight"), site.own("bias"), targets, self.head, smoothing)  # type: ignore[no-untyped-call]  # torch's
        return total

    def logits(self) -> Tensor:
        """Returns this rank's whole logits, [..., classes], without a graph; a collective of `wp`."""
        with torch.no_grad():
            return self.head.whole_logits(self.x.detach().reshape(-1, self.x.shape[-1])).view(self.shape)

    def __getattr__(self, name: str) -> Any:
        """Raises RunError `logits-split` for the methods of a tensor, which do not exist here."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise _touched(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises RunError `logits-split` for every torch function."""
        raise _touched(getattr(function, "__name__", str(function)))


class _LossSum(torch.autograd.Function):
    """Makes the sum of this rank's losses differentiable; the shards are inputs, with None as their gradients, as at any
    site.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _weight: Tensor, _bias: Tensor | None, targets: Tensor, head: VocabularyHead, smoothing: float
    ) -> Tensor:
        """Gathers all tokens of `wp` and the slices' statistics; saves the logits, which the backward overwrites."""
        inputs, all_targets = head.all_tokens(x, targets)
        logits = head.logits(inputs)
        found = sums.statistics(head.own(logits), all_targets, head.classes, smoothing)
        first = head.group.coord * (len(inputs) // head.group.size)
        combined = sums.combine(head.all_slices(found))
        ctx.head, ctx.smoothing, ctx.num_tokens = head, smoothing, len(x)
        ctx.save_for_backward(logits, inputs if head.site.trained else None, all_targets, combined.log_sum)
        losses = sums.losses(combined, all_targets, head.classes.total, smoothing)
        return losses[first : first + len(x)].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        """Turns the logits into their gradient in place; reduces the input's gradient, and sends the weight's to the sink."""
        head: VocabularyHead = ctx.head
        logits, inputs, targets, log_sum = ctx.saved_tensors
        sums.to_gradient(head.own(logits), targets, head.classes, log_sum, scale, ctx.smoothing)
        logits[:, head.classes.size :].zero_()
        # Started first, so that it overlaps with the weight's gradient.
        reducing = head.start_input_gradient(logits) if ctx.needs_input_grad[0] else None
        if head.site.trained and is_summed(ctx):
            assert inputs is not None, f"{head.site.unit} was unfrozen between a forward and its backward"
            head.sink(logits, inputs)
        of_input = None if reducing is None else reducing.finish(ctx.num_tokens)
        return of_input, None, None, None, None, None


def _touched(what: str) -> RunError:
    """Returns the RunError `logits-split`."""
    return RunError(
        "logits-split",
        f"`{what}` of logits of which no rank has all: the last layer must return them as its linear gives them",
        path=("weights", "head"),
        hint='use `head = "gather"` for a model or a loss that does something with its logits',
    )


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(self: Scores, *args: Any) -> Any:
        raise _touched(name)

    return refuse


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "pow", "neg", "matmul", "getitem", "len", "iter"):
    setattr(Scores, f"__{_name}__", _refuse(_name))
