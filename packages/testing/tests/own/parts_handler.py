"""Gradient handlers that are wrong in one way each; `Late` of `naive_handlers` is the right one that they begin from."""

from __future__ import annotations

from random import SystemRandom

import torch
from naive_handlers import Late

from sley_core.protocols import GradientHandler

WIRE = 64
"""Elements of an exchange that has room for any gradient of the contract's model."""


class Changes(Late):
    """Writes to each gradient that it has summed."""

    def finish_step(self, step) -> None:
        ready = list(self._ready)
        super().finish_step(step)
        for param in ready:
            self.change(self._parts.store.gradient(param), self._parts.groups[param.reduce_group])


class Mean(Changes):
    """Averages over the ranks."""

    def change(self, gradient, group) -> None:
        gradient.div_(group.size)


class World(Late):
    """Sums over all ranks, whatever the parameter's group is."""

    def finish_step(self, step) -> None:
        for param in self._ready:
            self._parts.groups["all"].all_reduce(self._parts.store.gradient(param), label=param.name).wait()


class Early(GradientHandler):
    """Sums a whole buffer when the first of its parameters is ready."""

    def __init__(self, config) -> None:
        self._summed = []

    def attach(self, parts) -> None:
        self._store, self._groups = parts.store, parts.groups

    def begin_step(self, step) -> None:
        self._summed = []

    def gradient_ready(self, param, step) -> None:
        buffer = next(one for one in self._store.buffers if param in one.params)
        if buffer not in self._summed:
            self._summed.append(buffer)
            self._groups[buffer.reduce_group].all_reduce(buffer.data, label="a buffer").wait()


class Tail(Late):
    """Sums whole blocks of four elements, and not what is left."""

    def finish_step(self, step) -> None:
        for param in self._ready:
            flat = self._parts.store.gradient(param).view(-1)
            whole = flat[: flat.numel() // 4 * 4]
            if whole.numel():
                self._parts.groups[param.reduce_group].all_reduce(whole, label=param.name).wait()


class Reverse(Late):
    """Goes through the parameters the other way round on the second rank, by exchanges of one size."""

    def finish_step(self, step) -> None:
        shared = [param for param in self._ready if self._parts.groups[param.reduce_group].size > 1]
        for param in shared[:: -1 if self._parts.world.rank else 1]:
            gradient = self._parts.store.gradient(param)
            wire = gradient.new_zeros(WIRE)
            wire[: gradient.numel()] = gradient.view(-1)
            self._parts.groups[param.reduce_group].all_reduce(wire, label="a gradient").wait()
            gradient.copy_(wire[: gradient.numel()].view_as(gradient))


class Twice(Late):
    """Sums what it has summed."""

    def finish_step(self, step) -> None:
        ready = list(self._ready)
        super().finish_step(step)
        self._ready = ready
        super().finish_step(step)


class Chatty(Late):
    """Exchanges something for each microbatch."""

    def finish_step(self, step) -> None:
        for _ in range(step.num_micros):
            self._parts.groups["control"].all_reduce(torch.zeros(1), label="nothing").wait()
        super().finish_step(step)


class Types(Late):
    """Exchanges something of another type on each rank."""

    def finish_step(self, step) -> None:
        given = (torch.zeros(4), torch.zeros(4, dtype=torch.int32))[self._parts.world.rank]
        self._parts.groups["control"].all_reduce(given, label="what each has").wait()
        super().finish_step(step)


class Noisy(Changes):
    """Rounds by chance, which nobody seeds."""

    def change(self, gradient, group) -> None:
        gradient.mul_(1 + 1e-4 * SystemRandom().random())


class Apart(Changes):
    """Rounds on each rank for itself."""

    def change(self, gradient, group) -> None:
        gradient.mul_(1 + 1e-4 * self._parts.world.rank)


class Coarse(Changes):
    """Drops every second element, though its record allows 2^-6."""

    def change(self, gradient, group) -> None:
        if group.size > 1:
            gradient.view(-1)[::2] = 0


class Watches(Late):
    """Has autograd hooks of its own, and leaves them."""

    def attach(self, parts) -> None:
        super().attach(parts)
        for param in parts.registry.trainable:
            param.parameter.register_hook(lambda gradient: None)
