"""Runs a rank's lowered list: moves micro-batches in, calls chunks, fires scheduler hooks, frees what is no longer needed.

The batch stays on the host. A micro-batch is moved when its first action starts, only the fields that this rank reads,
and is dropped after its last action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.actions.action import Action, Kind
from sley_core.data.cut import cut
from sley_core.engine.step_state import MicroStep, Phase, StepState

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.data.dataset import Field
    from sley_core.engine.call import LayerCaller
    from sley_core.engine.store import GradientStore
    from sley_core.engine.weight import BatchWeight
    from sley_core.model.layers import Layer
    from sley_core.protocols import Loss, SchedulerHook

HostBatch = Mapping[str, Tensor]


class Executor:
    """Executes lists over `chunks`, this rank's layers per model chunk.

    fields: what the dataset declares of each batch field.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[Layer]],
        caller: LayerCaller,
        loss: Loss,
        fields: Mapping[str, Field],
        device: Device,
        hooks: Sequence[SchedulerHook] = (),
    ) -> None:
        self.chunks = chunks
        self.caller = caller
        self.loss = loss
        self.fields = fields
        self.device = device
        self.hooks = hooks
        self._reads = reads(chunks, loss, fields)
        self._micros: dict[int, dict[str, Tensor]] = {}
        self._losses: dict[Action, Tensor] = {}

    def train(
        self,
        actions: Sequence[Action],
        batch: HostBatch,
        state: StepState,
        store: GradientStore,
        weight: BatchWeight,
    ) -> Tensor:
        """Runs forward and backward actions; gradients go to `store`.

        batch: this rank's samples, on the host, `state.num_micros` micro-batches of equal size along the batch dim.
        weight: the loss weight of the global batch, by which every gradient is divided once.
        Returns the sum of the loss over this rank's samples: a float64 scalar on the device.
        """
        self._micros.clear()
        self._losses.clear()
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        last_use = {action.micro: action for action in actions if action.micro >= 0}
        for action in actions:
            if action.kind is Kind.CHUNK_DONE:
                store.chunk_done(action.chunk)
                continue
            micro = state.micro_step(action, Phase.TRAIN)
            state.enter(action)
            if action.kind is Kind.FORWARD:
                loss = self._forward(micro, batch, state.num_micros)
                self._losses[action] = loss
                total += loss.detach()
            elif action.kind is Kind.BACKWARD:
                self._backward(micro, weight)
            else:
                raise AssertionError(f"{action} needs a schedule that splits the backward")
            state.leave(action)
            if last_use[action.micro] == action:
                self._micros.pop(action.micro, None)
        return total

    @torch.no_grad()
    def evaluate(self, actions: Sequence[Action], batch: HostBatch, state: StepState) -> Tensor:
        """Runs forward actions only, saving nothing and touching no gradient; returns the sum of the loss."""
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        for action in actions:
            micro = state.micro_step(action, Phase.EVALUATE)
            total += self._forward(micro, batch, state.num_micros)
            self._micros.pop(action.micro)
        return total

    def _forward(self, micro: MicroStep, batch: HostBatch, num_micros: int) -> Tensor:
        fields = self._micros.get(micro.micro)
        if fields is None:
            fields = self._micros[micro.micro] = self._move_in(batch, micro.micro, num_micros)
        for hook in self.hooks:
            hook.before_forward(micro, None)
        output: Any = None
        for at, layer in enumerate(self.chunks[micro.chunk]):
            named = {name: fields[name] for name in layer.fields}
            output = self.caller(layer, (output,) if at else (), named, micro)
        for hook in self.hooks:
            hook.after_forward(micro, output)
        for hook in self.hooks:
            hook.before_loss(micro, output)
        loss = self.loss.loss(output, fields)
        for hook in self.hooks:
            hook.after_loss(micro, loss)
        return loss

    def _backward(self, micro: MicroStep, weight: BatchWeight) -> None:
        loss = self._losses.pop(Action(Kind.FORWARD, micro.chunk, micro.micro))
        gradient = weight.inverse(loss)
        for hook in self.hooks:
            hook.before_backward(micro, gradient)
        torch.autograd.backward(loss, gradient)
        for hook in self.hooks:
            hook.after_backward(micro, None)

    def _move_in(self, batch: HostBatch, micro: int, num_micros: int) -> dict[str, Tensor]:
        part = cut(batch, self.fields, micro, num_micros)
        return {name: self.device.move(value) for name, value in part.items() if name in self._reads}


def reads(chunks: Sequence[Sequence[Layer]], loss: Loss, fields: Mapping[str, Field]) -> frozenset[str]:
    """The batch fields that these layers and the loss read; all of them where a loss does not tell."""
    by_layers = {name for layers in chunks for layer in layers for name in layer.fields}
    by_loss = getattr(loss, "fields", None)
    return frozenset(by_layers | set(fields if by_loss is None else by_loss))
