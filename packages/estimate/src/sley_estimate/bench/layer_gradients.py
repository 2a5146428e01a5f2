"""Takes the gradients of a layer that is timed: adds them to memory, as the store of a run does, or drops them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from sley_core.engine.direct import DirectLinear, Handover, WeightQueue, is_plain_linear
from sley_core.model.layers import ForwardPatch


class LayerGradients:
    """Adds gradients of `trained` to memory of `dtype`, allocated here: autograd does it, or a hook if the dtypes differ. To be
    closed.
    """

    def __init__(self, trained: Sequence[Parameter], dtype: torch.dtype) -> None:
        self._direct = [(one, torch.zeros_like(one)) for one in trained if one.dtype == dtype]
        self._are_dropped = False
        self._hooks = ExitStack()
        for one in trained:
            if one.dtype != dtype:
                self._hook(self._hooks, one, partial(self._take, torch.zeros_like(one, dtype=dtype)))
        self._keep()

    def close(self) -> None:
        """Removes hooks and gradients."""
        self._hooks.close()
        for one, _ in self._direct:
            one.grad = None

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Returns a context manager within which gradients are dropped as soon as autograd hands them over."""
        with ExitStack() as hooks:
            for one, _ in self._direct:
                one.grad = None
                self._hook(hooks, one, _drop)
            self._are_dropped = True
            try:
                yield
            finally:
                self._are_dropped = False
                self._keep()

    def _keep(self) -> None:
        for one, slot in self._direct:
            one.grad = slot

    def _take(self, slot: Tensor, parameter: Tensor) -> None:
        """Adds the gradient that autograd has made to `slot`, unless it is dropped; there is none where a product waits in the
        queue.
        """
        if parameter.grad is not None and not self._are_dropped:
            slot.add_(parameter.grad)
        parameter.grad = None

    @staticmethod
    def _hook(hooks: ExitStack, parameter: Parameter, take: Callable[[Tensor], None]) -> None:
        hook = parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]  # torch's
        hooks.callback(hook.remove)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def queued_products(module: nn.Module, queue: WeightQueue, dtype: torch.dtype) -> Iterator[None]:
    """Returns a context manager in which an I queues the weight gradients of `module`'s plain linears in `queue`, outside a
    run: to time or to count the halves of a backward.

    dtype: of the memory, allocated here, to which W adds.
    """
    with ExitStack() as patches:
        for one in module.modules():
            if is_plain_linear(one) and one.weight.requires_grad:
                sink = Handover(partial(_multiply_into, torch.zeros_like(one.weight, dtype=dtype)), queue)
                patches.callback(ForwardPatch(one, partial(_queueing_forward, one, sink)).undo)
        yield


def _queueing_forward(linear: nn.Linear, sink: Handover, input: Tensor) -> Tensor:
    result: Tensor = DirectLinear.apply(input, linear.weight, linear.bias, sink, None)  # type: ignore[no-untyped-call]  # torch's
    return result


def _multiply_into(slot: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Adds rows^T inputs to `slot`, in one kernel if the dtypes are equal, as the store does."""
    if rows.dtype == slot.dtype:
        slot.addmm_(rows.t(), inputs)
    else:
        slot.add_(rows.t() @ inputs)
