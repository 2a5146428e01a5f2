"""Weight communicators: the simplest correct one, which gathers weights before each use, and some with one bug each."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from sley_core.api.weights import StandIn
from sley_core.protocols import WeightCommunicator


def gather_weight(param, group):
    """Returns the full weight of the shard `param.parameter`. All ranks of `wp` run the same forwards."""
    own = param.parameter.detach()
    parts = own.new_empty((group.size, *own.shape))
    group.all_gather(parts, own[None].contiguous(), label=param.name, channel="gather").wait()
    return param.shard.join(parts)


def reduce_gradient(param, group, gradient):
    """Returns this rank's shard of the sum of all ranks' full gradients."""
    parts = torch.stack([replace(param.shard, index=index).cut(gradient) for index in range(group.size)])
    received = torch.empty_like(parts)
    group.all_to_all(received, parts, label=f"the gradient of {param.name}", channel="reduce").wait()
    return received.sum(0)


class FullWeight(torch.autograd.Function):
    """Returns the full weight and adds its gradient to the store. The shard is an input so that autograd calls the backward."""

    @staticmethod
    def forward(ctx, _shard, param, communicator):
        ctx.param, ctx.communicator = param, communicator
        return communicator.gather(param)

    @staticmethod
    def backward(ctx, gradient):
        ctx.communicator.accumulate(ctx.param, ctx.communicator.reduce(ctx.param, gradient))
        return None, None, None


class Naive(WeightCommunicator):
    def __init__(self, config):
        self.patched_modules = []

    def prepare(self, layers):
        pass

    def shard_dim(self, owners):
        is_weight = all(type(module) in (nn.Linear, nn.Embedding) and name == "weight" for module, name in owners)
        return 0 if is_weight else None

    def attach(self, parts):
        self.parts, self.group = parts, parts.groups["wp"]
        params_by_module = {
            id(holder.module): param for param in parts.registry if param.shard is not None for holder in param.holders
        }
        for param in params_by_module.values():
            param.has_products = True
        for layer in parts.layers:
            for module in layer.module.modules():
                if id(module) in params_by_module:
                    module.forward = partial(self.forward, layer.name, module, params_by_module[id(module)])
                    self.patched_modules.append(module)
        self.replace_weights()

    def replace_weights(self):
        StandIn.replace(self.parts.registry)

    def begin(self, actions, phase):
        pass

    def wrap_action(self, action):
        return nullcontext()

    def detach(self):
        for module in self.patched_modules:
            del module.forward

    def forward(self, layer, module, param, input):
        self.parts.waits.wait_for(layer)
        weight = FullWeight.apply(param.parameter, param, self)
        return F.embedding(input, weight) if isinstance(module, nn.Embedding) else F.linear(input, weight, module.bias)

    def gather(self, param):
        return gather_weight(param, self.group)

    def reduce(self, param, gradient):
        return reduce_gradient(param, self.group, gradient)

    def accumulate(self, param, gradient):
        self.parts.store.add(param, gradient)


class Mean(Naive):
    """Averages gradients over the ranks."""

    def reduce(self, param, gradient):
        return super().reduce(param, gradient) / self.group.size


class Cached(Naive):
    """Reuses gathered weights in all steps."""

    def __init__(self, config):
        super().__init__(config)
        self.full_weights = {}

    def gather(self, param):
        if param not in self.full_weights:
            self.full_weights[param] = super().gather(param)
        return self.full_weights[param]


class Eager(Cached):
    """Gathers all weights at the start of a step, before they are complete."""

    def begin(self, actions, phase):
        self.full_weights.clear()
        for param in self.parts.registry:
            if param.shard is not None:
                self.gather(param)


class Patched(Naive):
    """Leaves its patched forwards in the modules."""

    def detach(self):
        pass


class Shards(Naive):
    """Leaves shards in the modules, which can be read as full weights."""

    def replace_weights(self):
        pass


class Hoards(Naive):
    """Adds sums to the store in the last gradient action, including those of a failed step."""

    def __init__(self, config):
        super().__init__(config)
        self.sums = {}

    def accumulate(self, param, gradient):
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
