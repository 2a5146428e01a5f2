"""Executes a rank's lowered list of actions: moves micro-batches to the device, calls chunks, fires scheduler hooks, frees
memory.

The batch stays on the host. A micro-batch is moved when its first action starts, only the fields that this rank reads, and is
dropped after its last action. Between forward and backward a chunk holds its inputs and the graph edges of its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.actions.action import Action, Kind, Lowered, Transfer, actions_of
from sley_core.engine.boundary import flatten, gradients_of, unflatten
from sley_core.engine.call import LayerCaller, tell_hooks
from sley_core.engine.direct import WeightQueue
from sley_core.engine.in_flight import InFlight, describe, edges_of
from sley_core.engine.replicas import check_fields
from sley_core.engine.step_state import MicroStep, Phase, StepState
from sley_core.errors import note_origin
from sley_core.generators import IN_USE
from sley_core.model.tensors import version_of
from sley_core.protocols import SplitLogits

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.data.dataset import Batch, Field
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.in_flight import Crossing
    from sley_core.engine.positions import OverPositions, WholeSequences
    from sley_core.engine.step_batch import BatchWeight
    from sley_core.engine.timeline import ActionClock
    from sley_core.model.layers import Layer
    from sley_core.protocols import Loss, SchedulerHook, WeightCommunicator


@dataclass(eq=False)
class Executor:
    """Executes lists of actions over `chunks`, this rank's layers per model chunk.

    has_loss: whether this rank holds the model's last chunk. crossing: moves values into chunks and out of them. fields: what
    the dataset declares of each batch field. over_positions: checks the loss if ranks have slices of sequences. whole: gives it
    whole ones if it needs them. keeps_apart: whether losses are returned one per micro-batch, [micro-batches], in place of
    their sum. left_in_flight: whether a list is running or has failed, so that its messages and gathers may still be in flight
    until the next list begins.
    """

    chunks: Sequence[Sequence[Layer]]
    crossing: Crossing
    caller: LayerCaller
    loss: Loss
    fields: Mapping[str, Field]
    device: Device
    hooks: Sequence[SchedulerHook] = ()
    queue: WeightQueue = field(default_factory=WeightQueue)
    weights: WeightCommunicator | None = None
    over_positions: OverPositions | None = None
    whole: WholeSequences | None = None
    keeps_apart: bool = False
    left_in_flight: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.has_loss = any(self._is_last(chunk) for chunk in range(len(self.chunks)))
        self._reads = reads(self.chunks, self.loss if self.has_loss else None, self.fields)
        self._clock: ActionClock | None = None
        self._micros: dict[int, dict[str, Tensor]] = {}
        self._outputs: dict[int, Any] | None = None
        self._is_predicting = False
        self._held: dict[tuple[int, int], InFlight] = {}

    def train(
        self,
        steps: Lowered,
        batch: Sequence[Batch],
        state: StepState,
        store: GradientStore,
        weight: BatchWeight | None,
        clock: ActionClock | None = None,
        outputs: dict[int, Any] | None = None,
    ) -> Tensor:
        """Runs a training list, with the exchanges in it; gradients go to `store`.

        batch: this rank's micro-batches, on the host. weight: the loss weight of the global batch, by which every gradient is
        divided once; None on ranks without the loss. clock: records when actions run. outputs: gets a copy of the model's
        output of each micro-batch, on ranks with the loss.

        Returns the sum of the loss over this rank's samples, or one loss per micro-batch (`keeps_apart`): float64 on the
        device.
        """
        actions = actions_of(steps)
        total = self._begin(batch, Phase.TRAIN, actions, clock)
        self._outputs = outputs
        last_of_micro = {action.micro: action for action in actions}
        last_of_chunk = {(action.chunk, action.micro): action for action in actions}
        for step in steps:
            state.standing.comes(step)
            if isinstance(step, Transfer):
                self.crossing.transfer(step)
                continue
            if step.kind is Kind.CHUNK_DONE:
                store.chunk_done(step.chunk)
                continue
            micro = state.micro_step(step, Phase.TRAIN)
            state.enter(step)
            with self._weights_of(step):
                self._act(step, micro, batch, weight, total)
            state.leave(step)
            if last_of_chunk[step.chunk, step.micro] == step:
                del self._held[step.chunk, step.micro]
            if last_of_micro[step.micro] == step:
                self._micros.pop(step.micro, None)
        self.crossing.end()
        self.left_in_flight = False
        return total

    @torch.no_grad()
    def evaluate(self, steps: Lowered, batch: Sequence[Batch], state: StepState) -> Tensor:
        """Runs a forward-only list without saving activations. Returns the sum of the loss as `train` does."""
        total = self._begin(batch, Phase.EVALUATE, actions_of(steps))
        self._forward_all(steps, batch, state, total)
        return total

    @torch.no_grad()
    def predict(self, steps: Lowered, batch: Sequence[Batch], state: StepState, outputs: dict[int, Any]) -> None:
        """Runs a forward-only list without the loss; puts micro-batches' outputs into `outputs`, if it has the last chunk."""
        total = self._begin(batch, Phase.EVALUATE, actions_of(steps))
        self._outputs, self._is_predicting = outputs, True
        self._forward_all(steps, batch, state, total)

    def _forward_all(self, steps: Lowered, batch: Sequence[Batch], state: StepState, total: Tensor) -> None:
        for step in steps:
            state.standing.comes(f"{step} of the evaluation")
            if isinstance(step, Transfer):
                self.crossing.transfer(step)
                continue
            micro = state.micro_step(step, Phase.EVALUATE)
            with self._weights_of(step):
                self._forward(micro, InFlight(), batch, total)
            self._micros.pop(step.micro, None)
        self.crossing.end()
        self.left_in_flight = False

    def _weights_of(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self.weights is None else self.weights.during(action)

    def _begin(
        self, batch: Sequence[Batch], phase: Phase, actions: Sequence[Action], clock: ActionClock | None = None
    ) -> Tensor:
        """Discards the rest of a failed list, and announces `actions` to weights, policy and link. Returns the total, zero."""
        self.left_in_flight = True
        self._clock = clock
        self._outputs, self._is_predicting = None, False
        self._micros.clear()
        self._held.clear()
        self.queue.clear()
        if self.weights is not None:
            self.weights.begin(actions, phase)
        self.caller.policy.begin(actions, phase)
        # Everything that determines the shapes at the boundaries of each micro-batch.
        has_link = self.crossing.link is not None
        keys = [(phase, *(tuple(value.shape) for value in micro.values())) for micro in batch] if has_link else []
        self.crossing.begin(keys)
        shape = (len(batch),) if self.keeps_apart else ()
        return torch.zeros(shape, dtype=torch.float64, device=self.device.torch_device)

    def _act(self, action: Action, micro: MicroStep, batch: Sequence[Batch], weight: BatchWeight | None, total: Tensor) -> None:
        place = action.chunk, action.micro
        self._ready()
        match action.kind:
            case Kind.FORWARD:
                held = self._held[place] = InFlight()
                self._forward(micro, held, batch, total)
            case Kind.BACKWARD:
                self._backward(micro, self._held[place], weight)
            case Kind.INPUT_GRADIENT:
                with self.queue.collecting(place):
                    self._backward(micro, self._held[place], weight)
            case Kind.WEIGHT_GRADIENT:
                self._weight_gradients(replace(micro, phase=Phase.WEIGHTS))
        if self._clock is not None:
            self._clock.stop(action)

    def _ready(self) -> None:
        """Restarts the clock once the inputs of the action have arrived: waiting for them does not count."""
        if self._clock is not None:
            self._clock.start()

    def _forward(self, micro: MicroStep, held: InFlight, batch: Sequence[Batch], total: Tensor) -> None:
        """Runs the chunk's forward, then the loss or the next chunk's input. Keeps the graph edges for the backward."""
        fields = self._fields(batch, micro.micro)
        args: tuple[Any, ...] = ()
        if self.crossing.placement.previous(self.crossing.stage, micro.chunk) is not None:
            args = (held.enter(*self.crossing.bring("forward", micro.chunk, micro.micro)),)
            self._ready()
        tell_hooks(self.hooks, "before_forward", micro, args[0] if args else None)
        before = [version_of(value) for value in fields.values()]
        for layer in self.chunks[micro.chunk]:
            named = {name: fields[name] for name in layer.fields}
            args = (self.caller(layer, args, named, micro),)
        if self.crossing.link is not None:
            check_fields(self.chunks[micro.chunk], fields, before)
        self.caller.standing.has_called()
        (output,) = args
        held.check_unwritten(self.chunks[micro.chunk][0].name)
        tell_hooks(self.hooks, "after_forward", micro, output)
        if self._is_last(micro.chunk):
            if self._outputs is not None:
                self._outputs[micro.micro] = self._copied(output, self.chunks[micro.chunk][-1].name)
            if self._is_predicting:
                return
            held.loss = self._loss(micro, output, fields, batch[micro.micro])
            if self.whole is None or self.whole.counts:
                place = total[micro.micro] if self.keeps_apart else total
                place += held.loss.detach()
        else:
            description, tensors = describe(output, self.chunks[micro.chunk][-1].name)
            held.edges = edges_of(description, tensors)
            sent = [tensor.detach() for tensor in tensors]
            self.crossing.give("forward", micro.chunk, micro.micro, (description, sent))

    def _copied(self, output: Any, layer: str) -> Any:
        """Returns the model's output for the program, without its graph, and copied if the loss follows, which may write in
        place; whole logits if ranks share the classes, by a collective of them. Raises RunError `boundary-type` for a type that
        cannot be taken apart. layer: the model's last.
        """
        with torch.no_grad():
            if not isinstance(output, Tensor) and isinstance(output, SplitLogits):
                return output.logits()
            tensors, structure = flatten(output, layer)
            return unflatten([one.detach() if self._is_predicting else one.detach().clone() for one in tensors], structure)

    def _loss(self, micro: MicroStep, output: Any, fields: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the loss of one micro-batch, or of its whole sequences; calls the hooks `before_loss` and `after_loss`.

        batch: all fields of the micro-batch, on the host.
        """
        tell_hooks(self.hooks, "before_loss", micro, output)
        if self.whole is not None:
            output, fields = self.whole(output, fields, batch)
        self.caller.take_turn("the loss")
        try:
            if self.whole is not None:
                self.caller.seed_loss(micro)
            loss = self.loss.loss(output, fields)
        except Exception as error:
            note_origin(error, f"the loss of micro-batch {micro.micro}", self.loss)
            raise
        finally:
            IN_USE.release()
        if self.over_positions is not None:
            self.over_positions.check(output, fields)
        tell_hooks(self.hooks, "after_loss", micro, loss)
        return loss

    def _backward(self, micro: MicroStep, held: InFlight, weight: BatchWeight | None) -> None:
        """Runs the chunk's backward from the loss or the next chunk's gradients; input gradients go to the previous chunk."""
        if held.loss is not None:
            assert weight is not None, "the loss without its weight"
            gradients = [weight.inverse(held.loss)]
        else:
            _, gradients = self.crossing.bring("backward", micro.chunk, micro.micro)
        self._ready()
        tell_hooks(self.hooks, "before_backward", micro, gradients if held.loss is None else gradients[0])
        made = held.backward(gradients)
        tell_hooks(self.hooks, "after_backward", micro, None if held.description is None else made)
        if held.description is not None:
            payload = gradients_of(held.description), made
            self.crossing.give("backward", micro.chunk, micro.micro, payload)

    def _fields(self, batch: Sequence[Batch], micro: int) -> dict[str, Tensor]:
        """Returns a micro-batch's fields on the device; moves them at the first call for it."""
        if micro not in self._micros:
            given = batch[micro].items()
            self._micros[micro] = {name: self.device.move(value) for name, value in given if name in self._reads}
        return self._micros[micro]

    def _weight_gradients(self, micro: MicroStep) -> None:
        """Runs the weight gradients that the I of this micro-batch deferred; no tensor crosses a boundary."""
        tell_hooks(self.hooks, "before_backward", micro, None)
        self.queue.run((micro.chunk, micro.micro))
        tell_hooks(self.hooks, "after_backward", micro, None)

    def _is_last(self, chunk: int) -> bool:
        return self.crossing.placement.next(self.crossing.stage, chunk) is None


def reads(chunks: Sequence[Sequence[Layer]], loss: Loss | None, fields: Mapping[str, Field]) -> frozenset[str]:
    """Returns the names of the batch fields that these layers and the loss read; all of them if the loss has no `fields`."""
    by_layers = {name for layers in chunks for layer in layers for name in layer.fields}
    by_loss = () if loss is None else getattr(loss, "fields", None)
    return frozenset(by_layers | set(fields if by_loss is None else by_loss))
