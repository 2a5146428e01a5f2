"""Steps unlike the others: fewer micro-batches, skipped, begun before the weights are there."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import GRADIENTS, assert_parity, record, same_on_all, weights

FOREIGN = {"data": {"factory": "isp_parts:Points"}, "loss": {"factory": "isp_parts:Squares"}}


def test_copies_of_norms_stay_equal(ranks, texts, sharded):
    """Five steps on different data: what every rank holds whole, as norms, is equal bit for bit on all and does not drift."""
    tables = sharded(2, run__steps=5, evaluation={"every": 20, "steps": 1})
    same_on_all(ranks(2)(record, tables, 5, folder=texts))


def uneven(tables: dict[str, Any], folder: Any, sizes: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights after steps on global batches of these sizes, of which each rank takes its share."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        dp, losses = run.groups["dp"], []
        for number, size in enumerate(sizes):
            generator = torch.Generator().manual_seed(number)
            y = torch.randn(size, 4, 6, generator=generator, dtype=torch.float64)
            batch = {"tokens": torch.randint(11, (size, 4), generator=generator), "y": y}
            row = run.step({name: value.chunk(dp.size)[dp.coord] for name, value in batch.items()})
            losses.append(row["loss"])
        return losses, weights(run)


def test_a_number_of_micro_batches_that_varies(ranks, texts, sharded, own):
    """One, four and two micro-batches per rank, in any of which a gradient is reduced, equal one process."""
    changes = {"model": {"factory": "isp_parts:mixed"}, "batch": {"global_size": 8, "micro_size": 1}, **FOREIGN}
    sizes = [2, 8, 4]
    losses, wanted = uneven(sharded(1, 1, **changes), texts, sizes)
    for once in ("micro_batch", "step"):
        for found_losses, found in ranks(2)(uneven, sharded(2, weights={"reduce": once}, **changes), texts, sizes):
            assert found_losses == pytest.approx(losses, rel=1e-10)
            assert_close_gradients(wanted, found, 1e-10)


def overflow(run: Run, rank: int) -> None:
    """A gradient of this rank's is infinite in the second step."""
    if int(os.environ.get("RANK", rank)) != rank:
        return
    param = next(param for param in run.registry if "norm" in param.name)

    def spoil(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, math.inf) if run.store.state.step == 1 else gradient

    param.parameter.register_hook(spoil)


@pytest.mark.parametrize(
    ("head", "clip_norm"),
    [
        ("gather", 0.5),
        ("vocabulary", None),
        pytest.param("gather", None, marks=pytest.mark.campaign),
        pytest.param("vocabulary", 0.5, marks=pytest.mark.campaign),
    ],
)
def test_a_step_that_is_skipped(ranks, texts, sharded, head, clip_norm):
    """An overflow on one rank skips the step on both, with and without clipping; the others are taken."""
    changes = {"precision__compute": "fp16", "batch": {"global_size": 4, "micro_size": 2}}
    changes["optimizer"] = {"use": "core.adamw", "lr": 3e-3} | ({"clip_norm": clip_norm} if clip_norm else {})
    reference = record(sharded(1, 1, **changes), 3, folder=texts, prepare=partial(overflow, rank=0))
    tables = sharded(2, weights={"head": head}, **changes)
    layouts = ranks(2)(record, tables, 3, folder=texts, prepare=partial(overflow, rank=1))
    same_on_all(layouts)
    for layout in layouts:
        for key in ("skipped", "loss_scale"):
            assert [row[key] for row in layout.rows] == [row[key] for row in reference.rows]
        assert [row["skipped"] for row in layout.rows] == [0, 1, 0]
        assert layout.rows[0]["grad_norm"] == pytest.approx(reference.rows[0]["grad_norm"], rel=GRADIENTS["fp16"])
        assert_close_gradients(reference.gradients[0], layout.gradients[0], GRADIENTS["fp16"])
        assert all(value.isfinite().all() for value in layout.weights.values())


