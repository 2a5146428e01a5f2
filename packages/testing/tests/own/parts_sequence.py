"""Attention over slices as simply as can be: every rank attends over whole sequences, and keeps its slice of the context."""

from __future__ import annotations

from functools import partial

import torch

from sley_core.api.model import Attention
from sley_core.errors import PlanError
from sley_core.protocols import SequenceCommunicator


class Whole(torch.autograd.Function):
    """The whole sequence, of which each rank has a slice; ranks of `sp` run the same forwards."""

    @staticmethod
    def forward(ctx, own, attention):
        ctx.attention = attention
        parts = own.new_empty((attention.group.size, *own.shape))
        attention.group.all_gather(parts, own.detach()[None].contiguous(), label="slices").wait()
        return torch.cat(parts.unbind(), dim=1)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.attention.own(ctx.attention.summed(gradient)), None


class Naive(SequenceCommunicator):
    def __init__(self, config, group):
        self.group = group
        self.changed = []

    def attach(self, layers):
        self.changed = [one for layer in layers for one in layer.module.modules() if isinstance(one, Attention)]
        if not self.changed:
            raise PlanError("sequence-attention", "the model has no attention", path=("sequence",))
        for module in self.changed:
            module.forward = partial(self.forward, module)

    def detach(self):
        for module in self.changed:
            del module.forward

    def forward(self, module, q, k, v, cu_seqlens=None):
        q, k, v = (Whole.apply(one, self) for one in (q, k, v))
        return self.own(Attention.forward(module, q, k, v, cu_seqlens=cu_seqlens))

    def own(self, whole):
        return whole.chunk(self.group.size, dim=1)[self.group.coord]

    def summed(self, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        self.group.all_reduce(total, label="gradients of slices").wait()
        return total


class Local(Naive):
    """Wrong: every rank attends within its slice."""

    def forward(self, module, q, k, v, cu_seqlens=None):
        return Attention.forward(module, q, k, v)


class Unsummed(Naive):
    """Wrong: what other slices have to say of this one's keys is lost."""

    def summed(self, gradient):
        return gradient


class Together(Naive):
    """Wrong: documents of a row see one another."""

    def forward(self, module, q, k, v, cu_seqlens=None):
        return super().forward(module, q, k, v)


class Stays(Naive):
    """Wrong: leaves its forwards where they are."""

    def detach(self):
        pass


class Silent(Naive):
    """Wrong: takes any model."""

    def attach(self, layers):
        if any(isinstance(one, Attention) for layer in layers for one in layer.module.modules()):
            super().attach(layers)
