"""Scheduler hooks: a correct one, and some with one bug each."""

import torch
from torch import Tensor

from sley_core.protocols import SchedulerHook


class Naive(SchedulerHook):
    """Records the largest output and the number of backwards."""

    def __init__(self, config, parts) -> None:
        self.parts = parts
        self.largest = 0.0
        self.num_backwards = 0

    def after_forward(self, micro, output) -> None:
        if isinstance(output, Tensor):
            self.largest = max(self.largest, float(output.detach().abs().max()))

    def after_backward(self, micro, input_gradient) -> None:
        self.num_backwards += 1

    def counts(self):
        return {"largest": self.largest, "backwards": self.num_backwards}


class Scales(Naive):
    """Scales outputs in place."""

    def after_forward(self, micro, output) -> None:
        with torch.no_grad():
            output.mul_(0.999)


class Keeps(Naive):
    """Keeps the last loss with its graph."""

    def after_loss(self, micro, loss) -> None:
        self.loss = loss


class Asks(Naive):
    """Expects a tensor in every action."""

    def before_backward(self, micro, output_gradient) -> None:
        self.largest = max(self.largest, float(output_gradient.abs().max()))


class Differs(Naive):
    """Sums tensors whose dtype depends on the rank."""

    def after_loss(self, micro, loss) -> None:
        value = (torch.zeros(4), torch.zeros(4, dtype=torch.int32))[self.parts.world.rank]
        self.parts.groups["control"].all_reduce(value, label="a value").wait()


class Unbalanced(Naive):
    """Counts open backwards, and changes a weight after a failed step."""

    depth = 0

    def before_backward(self, micro, output_gradient) -> None:
        self.depth += 1
        if self.depth > 1:  # a failed step left one open
            self.parts.registry.trainable[0].parameter.data.mul_(2)

    def after_backward(self, micro, input_gradient) -> None:
        self.depth -= 1


class Asked(Naive):
    """Counts the calls of `counts`."""

    def counts(self):
        self.num_backwards += 1
        return super().counts()


class Hooked(Naive):
    """Registers a forward hook and does not remove it."""

    def before_forward(self, micro, inputs) -> None:
        if not self.num_backwards:
            self.parts.layers[0].module.register_forward_hook(lambda *_: None)
