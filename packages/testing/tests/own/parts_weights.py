"""Sharded weights as simply as can be: gathered whole where they are used, kept until the backward, all gradients summed."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from sley_core.api.weights import StandIn
from sley_core.protocols import WeightCommunicator


def gathered(param, group):
    """The whole of which `param.parameter` is this rank's shard; all ranks of `wp` run the same forwards."""
    own = param.parameter.detach()
    parts = own.new_empty((group.size, *own.shape))
    group.all_gather(parts, own[None].contiguous(), label=param.name, channel="gather").wait()
    return param.shard.joined(parts)


def summed(param, group, gradient):
    """This rank's shard of the sum of all ranks' gradients of the whole."""
    parts = torch.stack([replace(param.shard, index=index).cut(gradient) for index in range(group.size)])
    received = torch.empty_like(parts)
    group.all_to_all(received, parts, label=f"the gradient of {param.name}", channel="reduce").wait()
    return received.sum(0)


class Whole(torch.autograd.Function):
    """The whole weight, whose gradient goes to the store; autograd knows by the shard that somebody wants it."""

    @staticmethod
    def forward(ctx, _shard, param, communicator):
        ctx.param, ctx.communicator = param, communicator
        return communicator.whole(param)

    @staticmethod
    def backward(ctx, gradient):
        ctx.communicator.take(ctx.param, ctx.communicator.reduce(ctx.param, gradient))
        return None, None, None


class Naive(WeightCommunicator):
    def __init__(self, config):
        self.patched = []

    def prepare(self, layers):
        pass

    def shard_dim(self, places):
        known = all(type(module) in (nn.Linear, nn.Embedding) and name == "weight" for module, name in places)
        return 0 if known else None

    def attach(self, parts):
        self.parts, self.group = parts, parts.groups["wp"]
        of_module = {
            id(holder.module): param for param in parts.registry if param.shard is not None for holder in param.holders
        }
        for param in of_module.values():
            parts.store.expect_products(param)
        for layer in parts.layers:
            for module in layer.module.modules():
                if id(module) in of_module:
                    module.forward = partial(self.forward, layer.name, module, of_module[id(module)])
                    self.patched.append(module)
        self.replace_weights()

    def replace_weights(self):
        StandIn.replace(self.parts.registry)

    def begin(self, actions, phase):
        pass

    def wrap_action(self, action):
        return nullcontext()

    def detach(self):
        for module in self.patched:
            del module.forward

    def forward(self, layer, module, param, given):
        self.parts.waits.wait_for(layer)
        weight = Whole.apply(param.parameter, param, self)
        return F.embedding(given, weight) if isinstance(module, nn.Embedding) else F.linear(given, weight, module.bias)

    def whole(self, param):
        return gathered(param, self.group)

    def reduce(self, param, gradient):
        return summed(param, self.group, gradient)

    def take(self, param, gradient):
        self.parts.store.add(param, gradient)


class Mean(Naive):
    """Wrong: a sum over ranks that is divided by their number, as data-parallel trainers have it."""

    def reduce(self, param, gradient):
        return super().reduce(param, gradient) / self.group.size


class Own(Naive):
    """Wrong: keeps its own part of its own gradient, and sums nothing."""

    def reduce(self, param, gradient):
        return param.shard.cut(gradient)


class Cached(Naive):
    """Wrong: what was gathered once is used for ever."""

    def __init__(self, config):
        super().__init__(config)
        self.kept = {}

    def whole(self, param):
        if param not in self.kept:
            self.kept[param] = super().whole(param)
        return self.kept[param]


class Eager(Cached):
    """Wrong: gathers all weights as a step begins, and waits for none of them."""

    def begin(self, actions, phase):
        self.kept.clear()
        for param in self.parts.registry:
            if param.shard is not None:
                self.whole(param)


class Left(Naive):
    """Wrong: leaves its forwards where they are."""

    def detach(self):
        pass


class Shards(Naive):
    """Wrong: a module's weight is a shard that anybody may take for the weight."""

    def replace_weights(self):
        pass


class Hoards(Naive):
    """Wrong: gives the store its sums when a step's last gradient action ends, with what a failed step has left in them."""

    def __init__(self, config):
        super().__init__(config)
        self.sums = {}

    def take(self, param, gradient):
        self.sums[param] = self.sums.get(param, 0) + gradient

    def begin(self, actions, phase):
        self.last = next((action for action in reversed(actions) if action.kind.makes_gradients), None)

    @contextmanager
    def wrap_action(self, action):
        yield
        if action == self.last:
            for param, total in self.sums.items():
                self.parts.store.add(param, total)
            self.sums.clear()