def late(tables: dict[str, Any], folder: Any, delay_s: float | None) -> dict[str, Tensor]:
    """Weights after three steps. delay_s: shards are zeros after each step, until a wait of their layer brings them."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        kept: dict[str, Tensor] = {}
        layers = {layer.name: [] for layer in run.layers}
        for param in run.registry:
            for name in layers:
                if param.name.startswith(name + ".") or any(alias.startswith(name + ".") for alias in param.aliases):
                    layers[name].append(param)

        @torch.no_grad()
        def bring(name: str) -> None:
            coming = [param for param in layers[name] if param.name in kept]
            if coming and delay_s is not None:
                time.sleep(delay_s)
            for param in coming:
                param.parameter.data.copy_(kept.pop(param.name))  # as a collective writes: no version tells of it

        for name in layers:
            run.before_layer(name, partial(bring, name))
        for _ in range(3):
            run.step()
            if delay_s is not None:
                kept |= {param.name: param.parameter.detach().clone() for param in run.registry}
                with torch.no_grad():
                    for param in run.registry:
                        param.parameter.zero_()
        for name in layers:
            bring(name)
        return weights(run)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("head", "unit"),
    [
        ("gather", "layer"),
        ("vocabulary", "module"),
        pytest.param("gather", "module", marks=pytest.mark.campaign),
        pytest.param("vocabulary", "layer", marks=pytest.mark.campaign),
    ],
)
def test_weights_that_come_late_are_waited_for(ranks, texts, sharded, unit, head):
    """A sleep in the wait of a layer never leads to a weight of before, whoever gathers; norms and head too."""
    changes = {"batch": {"global_size": 4, "micro_size": 1}, "model__tie_embeddings": unit == "layer"}
    tables = sharded(2, weights={"unit": unit, "ahead": 2, "head": head}, **changes)
    wanted, _ = ranks(2)(late, tables, texts, None)
    for found in ranks(2)(late, tables, texts, 0.01):
        assert_same_bits(wanted, found)


def reduced(tables: dict[str, Any], folder: Any) -> set[str]:
    """The names of the weights whose gradients are reduced in a step."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        reductions, names = run.stepper.executor.weights.reductions, set()
        add = reductions.add

        def spy(bucket: Any, place: Any, param: Any, write: Any) -> None:
            names.add(param.name)
            add(bucket, place, param, write)

        reductions.add = spy
        run.step()
        return names


def test_nothing_is_reduced_for_frozen_weights(ranks, texts, sharded, own):
    """Neither for adapters' frozen bases, nor for the weight of which only the bias is trained."""
    tables = sharded(2, model={"factory": "isp_parts:adapted"}, **FOREIGN)
    for names in ranks(2)(reduced, tables, texts):
        trained = {"base": [], "down": ["weight"], "up": ["weight"], "shifted": ["bias"]}
        blocks = {f"block{at}.{name}.{one}" for at in (0, 1) for name, held in trained.items() for one in held}
        assert names == {"embed.table.weight", "head.weight", "head.bias", *blocks}


def closed(tables: dict[str, Any], folder: Any) -> str:
    with World.join("cpu") as world:
        with assemble(plan_from_dict(tables, folder), world) as run:
            run.step()
        try:
            run.layers[0].module(torch.arange(4)[None])
        except RunError as error:
            return str(error)
    return "nothing"


def test_a_model_called_after_its_run(ranks, texts, sharded):
    """Its shards are no weights: it says so, instead of computing with them."""
    for said in ranks(2)(closed, sharded(2), texts):
        assert "the parameter 'embed.tokens.weight' after its run was closed" in said


def test_parity_of_the_loss_with_whole_logits(ranks, texts, sharded):
    """With a gathered head, ignored labels and smoothing count as in one process."""
    changes = {"data__documents": "pad", "loss": {"use": "core.cross_entropy", "label_smoothing": 0.1}}
    reference = record(sharded(1, 1, **changes), 3, folder=texts)
    assert_parity(reference, ranks(2)(record, sharded(2, **changes), 3, folder=texts), "fp64")
