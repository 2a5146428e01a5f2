"""Sums every gradient over its reduce group in bfloat16."""

import torch
from torch import Tensor

from sley_core.api.comm import Work
from sley_core.api.parts import Param, Parts, StepState
from sley_core.protocols import GradientHandler
from sley_narrow.config import NarrowConfig


class Narrow(GradientHandler):
    """Halves the bytes of fp32 gradients; each sum has a relative error of a few 2^-9, by bfloat16's rounding."""

    def __init__(self, config: NarrowConfig) -> None:
        self.config = config
        self._pending: list[tuple[Work, Tensor, Tensor]] = []

    def attach(self, parts: Parts) -> None:
        self._store = parts.store
        self._groups = parts.groups

    def begin_step(self, step: StepState) -> None:
        self._pending.clear()  # the state of a failed step

    def gradient_ready(self, param: Param, step: StepState) -> None:
        group = self._groups[param.reduce_group]
        if group.size == 1:
            return
        gradient = self._store.gradient(param)
        sent = gradient if param.numel < self.config.min_numel else gradient.to(torch.bfloat16)
        # The parameter's reduce group. The store reports parameters in the same order on all of its ranks.
        self._pending.append((group.all_reduce(sent, label=param.name), gradient, sent))

    def finish_step(self, step: StepState) -> None:
        for pending, gradient, summed in self._pending:
            pending.wait()
            if summed is not gradient:
                gradient.copy_(summed)
        self._pending.clear()
