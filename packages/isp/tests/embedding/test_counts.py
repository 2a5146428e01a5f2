"""What travels for a table that is cut by columns, what is never whole, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.shards import wholes
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import ATTACHES, assert_same_sequence, collectives
from sley_testing.live_bytes import memory_profile, peak_bytes
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import weights

HIDDEN = {"embedding": "hidden"}
FOREIGN = {"data": {"factory": "isp_parts:Points"}, "loss": {"factory": "isp_parts:Squares"}}
ROWS, WIDTH, TOKENS = 257, 16, 48
"""Of the table; and tokens of a rank's micro-batch, of which there are two per step."""


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
    """Of the third step: what is gathered, reduced, sent and counted, and the shapes that are computed."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        communicator = run.stepper.executor.weights
        names: dict[str, set[str]] = {"gathered": set(), "reduced": set()}
        gather, add = communicator._gather, communicator.reductions.add

        def gathers(unit: Any) -> Any:
            names["gathered"] |= {param.name for param in unit.params}
            return gather(unit)

        def adds(bucket: Any, place: Any, param: Any, write: Any) -> None:
            names["reduced"].add(param.name)
            add(bucket, place, param, write)

        communicator._gather, communicator.reductions.add = gathers, adds
        run.step()
        run.step()
        with Shapes() as shapes, collectives() as calls:
            run.step()
        held = run.store.gradient(run.registry["embed.tokens.weight"]).shape
        counts = communicator.counts()
        before = communicator.columns.num_exchanges
        run.evaluate()
        return names | {
            "shapes": shapes.found,
            "calls": list(calls),
            "held": tuple(held),
            "counts": counts,
            "evaluating": communicator.columns.num_exchanges - before,
            "left": communicator.pool.num_lent,
        }


@pytest.mark.sample(1)
@pytest.mark.parametrize("attaches", ATTACHES)
def test_nothing_is_gathered_reduced_or_whole(ranks, sharded, texts, attaches):
    """Two swaps of vectors per micro-batch, their ids, and no demand for a gather; the same on both ranks."""
    options = HIDDEN | {"head": "vocabulary"}
    apart = {"evaluation": {"every": 100, "steps": 2}, "run__steps": 9, "parallel": {"cross_memory_attach": attaches}}
    tables = sharded(2, weights=options, **apart)
    found = ranks(2)(seen, tables, texts)
    assert_same_sequence([one["calls"] for one in found])
    for one in found:
        assert "embed.tokens.weight" not in one["gathered"] | one["reduced"]
        assert not {(ROWS, WIDTH), (ROWS + 1, WIDTH)} & one["shapes"]
        assert one["held"] == (ROWS, WIDTH // 2)
        swap = ("swap", TOKENS * WIDTH) if attaches else ("send", TOKENS * WIDTH // 2)  # its half to the other rank
        assert [(call.op, call.numel) for call in one["calls"]].count(swap) == 4
        assert one["counts"]["embedding_swaps_per_step"] == 4
        assert one["counts"]["embedding_bytes_per_step"] == 2 * (2 * TOKENS * WIDTH // 2 * 8 + TOKENS * 8)
        assert one["counts"]["demand_gathers_per_step"] == 0
        assert one["counts"]["most_resident_units"] <= 2
        assert one["evaluating"] == 4, "two global batches of two micro-batches on each rank"
        assert one["left"] == 0


@pytest.mark.parametrize(
    ("change", "swaps"),
    [
        ({"activations": {"use": "core.recompute", "fraction": 1.0}}, 4 + 1 + 4),
        ({"optimizer__groups": [{"match": "*positions*", "freeze": True}]}, 4 + 3),
    ],
)
def test_swaps_of_recomputed_and_of_frozen_tables(ranks, sharded, texts, own, change, swaps):
    """Of four look-ups one is in a block, and one is of a table that may be frozen: nobody wants its gradient."""
    change = change | {"model": {"factory": "looked_up:layers"}} | FOREIGN
    change = change | {"evaluation": {"every": 100, "steps": 1}, "run__steps": 9}
    for counts in ranks(2)(counted, sharded(2, weights=HIDDEN, **change), texts):
        assert counts["embedding_swaps_per_step"] == 2 * swaps


def counted(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        return dict(run.stepper.executor.weights.counts())


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


def test_less_memory_than_with_a_gathered_table(ranks, sharded, texts):
    """With a shared vocabulary, so that there is nothing larger at another time: the table is not there, nor its gradient."""
    sizes = {"model__vocab_size": 8192, "model__num_layers": 1, "precision__compute": "fp32", "run__steps": 9}
    options = {"head": "vocabulary"}
    plans = [sharded(2, weights=options | {"embedding": kind}, **sizes) for kind in ("gather", "hidden")]
    gather, hidden = map(max, zip(*ranks(2, fresh=True)(peaks, plans, texts), strict=True))
    table = 8192 * 16 * 4
    print(f"{gather} bytes with a gathered table, {hidden} with one cut by columns, {table} are the table")
    assert gather - hidden > table // 2


def by_hand(tables: dict[str, Any], folder: Path) -> Any:
    """Calls the layers outside of a step, after one: an output, and the table's gradient of a backward."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        hidden: Any = None
        tokens = torch.arange(4)[None]
        with torch.no_grad():
            plain = run.layers[0].module(tokens)
        run.store.begin_step()
        hidden = run.layers[0].module(tokens)
        for layer in run.layers[1:]:
            hidden = layer.module(hidden, tokens) if layer.name == "again" else layer.module(hidden)
        hidden.sum().backward()
        param = run.registry["embed.tokens.weight"]
        summed = run.store.gradient(param) if param.shard else param.parameter.grad
        gradient = wholes({param: summed}, run.groups)[param]
        return plain, hidden.detach(), gradient / world.size


