"""The loop that everybody writes by hand, as an oracle: torch's autograd and optimizer over the same layers, no engine.

reference = record(tables, 3, batches=batches)                            # any layout of the plan
assert_by_hand(reference, model(info), batches, partial(torch.optim.SGD, lr=0.1), micro_size=1)

It shares the first weights and the samples with the run that it judges, and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.testing.parity import assert_close_gradients
from sley_core.testing.runs import Recorded

Batch = Mapping[str, Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
LossSum = Callable[[Any, Batch], Tensor]


def cross_entropies(logits: Tensor, batch: Batch) -> Tensor:
    """The sum over the labels that count."""
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def labels_that_count(batch: Batch) -> float:
    """By what that sum is divided."""
    return float((batch["labels"] != -100).sum())


def trained_by_hand(
    named: Sequence[tuple[str, nn.Module]],
    first: Mapping[str, Tensor],
    batches: Sequence[Batch],
    make_optimizer: MakeOptimizer,
    *,
    micro_size: int,
    loss: LossSum = cross_entropies,
    weight: Callable[[Batch], float] = labels_that_count,
) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, one batch each in micro-batches of `micro_size` samples, and the weights after the last.

    named: fresh layers. first: what their parameters and buffers start from, by name; its dtype is theirs.
    """
    tensors: dict[str, Tensor] = {}
    for name, module in named:
        module.to(next(iter(first.values())).dtype)
        tensors |= dict(module.named_parameters(name)) | dict(module.named_buffers(name))
    with torch.no_grad():
        for name, value in first.items():
            tensors[name].copy_(value)
    parameters = [one for one in tensors.values() if isinstance(one, nn.Parameter) and one.requires_grad]
    optimizer = make_optimizer(list(dict.fromkeys(parameters)))
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = weight(batch)
        size = len(next(iter(batch.values())))
        losses.append(0.0)
        for at in range(0, size, micro_size):
            part = {name: value[at : at + micro_size] for name, value in batch.items()}
            value = loss(called([module for _, module in named], part), part) / total
            value.backward()  # type: ignore[no-untyped-call]  # torch's
            losses[-1] += value.item()
        optimizer.step()
    return losses, {name: tensors[name].detach().clone() for name in first}


def called(modules: Sequence[nn.Module], batch: Batch) -> Any:
    """The output of the last module; each is called with that of the one before, and the fields that its forward names."""
    args: tuple[Any, ...] = ()
    for module in modules:
        names = inspect.signature(module.forward).parameters
        args = (module(*args, **{name: batch[name] for name in batch if name in names}),)
    (output,) = args
    return output


def assert_by_hand(
    recorded: Recorded,
    named: Sequence[tuple[str, nn.Module]],
    batches: Sequence[Batch],
    make_optimizer: MakeOptimizer,
    *,
    micro_size: int,
    tolerance: float = 1e-10,
    first: Mapping[str, Tensor] | None = None,
) -> None:
    """What `recorded` saw are the losses and the weights of the loop by hand, relative.

    first: of the whole model, where `recorded` holds a part of it.
    """
    start = recorded.first if first is None else first
    losses, weights = trained_by_hand(named, start, batches, make_optimizer, micro_size=micro_size)
    for number, (row, wanted) in enumerate(zip(recorded.rows, losses, strict=True), start=1):
        assert abs(row["loss"] - wanted) <= tolerance * abs(wanted), f"step {number}: loss {row['loss']}, not {wanted}"
    assert_close_gradients({name: weights[name] for name in recorded.weights}, recorded.weights, tolerance)
