"""Scheduler hooks: one that holds its contract, and some that are wrong in one way each."""

from __future__ import annotations

import torch
from torch import Tensor

from sley_core.protocols import SchedulerHook


class Naive(SchedulerHook):
    """Keeps the largest output, and counts backwards."""

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
    """Keeps outputs small, where they lie."""

    def after_forward(self, micro, output) -> None:
        with torch.no_grad():
            output.mul_(0.999)


class Keeps(Naive):
    """Keeps the last loss, with its graph."""

    def after_loss(self, micro, loss) -> None:
        self.loss = loss


class Asks(Naive):
    """Asks a tensor of every action."""

    def before_backward(self, micro, output_gradient) -> None:
        self.largest = max(self.largest, float(output_gradient.abs().max()))


class Differs(Naive):
    """Sums over the ranks what each has in another dtype."""

    def after_loss(self, micro, loss) -> None:
        given = (torch.zeros(4), torch.zeros(4, dtype=torch.int32))[self.parts.world.rank]
        self.parts.groups["control"].all_reduce(given, label="what each has").wait()


class Unbalanced(Naive):
    """Turns gradients off from a forward to its backward, and a step that failed leaves them off."""

    depth = 0

    def before_backward(self, micro, output_gradient) -> None:
        self.depth += 1
        if self.depth > 1:  # what the step that failed has left
            self.parts.registry.trainable[0].parameter.data.mul_(2)

    def after_backward(self, micro, input_gradient) -> None:
        self.depth -= 1


class Asked(Naive):
    """Counts how often it is asked."""

    def counts(self):
        self.num_backwards += 1
        return super().counts()


class Hooked(Naive):
    """Looks at a weight by an autograd hook of its own, which stays."""

    def before_forward(self, micro, inputs) -> None:
        if not self.num_backwards:
            self.parts.layers[0].module.register_forward_hook(lambda *_: None)