def test_a_model_called_by_hand(ranks, sharded, texts, own):
    """Right with and without gradients, which are in the store when the backward returns."""
    changes = {"model": {"factory": "looked_up:layers"}, **FOREIGN}
    wanted = by_hand(sharded(1, 1, **changes) | {"weights": {"use": "isp.communicator", **HIDDEN}}, texts)
    for found in ranks(2)(by_hand, sharded(2, weights=HIDDEN, **changes), texts):
        for value, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def varied(tables: dict[str, Any], folder: Any, fails: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights after steps of one, four and two micro-batches on two ranks; before the last, one that fails.

    It does in its second forward, when the gradient of the first micro-batch's vectors is on its way.
    """
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        dp, losses = run.groups["dp"], []
        for number, size in enumerate([2, 8, 4]):
            generator = torch.Generator().manual_seed(number)
            y = torch.randn(size, 4, 6, generator=generator, dtype=torch.float64)
            batch = {"tokens": torch.randint(11, (size, 4), generator=generator), "y": y}
            own = {name: value.chunk(dp.size)[dp.coord] for name, value in batch.items()}
            if fails and number == 2:
                answers = iter([None, ValueError("asked to")])

                def fail(module: Any, args: Any, answers: Any = answers) -> None:
                    if error := next(answers):
                        raise error

                handle = run.layers[-1].module.register_forward_pre_hook(fail)
                with pytest.raises(ValueError, match="asked to"):
                    run.step(own)
                handle.remove()
                assert len(run.stepper.executor.weights.columns._under_way) == 1
            losses.append(run.step(own)["loss"])
        return losses, weights(run)


def test_steps_of_other_sizes_and_one_that_fails(ranks, sharded, texts, own):
    """Nothing of a failed step, and nothing of a step before, is in another's gradients."""
    changes = {"model": {"factory": "isp_parts:mixed"}, "batch": {"global_size": 8, "micro_size": 1}, **FOREIGN}
    losses, wanted = varied(sharded(1, 1, **changes), texts, fails=False)
    for found_losses, found in ranks(2)(varied, sharded(2, weights=HIDDEN, **changes), texts, True):
        assert found_losses == pytest.approx(losses, rel=1e-10)
        assert_close_gradients(wanted, found, 1e-10)
