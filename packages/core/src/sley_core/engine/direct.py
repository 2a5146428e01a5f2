"""Adds weight gradients of linears and embeddings to the gradient store without autograd, at once or deferred.

The product g^T x of the output gradient g and the input x is added directly to the gradient's view (`addmm`), whereas autograd
would allocate a result that the store then adds. The kernel chooses the order within the product, so fp32 results may differ in
the last bits. Rows of an embedding table's gradient are added one by one in the store's dtype, in the order of the tokens, so
no dense gradient of the table is allocated.

A split backward has the actions I and W but traverses the graph once, in I: linears put (g, x) into a queue instead of
multiplying them, and W adds the products to the store. Other parameters get their gradients in I. A recomputation runs once.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from sley_core.engine.gradients import GradientStore
from sley_core.engine.parts import Parts
from sley_core.engine.registry import Param
from sley_core.errors import RunError
from sley_core.model.layers import ForwardPatch
from sley_core.model.tensors import is_plain, shares_storage, sum_of_bits, version_of

ActionKey = tuple[int, int]
"""The chunk and the microbatch of an I action (input gradients) and its W action (weight gradients)."""

DeferredProduct = Callable[[], None]
"""A function that computes a deferred product and adds it to the gradient."""


class WeightQueue:
    """Holds the products that each I action (input gradients) defers to its W action (weight gradients). I opens
    `collect(key)`, in which linears call `put`, and W calls `run(key)`. on_last_product: if not None, it is called with a
    parameter after the parameter's last product of a `run`.
    """

    def __init__(self) -> None:
        self.on_last_product: Callable[[Param], None] | None = None
        self._queued: dict[ActionKey, list[tuple[DeferredProduct, Param | None]]] = {}
        self._open: ActionKey | None = None

    @property
    def is_collecting(self) -> bool:
        """Returns whether a `collect` block is open."""
        return self._open is not None

    @contextmanager
    def collect(self, key: ActionKey) -> Iterator[None]:
        """Makes `put` queue products for the W action of `key` within the block."""
        assert self._open is None, f"I of {key} within that of {self._open}"
        self._queued[key] = []
        self._open = key
        try:
            yield
        finally:
            self._open = None

    def put(self, product: DeferredProduct, param: Param | None = None) -> None:
        """Queues `product` for the W action of the open `collect` block. param: the weight, for `on_last_product`, or None."""
        assert self._open is not None, "no I is running"
        self._queued[self._open].append((product, param))

    @torch.no_grad()
    def run(self, key: ActionKey) -> None:
        """Calls the products that the I action of `key` queued, and frees the tensors of each product before it calls the next.
        Calls `on_last_product` with a parameter after the parameter's last product.
        """
        queued = self._queued.pop(key)
        num_remaining = Counter(param for _, param in queued)
        queued.reverse()
        while queued:
            product, param = queued.pop()
            product()
            del product  # frees its tensors before the next product
            num_remaining[param] -= 1
            if param is not None and not num_remaining[param] and self.on_last_product is not None:
                self.on_last_product(param)

    def clear(self) -> None:
        """Discards all products."""
        self._queued.clear()
        self._open = None


@dataclass(eq=False)
class WeightGradientSink:
    """Receives the factors of one weight's gradient. Multiplies them at once, or queues them while an I action (input
    gradients) collects products for its W action (weight gradients). Between I and W, a hook or the backward of another branch
    may write in place to a tensor that shares memory with an output gradient. So such gradients are copied until the first W
    has shown whether this happens, and later only if it did. multiply: adds the product of an output gradient and an input to
    the weight's gradient. param: the weight, for `on_last_product`.
    """

    multiply: Callable[[Tensor, Tensor], None]
    queue: WeightQueue
    param: Param | None = None
    _copies: bool | None = field(default=None, init=False)

    def __call__(self, rows: Tensor, inputs: Tensor, *, is_shared: bool = False) -> None:
        """Multiplies or queues the output gradient `rows` [n, out] and `inputs`: [n, in], or the tokens [n] of an embedding.
        is_shared: the result of `shares_memory` for the output gradient.
        """
        if not self.queue.is_collecting:
            self.multiply(rows, inputs)
            return
        copied = rows.clone() if is_shared and self._copies is not False else None
        product = partial(self._multiply, rows, inputs, copied, version_of(rows), version_of(inputs))
        self.queue.put(product, self.param)

    def shares_memory(self, gradient: Tensor) -> bool:
        """Returns whether `gradient` will be queued and other tensors share its memory. Call this before making views of it."""
        if not self.queue.is_collecting:
            return False
        tensors: int = gradient._use_count()  # type: ignore[attr-defined]
        return tensors > 1 or shares_storage(gradient)

    def _multiply(self, rows: Tensor, inputs: Tensor, copied: Tensor | None, version: int, version_of_inputs: int) -> None:
        """Multiplies the queued factors. Raises RunError `gradient-written` if a factor was written after it was queued."""
        if copied is not None and self._copies is None:
            current, recorded = sum_of_bits(rows), sum_of_bits(copied)
            self._copies = current is not None and recorded is not None and not torch.equal(current, recorded)
        if version_of(inputs) != version_of_inputs or (copied is None and version_of(rows) != version):
            label = f"the parameter {self.param.name!r}" if self.param is not None else "a sharded linear"
            message = (
                f"between the two halves of the backward of {label}, a hook or the backward of another layer writes in place "
                "to the saved input or to the gradient of the output"
            )
            hint = (
                "return a new tensor instead (`clamp(...)`, not `clamp_`), or use a schedule without splits (`pp.one_f_one_b`)"
            )
            raise RunError("gradient-written", message, hint=hint)
        self.multiply(rows if copied is None else copied, inputs)


BiasSink = Callable[[Tensor], None]
"""A function that adds the sum of the rows of an output gradient [n, out] to a bias's gradient [out]."""


