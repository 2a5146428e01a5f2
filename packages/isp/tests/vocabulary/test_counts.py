"""What a shared vocabulary saves: the head's gathers, and memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.live_bytes import memory_profile, peak_bytes

SHARED = {"head": "vocabulary"}
CLASSES = 257


class Widths(TorchDispatchMode):
    """Counts the matrices that operations return, by their number of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.ndim > 1:
                width = tensor.shape[-1]
                self.rows[width] = max(self.rows[width], tensor.numel() // width if width else 0)
        return result


def seen(tables: dict[str, Any], folder: Path) -> Any:
    """What a step and an evaluation gather, and the widths and heights of what they compute."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        communicator = run.stepper.executor.weights
        gathered: Counter[str] = Counter()
        gather = communicator._gather

        def spy(unit: Any) -> Any:
            gathered[unit.name] += 1
            return gather(unit)

        communicator._gather = spy
        with Widths() as widths:
            run.step()
            run.evaluate()
        left = communicator.pool.num_lent, len(communicator.prefetch.held)
        return dict(gathered), dict(widths.rows), left


@pytest.mark.parametrize("tied", [False, True])
def test_no_weight_is_gathered_and_no_logits_are_whole(ranks, sharded, texts, tied):
    """A token's 257 logits are never in one place, only the 129 of a slice, of the 2 x 48 tokens of both ranks."""
    tables = sharded(2, weights=SHARED, model__tie_embeddings=tied)
    for gathered, rows, left in ranks(2)(seen, tables, texts):
        assert set(gathered) == {"embed", "blocks.0", "blocks.1"}
        assert CLASSES not in rows
        assert rows[129] == 2 * 48
        assert left == (0, 0)


def peaks(plans: list[dict[str, Any]], folder: Path) -> list[int]:
    """Live bytes of tensors at most, in the second and third of some steps of each plan."""
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            run.step()
            with memory_profile() as profile:
                run.step()
                run.step()
            found.append(peak_bytes(profile))
    return found


def test_less_memory_than_with_a_gathered_head(ranks, sharded, texts):
    """Beside what both hold: no gathered weight, no full-size gradient of it, and logits once instead of twice."""
    sizes = {"model__vocab_size": 8192, "model__num_layers": 1, "precision__compute": "fp32", "run__steps": 9}
    plans = [sharded(2, weights={"head": head}, **sizes) for head in ("gather", "vocabulary")]
    gather, shared = map(max, zip(*ranks(2, fresh=True)(peaks, plans, texts), strict=True))
    weight = 8192 * 16 * 4
    print(f"{gather} bytes with a gathered head, {shared} with a shared vocabulary, {weight} are the head's weight")
    assert gather - shared > weight


def by_hand(tables: dict[str, Any], folder: Path) -> Any:
    """The head's output outside of a step: before one and after one."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        tokens = torch.arange(12).view(1, 12)

        def call() -> Any:
            hidden: Any = tokens
            for layer in run.layers:
                hidden = layer.module(hidden)
            return hidden

        before = call().detach()
        run.step()
        return before, call().detach(), run.stepper.executor.weights.pool.num_lent


def test_a_model_called_by_hand_has_its_logits(ranks, sharded, texts):
    """Outside of a run's actions the head is a linear like any other."""
    changes = {"data__documents": "cut"}
    tables = sharded(1, 1, **changes) | {"weights": {"use": "isp.communicator", **SHARED}}
    wanted = by_hand(tables, texts)
    for found in ranks(2)(by_hand, sharded(2, weights=SHARED, **changes), texts):
        for value, expected in zip(found[:2], wanted[:2], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
        assert found[2] == 0
