"""The interfaces of objects that compute gradients and steps: handlers, hooks, losses, activation policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from sley_core.actions.action import Action
    from sley_core.engine.parts import MicroStep, Parts, Phase, StepState
    from sley_core.engine.registry import Param


class GradientHandler(Protocol):
    """Works on accumulated gradients, between backward and the optimizer step. Installs no autograd hooks.

         attach ──> begin_step ──> gradient_ready* ──> chunk_done* ──> finish_step ──> weights_updated ─┐
                       ^                                                                                │
                       └────────────────────────────────────────────────────────────────────────────────┘

    The store calls `gradient_ready` once per parameter and step, in one order that is the same on all ranks of the parameter's
    reduce group, so a collective may be started there. A failed step is followed directly by the next `begin_step`,
    which must discard everything that was in flight.

    With `[precision] loss_scale`, as fp16 needs, gradients are those of the scaled loss in all of these methods: they
    are unscaled after `finish_step`, and clipped after that. A handler whose result is not linear in the gradients
    refuses such plans (`sley_check_plan`). `parts.numbers.add` in `attach` adds a number to every metrics row; it must
    be unscaled.
    """

    def attach(self, parts: Parts) -> None:
        """Called once, when the parameter registry and the groups are complete. A reducer lays out the store's buffers here."""

    def begin_step(self, step: StepState) -> None:
        """Called before the first forward of an optimizer step."""

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """Called when the accumulated gradient of `param` on this rank is complete; its reduction may start."""

    def chunk_done(self, chunk: int, step: StepState) -> None:
        """Called after the last gradient action of `chunk`. Its parameters have been reported ready, except those that come in
        the order after an incomplete parameter of another chunk.
        """

    def finish_step(self, step: StepState) -> None:
        """Called after the last action: when it returns, `store.gradient(param)` must hold this handler's result."""

    def weights_updated(self, step: StepState) -> None:
        """Called after the optimizer step."""

    def detach(self) -> None:
        """Called when the run closes, or when it could not be assembled."""


class SchedulerHook(Protocol):
    """Is called before and after every action, with the tensors that enter or leave it.

    The weight half of a split backward (action W) calls `before_backward` and `after_backward` in phase `weights`, with
    None for the tensors. A layer that is recomputed within a backward calls `before_forward` in phase `recompute`, with
    its name in `micro.layer`.
    """

    def before_forward(self, micro: MicroStep, inputs: Any) -> None: ...
    def after_forward(self, micro: MicroStep, output: Any) -> None: ...
    def before_loss(self, micro: MicroStep, output: Any) -> None: ...
    def after_loss(self, micro: MicroStep, loss: Tensor) -> None: ...
    def before_backward(self, micro: MicroStep, output_gradient: Any) -> None: ...
    def after_backward(self, micro: MicroStep, input_gradient: Any) -> None: ...


class Loss(Protocol):
    """Computes a loss in two functions, so that the scale of a gradient does not depend on the layout.

    A step's gradient is the sum of d(loss)/dw over all its samples, divided once by the weight of the global batch. The run
    refuses a weight that depends on the output, because it is not known before the first backward; a weight that is not the sum
    of its micro-batches' weights, as for a mean; and a loss with parameters, which belong in the last layer.

    A loss may have `fields`, the names of the batch fields that it reads: only those are moved to the device. It may have
    `attach(parts)`, called once like a handler's, to add numbers to metrics rows. `loss` runs in evaluations too, without
    gradients.
    """

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """Returns the weight of these samples, from the batch alone, on the host (cross-entropy: the number of labels
        not ignored).
        """
        ...

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the **sum** of the loss over these samples: a scalar tensor."""
        ...


@runtime_checkable
class SplitLogits(Protocol):
    """Holds vocabulary-parallel logits: the last layer returns it in place of logits if ranks share the classes.

    A weight communicator makes it. Only a loss whose record declares `split_logits` receives one.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that this rank's unsharded logits would have: [..., classes]."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the sum of the cross-entropy over this rank's `labels` int64 [...], in fp32 at least; options as in
        `core.cross_entropy`.

        Communicates: a collective of the ranks that share the classes. The gradient of the result must be the same on
        all of them, as it is when it comes from the division by the weight of the global batch.
        """
        ...

    def logits(self) -> Tensor:
        """Returns this rank's whole logits, [..., classes], without a graph. Communicates: a collective of the ranks that share
        the classes.
        """
        ...


class ActivationPolicy(Protocol):
    """Decides what a layer saves between its forward and its backward; evaluations bypass it. attach ──> (begin ──> call*)*"""

    def attach(self, parts: Parts) -> None:
        """Called once, before the first step. Not called when layers are timed for a partition: `call` then has no run."""
        return

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Called before a step or an evaluation runs `actions`; must discard what a failed step left."""
        return

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        """Returns `layer(*args, **fields)`, with this policy's choice of what autograd saves. micro: step, chunk, micro-batch
        and phase of the call.
        """
        ...

    def detach(self) -> None:
        """Called when the run closes, or could not be assembled."""
        return