class DirectLinear(torch.autograd.Function):
    """Computes `F.linear`. If the backward adds to the weight's `grad`, it passes the factors of the gradient to `sink`; for
    `autograd.grad`, it returns the gradient. bias_sink: adds the bias's gradient; None leaves this to autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: WeightGradientSink, bias_sink: BiasSink | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        ctx.bias_sink = bias_sink
        return no_view(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        is_shared = ctx.sink.shares_memory(gradient)
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        input_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        bias_gradient = None
        if ctx.needs_input_grad[2]:
            if ctx.bias_sink is not None and not torch.is_grad_enabled() and GradientUse.find(ctx, 2) is GradientUse.SUM:
                ctx.bias_sink(rows)
            else:
                bias_gradient = rows.sum(0)
        use = GradientUse.find(ctx)
        weight_gradient = None
        if use is GradientUse.SUM and not torch.is_grad_enabled():
            ctx.sink(rows, inputs, is_shared=is_shared)
        elif use is not GradientUse.NOTHING:
            weight_gradient = rows.t() @ inputs  # with `create_graph`, it is differentiated again
        return input_gradient, weight_gradient, bias_gradient, None, None


def no_view(result: Tensor) -> Tensor:
    """Returns `result` if it is not a view, else a tensor with the same memory that autograd does not treat as a view. Autograd
    forbids in-place writes to views that a custom function returns.
    """
    no_view: Tensor = torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result
    return no_view


class GradientUse(Enum):
    """How the running backward uses a weight's gradient."""

    NOTHING = "autograd.grad of other tensors"
    SUM = "backward, which adds to `grad`"
    VALUE = "autograd.grad of the weight"

    @classmethod
    def find(cls, ctx: Any, index: int = 1) -> "GradientUse":
        """Returns how the running backward uses the gradient of a weight. index: the index of the weight, a leaf, among the
        inputs of the autograd function of `ctx`. A program may mix `backward` and `autograd.grad`, so each backward calls this.
        """
        accumulation = ctx.next_functions[index][0]
        if accumulation is None:
            return cls.NOTHING
        try:
            return cls.SUM if torch._C._will_engine_execute_node(accumulation) else cls.NOTHING
        except RuntimeError:  # "a leaf node was passed": the leaf's gradient is wanted
            return cls.VALUE


def linear_forward(
    linear: nn.Linear, weight: Tensor, sink: WeightGradientSink, bias: Tensor | None, bias_sink: BiasSink | None, input: Tensor
) -> Tensor:
    """Returns the output of `linear` for `input` (models may pass `input` by name). Replaces the module's forward while a run
    is open. weight, bias: the parameters in the gradient store; autograd handles other parameters that the module may have now.
    sink: receives the factors of the weight's gradient. bias_sink: adds the bias's gradient; None leaves this to autograd.
    """
    current_weight = linear.weight
    # Autograd handles frozen weights, whose input need not be kept, weights that a program put in place of the store's, and
    # weights with hooks, which are called with the gradient that autograd computes.
    is_own = current_weight is weight and current_weight.requires_grad and not current_weight._backward_hooks
    if not is_own or not torch.is_grad_enabled() or _is_special_input(input):
        return F.linear(input, current_weight, linear.bias)
    is_own_bias = linear.bias is bias and bias is not None and not bias._backward_hooks
    sink_of_bias = bias_sink if is_own_bias else None
    result: Tensor = DirectLinear.apply(input, current_weight, linear.bias, sink, sink_of_bias)  # type: ignore[no-untyped-call]
    return result


def _is_special_input(input: Tensor) -> bool:
    """Returns whether torch must handle `input`: under autocast, functorch or forward AD, or if it is not a plain tensor."""
    is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return is_transformed or not is_plain(input) or torch.is_autocast_enabled(input.device.type)


