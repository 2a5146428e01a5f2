"""Gradient handlers with one bug each, based on `Late` of `naive_handlers`."""

from random import SystemRandom

import torch
from naive_handlers import Late

from sley_core.protocols import GradientHandler


class Changes(Late):
    """Changes each gradient after its sum."""

    def finish_step(self, step) -> None:
        ready = list(self._ready)
        super().finish_step(step)
        for param in ready:
            self.change(self._parts.store.gradient(param), self._parts.groups[param.reduce_group])


class World(Late):
    """Sums over all ranks instead of the reduce group."""

    def finish_step(self, step) -> None:
        for param in self._ready:
            self._parts.groups["all"].all_reduce(self._parts.store.gradient(param), label=param.name).wait()


class Early(GradientHandler):
    """Sums a buffer when its first parameter is ready."""

    def __init__(self, config) -> None:
        self._reduced_buffers = []

    def attach(self, parts) -> None:
        self._store, self._groups = parts.store, parts.groups

    def begin_step(self, step) -> None:
        self._reduced_buffers = []

    def gradient_ready(self, param, step) -> None:
        buffer = next(buffer for buffer in self._store.buffers if param in buffer.params)
        if buffer not in self._reduced_buffers:
            self._reduced_buffers.append(buffer)
            self._groups[buffer.reduce_group].all_reduce(buffer.data, label="a buffer").wait()


class Chatty(Late):
    """Communicates once per microbatch."""

    def finish_step(self, step) -> None:
        for _ in range(step.num_microbatches):
            self._parts.groups["control"].all_reduce(torch.zeros(1), label="a number per microbatch").wait()
        super().finish_step(step)


class Noisy(Changes):
    """Rounds with random numbers that have no seed."""

    def change(self, gradient, group) -> None:
        gradient.mul_(1 + 1e-4 * SystemRandom().random())


class Rounded(Changes):
    """Rounds differently on each rank."""

    def change(self, gradient, group) -> None:
        gradient.mul_(1 + 1e-4 * self._parts.world.rank)


class Coarse(Changes):
    """Sets every second element to zero, although its record allows an error of 2^-6."""

    def change(self, gradient, group) -> None:
        if group.size > 1:
            gradient.view(-1)[::2] = 0


class Watches(Late):
    """Installs autograd hooks and does not remove them."""

    def attach(self, parts) -> None:
        super().attach(parts)
        for param in parts.registry.trainable:
            param.parameter.register_hook(lambda gradient: None)
