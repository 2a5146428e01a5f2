"""The model's last linear and its cross-entropy in chunks of tokens, so that the logits never exist for all tokens.

    hidden [n, h] ──chunk──> logits [c, v] ──in place──> their gradient G ──> G W, the gradient of the hidden states
                                                                          └─> G^T hidden, added to the gradient of the weight

Here n is the number of all tokens, c of a chunk's tokens, v of classes, h the hidden size, and W [v, h] the weight. The
forward computes the gradients, so each product runs once, as with the plain head. Recomputing the logits in the backward would
need a fourth product (1.3 to 1.6 times the time). `torch.nn.functional.linear_cross_entropy` and Liger's kernel also compute
the gradients in the forward, but keep the weight's gradient until the backward, since they do not know the gradient of the
loss. A run knows it before the forward: it is the inverse of the batch's weight. So the weight's gradient is accumulated at
once, and only the gradient of the hidden states is kept. The backward checks the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sley_core.errors import KeyPath, PlanError, RunError
from sley_core.losses.cross_entropy import row_chunks, softmax_dtype, sum_cross_entropy, write_gradient
from sley_core.model.layers import ForwardPatch, Layer
from sley_core.model.tensors import uniform_items
from sley_core.protocols import SplitLogits

if TYPE_CHECKING:
    from sley_core.engine.parts import Parts
    from sley_core.engine.step_batch import BatchWeight

CHUNK_TOKENS_PATH = ("loss", "chunk_tokens")  # the plan key that selects chunks

AUTO_CHUNK_BYTES = 1 << 27
"""The size in bytes of a chunk's logits with `chunk_tokens = "auto"`. Smaller chunks read weight and gradient too often."""

ELEMENTWISE_METHODS = frozenset(
    {"tanh", "float", "double", "to", "contiguous", "mul", "div", "add", "sub", "neg"}
    | {f"__{name}__" for name in ("mul", "rmul", "truediv", "add", "radd", "sub", "rsub", "neg")}
)
"""The tensor methods that `LazyLogits` applies to each chunk: soft caps, scales, casts and OPT's `contiguous`."""