def patch_layers(parts: Parts, *, splits_backwards: bool) -> Callable[[], None]:
    """Patches plain linears and embeddings to add their weight gradients to the store directly. Returns a function that removes
    the patches. With `accumulation = "direct"`, patches linears whose weight and gradient have the same dtype, since not every
    device can accumulate a bf16 product into fp32 in one call. If backwards are split, patches all linears. If the order of
    sums is fixed, patches all linears (with their biases) and all embeddings. Skips modules with a sharded parameter, which a
    communicator handles, and modules whose weight is not a parameter (`weight_norm`) or whose forward has been replaced.
    """
    store, registry, queue = parts.store, parts.registry, parts.queue
    fixed_order = store.reduction.has_fixed_order
    all_types = splits_backwards or fixed_order
    linears = parts.precision.accumulation == "direct"
    patches = ExitStack()
    if linears or all_types:
        queue.on_last_product = store.count_pass
    for layer in parts.layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            if is_plain_linear(module) and (all_types or (linears and module.weight.dtype == store.dtype)):
                add_gradient: Callable[..., None] = store.add_product
            elif fixed_order and is_plain_embedding(module):
                add_gradient = store.add_rows
            else:
                continue
            attributes = (key for key, parameter in module._parameters.items() if parameter is not None)
            if any(registry[f"{name}.{attribute}"].shard is not None for attribute in attributes):
                continue
            param = registry[f"{name}.weight"]
            sink = WeightGradientSink(partial(add_gradient, param, layer=layer.name, counts_pass=False), queue, param)
            param.has_products = True
            if isinstance(module, nn.Embedding):
                forward: Callable[..., Tensor] = partial(embedding_forward, module, module.weight, sink)
            else:
                bias_sink = None
                if fixed_order and isinstance(module.bias, nn.Parameter):
                    bias = registry[f"{name}.bias"]
                    bias.has_products = True
                    # Communicators do the same with sharded biases.
                    bias_sink = partial(_add_bias, store, bias, layer.name)
                forward = partial(linear_forward, module, module.weight, sink, module.bias, bias_sink)
            patches.callback(ForwardPatch(module, forward).undo)
    return patches.close


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether `module` is an `nn.Linear`, not a subclass, with its weight as a parameter and an unpatched forward."""
    is_own = type(module) is nn.Linear and "forward" not in module.__dict__
    return is_own and module._parameters.get("weight") is not None


class DirectEmbedding(torch.autograd.Function):
    """Computes `F.embedding`. If the backward adds to the weight's `grad`, it passes the output gradient and the tokens to
    `sink`; for `autograd.grad`, it returns the gradient of the table.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None, sink: WeightGradientSink) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sink, ctx.padding_idx, ctx.num_rows = sink, padding_idx, weight.shape[0]
        return no_view(F.embedding(tokens, weight, padding_idx))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        (tokens,) = ctx.saved_tensors
        use = GradientUse.find(ctx)
        if use is GradientUse.SUM and not torch.is_grad_enabled():
            is_shared = ctx.sink.shares_memory(gradient)
            rows, flat = gradient.reshape(-1, gradient.shape[-1]), tokens.reshape(-1)
            if ctx.padding_idx is not None:  # the embedding of this token is not trained
                rows = rows.masked_fill((flat == ctx.padding_idx).unsqueeze(1), 0.0)
            ctx.sink(rows, flat, is_shared=is_shared)
            return None, None, None, None
        if use is GradientUse.NOTHING:
            return None, None, None, None
        padding = -1 if ctx.padding_idx is None else ctx.padding_idx
        table = torch.ops.aten.embedding_dense_backward(gradient, tokens, ctx.num_rows, padding, False)
        return None, table, None, None


def embedding_forward(embedding: nn.Embedding, weight: Tensor, sink: WeightGradientSink, input: Tensor) -> Tensor:
    """Returns the output of `embedding` for the tokens `input`. Replaces the module's forward while a run is open. weight: the
    parameter in the gradient store; autograd handles any other weight. sink: receives the output gradient and the tokens.
    """
    table = embedding.weight
    is_own = table is weight and table.requires_grad and not table._backward_hooks
    if not is_own or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return F.embedding(input, table, embedding.padding_idx)
    rows: Tensor = DirectEmbedding.apply(input, table, embedding.padding_idx, sink)  # type: ignore[no-untyped-call]
    return rows


def is_plain_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Returns whether `module` is an `nn.Embedding`, not a subclass, with its weight as a parameter, with an unpatched forward,
    and without `max_norm`, `sparse` or `scale_grad_by_freq`.
    """
    if type(module) is not nn.Embedding or "forward" in module.__dict__ or module._parameters.get("weight") is None:
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _add_bias(store: GradientStore, param: Param, layer: str, rows: Tensor) -> None:
    """Adds the sum of `rows` [n, out], in the store's dtype, to the gradient of the bias `param`."""
    store.add(param, rows.sum(0, dtype=store.dtype), layer, counts_pass=False)
