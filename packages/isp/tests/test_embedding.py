"""Tables that are cut by columns change no number, and are never gathered, reduced or whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import ATTACHES, assert_same_sequence, collectives
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import assert_parity, record, same_on_all

HIDDEN = {"embedding": "hidden"}
SPLIT = {"dp": 1, "sequence": {"use": "isp.all_to_all"}, "parallel": {"sp": 2}}
RECOMPUTED = {"activations": {"use": "core.recompute", "fraction": 1.0}}
ROWS, WIDTH, TOKENS = 257, 16, 48
"""Of the table; and tokens of a rank's micro-batch, of which there are two per step."""


def test_parity(parities):
    """Of four micro-batches; with a vocabulary-parallel head, slices, and gradients once per step; without overlap."""
    both = HIDDEN | {"head": "vocabulary", "reduce": "step"}
    parities(2, [{"batch__micro_size": 1}, SPLIT | {"weights": both}, {"weights": HIDDEN | {"overlap": False}}], weights=HIDDEN)


def test_tables_of_uneven_width_that_are_read_twice(parities):
    """Three columns and two; of four ranks one has none; padding, positions, a table in two layers, a frozen layer."""
    parities(2, [RECOMPUTED, {"options": {"frozen": "again"}}], weights=HIDDEN, factory="tables")
    parities(4, [{}], weights=HIDDEN, factory="tables")


@pytest.mark.parametrize("model", [{"precision__compute": "bf16"}, {"factory": "autocast"}])
def test_half_precision(ranks, texts, sharded, model):
    """In bf16 storage, and in a model that computes in bf16 by itself."""
    reference = record(sharded(1, 1, **model), 1, folder=texts)
    for layout in ranks(2)(record, sharded(2, weights=HIDDEN, **model), 1, folder=texts):
        assert_close_gradients(reference.gradients[0], layout.gradients[0], 2**-7)
        assert layout.rows[0]["loss"] == pytest.approx(reference.rows[0]["loss"], rel=2**-7)


def batches(num_steps: int) -> list[list[dict[str, Tensor]]]:
    """Micro-batches of one sample of every length: at the same time, ranks have unequal ones."""
    found = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        micros = []
        for length in (5, 8, 7, 3, 2, 2, 1, 6):
            tokens = torch.randint(11, (1, length), generator=generator)
            y = torch.randn(1, length, 6, generator=generator, dtype=torch.float64)
            micros.append({"tokens": tokens, "y": y})
        found.append(micros)
    return found


def test_unequal_numbers_of_tokens(ranks, texts, sharded):
    """Shorter ones are padded where they are gathered; the padding row's gradient stays zero."""
    changes = {"factory": "tables", "batch": {"global_size": 8, "micro_size": 1}}
    reference = record(sharded(1, 1, **changes), 3, folder=texts, batches=batches(3))
    layouts = ranks(2)(record, sharded(2, weights=HIDDEN, **changes), 3, folder=texts, batches=batches(3))
    assert_parity(reference, layouts, "fp64")
    same_on_all(layouts)


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.found.add(tuple(tensor.shape))
        return result


def seen(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Of the second step: the groups, the exchanges, the counters, the shapes that are computed, and the gradient's."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        with Shapes() as shapes, collectives() as calls:
            run.step()
        communicator = run.stepper.executor.weights
        shape = tuple(run.store.gradient(run.registry["embed.tokens.weight"]).shape)
        names = {param.name for group in communicator.groups for param in group.params}
        counts = communicator.counts() | {"lent": communicator.pool.num_lent}
        return {"names": names, "shapes": shapes.found, "calls": list(calls), "shape": shape, "counts": counts}


@pytest.mark.sample(1)
@pytest.mark.parametrize("attaches", ATTACHES)
def test_nothing_is_gathered_reduced_or_whole(ranks, sharded, texts, attaches):
    """Two all-to-alls of vectors per micro-batch, their ids, and no demand for a gather; the same on both ranks."""
    rest = {"evaluation": {"every": 100, "steps": 2}, "run__steps": 9, "parallel": {"cross_memory_attach": attaches}}
    found = ranks(2)(seen, sharded(2, weights=HIDDEN | {"head": "vocabulary"}, **rest), texts)
    assert_same_sequence([one["calls"] for one in found])
    for one in found:
        assert "embed.tokens.weight" not in one["names"]
        assert not {(ROWS, WIDTH), (ROWS + 1, WIDTH)} & one["shapes"]
        assert one["shape"] == (ROWS, WIDTH // 2)
        exchange = ("swap", TOKENS * WIDTH) if attaches else ("send", TOKENS * WIDTH // 2)  # its half to the other rank
        assert [(call.op, call.numel) for call in one["calls"]].count(exchange) == 4
        assert one["counts"]["embedding_exchanges_per_step"] == 4
        assert one["counts"]["embedding_bytes_per_step"] == 2 * (2 * TOKENS * WIDTH // 2 * 8 + TOKENS * 8)
        assert one["counts"]["demand_gathers_per_step"] == 0
        assert one["counts"]["lent"] == 0


def exchanges(plans: list[dict[str, Any]], folder: Path) -> list[float]:
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            run.step()
            found.append(run.stepper.executor.weights.counts()["embedding_exchanges_per_step"])
    return found


def test_exchanges_of_recomputed_and_of_frozen_tables(ranks, sharded, texts):
    """Of four look-ups one is in a block, and one is of a table that may be frozen: it needs no gradient."""
    frozen = {"optimizer__groups": [{"match": "*positions*", "freeze": True}]}
    plans = [sharded(2, weights=HIDDEN, factory="tables", **change) for change in (RECOMPUTED, frozen)]
    for recomputed, of_frozen in ranks(2)(exchanges, plans, texts):
        assert (recomputed, of_frozen) == (2 * (4 + 1 + 4), 2 * (4 + 3))
