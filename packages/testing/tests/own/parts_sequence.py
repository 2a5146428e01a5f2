"""Sequence attentions: the simplest correct one, which gathers whole sequences, and some with one bug each."""

from functools import partial

import torch

from sley_core.api.model import Attention
from sley_core.errors import PlanError
from sley_core.protocols import SequenceCommunicator


class FullSequence(torch.autograd.Function):
    """Gathers the slices of a sequence. Ranks of `sp` run the same forwards."""

    @staticmethod
    def forward(ctx, local, attention):
        ctx.attention = attention
        parts = local.new_empty((attention.group.size, *local.shape))
        attention.group.all_gather(parts, local.detach()[None].contiguous(), label="slices").wait()
        return torch.cat(parts.unbind(), dim=1)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.attention.local_slice(ctx.attention.sum_gradients(gradient)), None


class Naive(SequenceCommunicator):
    def __init__(self, config, group):
        self.group = group
        self.attentions = []

    def attach(self, layers):
        self.attentions = [module for layer in layers for module in layer.module.modules() if isinstance(module, Attention)]
        if not self.attentions:
            raise PlanError("sequence-attention", "the model has no attention", path=("sequence",))
        for module in self.attentions:
            module.forward = partial(self.forward, module)

    def detach(self):
        for module in self.attentions:
            del module.forward

    def forward(self, module, q, k, v, cu_seqlens=None):
        q, k, v = (FullSequence.apply(tensor, self) for tensor in (q, k, v))
        return self.local_slice(Attention.forward(module, q, k, v, cu_seqlens=cu_seqlens))

    def local_slice(self, tensor):
        return tensor.chunk(self.group.size, dim=1)[self.group.coord]

    def sum_gradients(self, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        self.group.all_reduce(total, label="gradients of slices").wait()
        return total


class Local(Naive):
    """Attends only within its slice."""

    def forward(self, module, q, k, v, cu_seqlens=None):
        return Attention.forward(module, q, k, v)


class Unsummed(Naive):
    """Loses the gradients of its keys and values from other slices."""

    def sum_gradients(self, gradient):
        return gradient


class Patched(Naive):
    """Leaves its patched forwards in the modules."""

    def detach(self):
        pass


class Silent(Naive):
    """Accepts a model without attention."""

    def attach(self, layers):
        if any(isinstance(module, Attention) for layer in layers for module in layer.module.modules()):
            super().attach(layers)