@dataclass
class HeadChunks:
    """The model's last linear, whose loss is computed in chunks of tokens, and the size of the chunks.

    layer: the name of the last layer. path: the name of the linear within it, "" if it is the layer. max_tokens: the maximum
    number of tokens of a chunk; None derives it from `AUTO_CHUNK_BYTES`. weight: the divisor of gradients in the running step,
    if any. is_active: whether the head's output goes to the loss; otherwise the head returns all logits. is_patched: whether a
    `LogitsHead` replaces the linear's forward.
    """

    layer: str
    path: str
    max_tokens: int | None
    weight: BatchWeight | None = None
    is_active: bool = False
    is_patched: bool = False

    @classmethod
    def find(cls, layers: Sequence[Layer], max_tokens: int | None, path: KeyPath, remedy: str) -> HeadChunks:
        """Returns the head of a model with these layers. max_tokens: the maximum number of tokens of a chunk, or None.

        Raises PlanError "head-chunks" for the plan key `path` unless the last layer has exactly one plain linear. remedy: the
        last part of the error's hint.
        """
        last_layer = layers[-1]
        names = [name for name, module in last_layer.module.named_modules() if type(module) is nn.Linear]
        if len(names) != 1:
            listed = ", ".join(f"`{name}`" for name in names) or "none"
            message = f"the last layer `{last_layer.name}` must have exactly one plain nn.Linear, but has {listed}"
            raise PlanError("head-chunks", message, path=path, hint=f"use a separate layer for the head, or {remedy}")
        return cls(last_layer.name, names[0], max_tokens)

    @property
    def name(self) -> str:
        """Returns the full name of the linear in the model."""
        return f"{self.layer}.{self.path}" if self.path else self.layer

    @contextmanager
    def expect_loss(self, weight: BatchWeight | None) -> Iterator[None]:
        """Makes the head return `LazyLogits` within the block. weight: the weight of the batch; None outside training steps."""
        self.weight, self.is_active = weight, True
        try:
            yield
        finally:
            self.is_active = False

    def slices(self, num_tokens: int, num_classes: int, itemsize: int) -> Iterator[slice]:
        """Yields slices of the tokens, of equal sizes except for a smaller last one. itemsize: the size of a logit in bytes."""
        max_tokens = self.max_tokens or max(1, AUTO_CHUNK_BYTES // (num_classes * itemsize))
        size = max(1, -(-num_tokens // -(-num_tokens // max_tokens))) if num_tokens else 1
        return uniform_items(slice(start, start + size) for start in range(0, num_tokens, size))


class LogitsHead:
    """Computes the cross-entropy of `linear`, whose forward returns `LazyLogits`. Subclasses accumulate the gradients, and may
    gather a sharded weight.

    refusal: the plan key to change if a layer or a loss needs all logits, and the error's hint. is_collective: whether ranks
    share the weight, so that all of them must compute their losses together.
    """

    refusal: tuple[KeyPath, str] = (CHUNK_TOKENS_PATH, "remove `chunk_tokens`")
    is_collective = False

    def __init__(self, chunks: HeadChunks, linear: nn.Linear) -> None:
        self.chunks = chunks
        self.linear = linear
        chunks.is_patched = True

    @property
    def num_classes(self) -> int:
        return self.linear.weight.shape[0]

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weight and the bias (or None) as leaves of the autograd graph."""
        return self.linear.weight, self.linear.bias

    def weights(self) -> AbstractContextManager[tuple[Tensor, Tensor | None]]:
        """Returns a context manager that yields the full weight and the full bias (or None)."""
        return nullcontext(self.parameters)

    def accumulate(self, gradient: Tensor, inputs: Tensor) -> None:
        """Accumulates the gradients of weight and bias. gradient: the gradient of a chunk's logits [c, v]. inputs: [c, h]."""
        raise NotImplementedError

    def cross_entropy(self, logits: LazyLogits, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the sum of the cross-entropies over `labels` int64 [...], except labels that equal `ignore_index`."""
        hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        loss = HeadLoss(logits.apply if logits.functions else None, ignore_index, smoothing)
        if not torch.is_grad_enabled():
            return self.sum_losses(loss, hidden, labels.reshape(-1))
        total: Tensor = _LossSum.apply(hidden, *self.parameters, labels.reshape(-1), self, loss)  # type: ignore[no-untyped-call]
        return total

    def sum_losses(self, loss: HeadLoss, hidden: Tensor, labels: Tensor) -> Tensor:
        """Returns the sum of the losses of `hidden` [n, h] and `labels` int64 [n]. Computes gradients if `loss` has a scale."""
        total = torch.zeros((), dtype=softmax_dtype(hidden), device=hidden.device)
        with self.weights() as (weight, bias):
            for tokens in self.chunks.slices(len(hidden), weight.shape[0], hidden.element_size()):
                logits = _linear(hidden[tokens], weight, bias)
                for rows in row_chunks(logits):
                    total += loss.replace_by_gradient(logits[rows], labels[tokens][rows])
                if loss.hidden_gradient is not None:
                    torch.mm(logits, weight.to(logits.dtype), out=loss.hidden_gradient[tokens])
                if loss.has_weight:
                    self.accumulate(logits, hidden[tokens])
                del logits  # before the next chunk is allocated
        return total

    def full_logits(self, logits: LazyLogits) -> Tensor:
        """Returns all logits [..., v]."""
        with self.weights() as (weight, bias):
            return logits.apply(_linear(logits.hidden, weight, bias))


class DirectHead(LogitsHead):
    """The head with an unsharded weight, whose gradient is accumulated in the gradient store."""

    def __init__(self, parts: Parts, chunks: HeadChunks, linear: nn.Linear) -> None:
        super().__init__(chunks, linear)
        self.store = parts.store
        names = [name for name, parameter in linear._parameters.items() if parameter is not None]
        self.params = {name: parts.registry[f"{chunks.name}.{name}"] for name in names}
        self.patch = ForwardPatch(linear, self.forward)
        for param in self.params.values():
            param.has_products = True

    def forward(self, input: Tensor) -> Any:
        """Returns `LazyLogits` if the loss follows, and the parameters have no hooks and were not replaced; else the logits."""
        has_own_parameters = all(
            self.linear._parameters[name] is param.parameter and not param.parameter._backward_hooks
            for name, param in self.params.items()
        )
        if self.chunks.is_active and has_own_parameters:
            return LazyLogits(self, autocast_input(input))
        return self.patch.__wrapped__(input)

    def accumulate(self, gradient: Tensor, inputs: Tensor) -> None:
        if (weight := self.params["weight"]) in self.store:
            self.store.add_product(weight, gradient, inputs, self.chunks.layer, counts_pass=False)
        bias = self.params.get("bias")
        if bias is not None and bias in self.store:
            self.store.add(bias, gradient.sum(0, dtype=self.store.dtype), self.chunks.layer, counts_pass=False)


def patch_head(parts: Parts, chunks: HeadChunks) -> Callable[[], None]:
    """Patches the head if this rank has it and its weight is not sharded. Returns a function that removes the patch.

    If a communicator shards the weight, it must already have patched the head; if not, raises PlanError "head-chunks".
    """
    layer = next((layer for layer in parts.layers if layer.name == chunks.layer), None)
    if layer is not None and parts.registry[f"{chunks.name}.weight"].shard is None:
        return DirectHead(parts, chunks, cast("nn.Linear", layer.module.get_submodule(chunks.path))).patch.undo
    if layer is not None and not chunks.is_patched:
        message = f"the weight of `{chunks.name}` is sharded in a way that does not support `chunk_tokens`"
        raise PlanError("head-chunks", message, path=CHUNK_TOKENS_PATH, hint="remove `chunk_tokens`, or `[model] compile`")
    return lambda: None


class LazyLogits(SplitLogits):
    """The logits of `hidden` [..., h], which only the loss computes. functions: elementwise functions of the linear output."""

    def __init__(self, head: LogitsHead, hidden: Tensor, functions: tuple[Callable[[Tensor], Tensor], ...] = ()) -> None:
        self.hidden = hidden
        self.functions = functions
        # A function holds the head, so that code that searches an output for tensors does not find those of the head.
        self._head: Callable[[], LogitsHead] = lambda: head

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self._head().num_classes)

    @property
    def is_collective(self) -> bool:
        return self._head().is_collective

    @property
    def dtype(self) -> torch.dtype:
        return self.apply(self.hidden.new_empty(0)).dtype

    def apply(self, logits: Tensor) -> Tensor:
        """Applies the functions to `logits`, the output of the linear, and returns the result."""
        for function in self.functions:
            logits = function(logits)
        return logits

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        return self._head().cross_entropy(self, labels, ignore_index, smoothing)

    @torch.no_grad()
    def logits(self) -> Tensor:
        return self._head().full_logits(self)

    def __getattr__(self, name: str) -> Any:
        """Returns a function that applies the elementwise tensor method `name` to each chunk later. Raises AttributeError for a
        name that begins with `__`, and RunError "logits-split" for all other names.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in ELEMENTWISE_METHODS:
            self._refuse(name)
        return partial(self._apply_later, name)

    def _apply_later(self, name: str, *args: Any, **kwargs: Any) -> LazyLogits:
        """Returns logits to which the loss also applies the method `name`. Raises RunError "logits-split" if it cannot."""
        is_simple = not kwargs and all(isinstance(argument, int | float | torch.dtype) for argument in args)
        if name not in ELEMENTWISE_METHODS or not is_simple:
            self._refuse(name)
        return LazyLogits(self._head(), self.hidden, (*self.functions, lambda logits: getattr(logits, name)(*args)))

    def _refuse(self, name: str) -> None:
        message = (
            f"`{name}` is called on logits that only the loss computes; the last layer may only cap, scale or cast "
            "them before it returns them"
        )
        path, hint = self._head().refusal
        raise RunError(
            "logits-split", message, path=path, hint=f"{hint} if the model or the loss processes the logits in another way"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Applies an elementwise torch function to each chunk later. Raises RunError "logits-split" for others."""
        logits = next(argument for argument in args if isinstance(argument, cls))
        rest = args[1:] if args[0] is logits else args
        return logits._apply_later(getattr(function, "__name__", str(function)), *rest, **(kwargs or {}))


for _name in ("mul", "rmul", "truediv", "add", "radd", "sub", "rsub", "neg", "pow", "matmul", "getitem", "len", "iter"):
    setattr(LazyLogits, f"__{_name}__", partialmethod(LazyLogits._apply_later, f"__{_name}__"))


@dataclass
class HeadLoss:
    """The options and the gradients of a microbatch's loss.

    function: an elementwise function of the logits, or None. smoothing: the label smoothing. scale: the factor of the
    gradients; None computes no gradients. hidden_gradient: receives the gradient of the hidden states [n, h]; None if it is not
    needed. has_weight: whether weight or bias need a gradient.
    """

    function: Callable[[Tensor], Tensor] | None
    ignore_index: int
    smoothing: float
    scale: Tensor | None = None
    hidden_gradient: Tensor | None = None
    has_weight: bool = False

    def apply(self, logits: Tensor) -> tuple[Tensor, Callable[[Tensor], object]]:
        """Returns `function(logits)` and the function's backward. Without a function, the result is `logits` itself.

        The backward takes the gradient of the result, and overwrites `logits` with the gradient of the logits.
        """
        if self.function is None:
            return logits, lambda gradient: None
        with torch.set_grad_enabled(self.scale is not None):
            leaf = logits.detach().requires_grad_()
            output = self.function(leaf)
        return output.detach().clone(), lambda gradient: logits.copy_(torch.autograd.grad(output, leaf, gradient)[0])

    def replace_by_gradient(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the sum of the losses of `logits` [n, v]. With a `scale`, overwrites `logits` with `scale` x gradient."""
        output, run_backward = self.apply(logits)
        if self.scale is None:
            return sum_cross_entropy(output, labels, self.ignore_index, self.smoothing)
        log_probabilities = torch.log_softmax(output, -1, dtype=softmax_dtype(output))
        total = F.nll_loss(log_probabilities, labels, ignore_index=self.ignore_index, reduction="sum")
        if self.smoothing:
            sums = log_probabilities.sum(-1).masked_fill(labels == self.ignore_index, 0.0)
            total = (1.0 - self.smoothing) * total - self.smoothing / logits.shape[-1] * sums.sum()
        write_gradient(log_probabilities.exp_(), labels, self.ignore_index, self.smoothing, self.scale, out=output)
        run_backward(output)
        return total


class _LossSum(torch.autograd.Function):
    """Makes the sum of the losses differentiable. The gradients of weight and bias are accumulated in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, _weight: Tensor, _bias: Tensor | None, labels: Tensor, head: LogitsHead, loss: HeadLoss
    ) -> Tensor:
        assert head.chunks.weight is not None, "a training step without the weight of its batch"
        ctx.refusal = head.refusal
        loss.scale = head.chunks.weight.inverse(hidden.new_empty((), dtype=softmax_dtype(hidden)))
        loss.hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        loss.has_weight = any(ctx.needs_input_grad[1:3])
        total = head.sum_losses(loss, hidden, labels)
        ctx.save_for_backward(loss.hidden_gradient, loss.scale)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of the hidden states. Raises RunError "loss-scaled" if `scale`, the gradient of the sum, is not
        the expected one; on CUDA, a device-side assertion fails instead.
        """
        gradient, expected = ctx.saved_tensors
        path, hint = ctx.refusal
        if scale.is_cuda:  # without a synchronisation
            torch._assert_async(scale == expected, f"a loss or a hook scales the cross-entropy: {hint}")
        elif type(scale) is Tensor and float(scale) != float(expected):  # not a fake tensor of a memory estimate
            message = f"the gradient of the cross-entropy must be {float(expected):g}, the inverse of the batch's weight"
            hint = f"{hint} if a loss or a hook scales the cross-entropy"
            raise RunError("loss-scaled", f"{message}, but is {float(scale):g}", path=path, hint=hint)
        return gradient, *[None] * 5


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(inputs, weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))


def autocast_input(x: Tensor) -> Tensor:
    """Returns `x` in the dtype to which autocast casts the input of a linear. Like autocast, does not cast fp64 or integers."""
    device_type = x.device.type
    is_cast = torch.is_autocast_enabled(device_type) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device_type)) if is_cast else x
