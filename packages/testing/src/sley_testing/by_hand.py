"""Runs a recorded run beside the loop by hand of `testing.plain`, over the same batches: one call for the tests of a layout.

found = record(tables, 3, batches=batches)                                # any layout of the plan
assert_by_hand(found, layers(info), batches, partial(torch.optim.SGD, lr=0.1), micro_size=1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sley_core.config import CrossEntropyConfig
from sley_core.losses.cross_entropy import CrossEntropy
from sley_testing.parity import assert_close_gradients
from sley_testing.plain import PlainLoop, assert_step
from sley_testing.runs import Recorded


def assert_by_hand(
    recorded: Recorded,
    named: list[tuple[str, nn.Module]],
    batches: Sequence[Mapping[str, Tensor]],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    micro_size: int,
    first: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-9,
) -> None:
    """Trains by hand on `batches`, one a step, and asserts that loss, norm, gradients and weights that `recorded` saw of them
    are the same within `tolerance`, relative.

    named: fresh layers, which get the dtype of the run's. first: the weights of the whole model at the start, where
    `recorded` holds a part of it.
    """
    start = recorded.first if first is None else first
    for _, module in named:
        module.to(next(iter(start.values())).dtype)
    loop = PlainLoop(
        named,
        CrossEntropy(CrossEntropyConfig()),
        optimizer=lambda parameters: make_optimizer([parameter for _, parameter in parameters if parameter.requires_grad]),
    )
    loop.load(start)
    for batch, row, gradients in zip(batches, recorded.rows, recorded.gradients, strict=True):
        size = len(next(iter(batch.values())))
        micros = [{name: value[at : at + micro_size] for name, value in batch.items()} for at in range(0, size, micro_size)]
        assert_step(loop.step(micros), row, gradients, {}, tolerance)
    weights = loop.weights
    assert_close_gradients({name: weights[name] for name in recorded.weights}, recorded.weights, tolerance)
