"""Owners of matrices follow writes, offloads, freezes and skipped steps; test_drawn_models.py has their updates in layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import layout_of, num_ranks

from sley_core.engine.weights import update_cost
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import RunRecord, Tensors, assert_parity_of_parts, record, running, weights
from sley_trainer.run import Run

ORTHOGONAL = {"factory": "matrix_optimizers:Orthogonal", "scope": "matrix", "lr": 0.02, "weight_decay": 0.1, "clip_norm": 1.0}
PLAN = small_plan(
    model__ffn_hidden=27,
    model__vocab_size=257,
    model__tie_embeddings=True,
    data__sequence=16,
    batch={"global_size": 4, "micro_size": 1},
    optimizer=ORTHOGONAL,
    learning_rate={"use": "core.cosine"},
)
"""257 tokens and 27 channels are no multiples of a number of ranks, so shards are padded."""


def write_and_offload(tables: Tables, folder: Path) -> Tensors:
    """Returns the weights after a program has loaded and written some between steps, and moved states and masters."""
    with running(tables, folder) as run:
        run.step()
        run.load_weights({name: value.double() * 0.75 for name, value in weights(run).items()})
        run.step()
        with torch.no_grad():
            for param in run.registry:
                param.parameter.mul_(1.25)
        if tables.get("offload"):
            run.memory.offload().wait()
            run.memory.onload().wait()
        run.step()
        return weights(run)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["wp2 wdp2 sharded", "dp2 sharded", "wp2"])
@pytest.mark.parametrize("when", ["between_steps", "idle"])
def test_owners_follow_writes_and_offloads(ranks: Any, texts: Path, layout: str, when: str) -> None:
    offload = [{"use": "memory.optimizer_states", "when": when}] if when == "between_steps" else [{"use": "memory.everything"}]
    expected = write_and_offload(PLAN, texts)
    tables = layout_of(layout, PLAN, offload=offload)
    for values in ranks(num_ranks(tables))(write_and_offload, tables, texts):
        assert_close_gradients(expected, values, 1e-10)


def freeze_and_unfreeze(tables: Tables, folder: Path) -> Tensors:
    """Returns the weights after steps in which other matrices are frozen."""
    with running(tables, folder) as run:
        up, down = (run.registry[f"blocks.0.feed_forward.{name}.weight"].parameter for name in ("up", "down"))
        assert not up.requires_grad
        for up_is_trained, down_is_trained in ((False, True), (True, False), (True, True)):
            up.requires_grad_(up_is_trained)
            down.requires_grad_(down_is_trained)
            run.step()
        return weights(run)


@pytest.mark.parametrize("layout", ["wp2"])
def test_unfrozen_matrices_get_an_owner(ranks: Any, texts: Path, layout: str) -> None:
    plan = changed(PLAN, optimizer__groups=[{"match": "blocks.0.feed_forward.up.weight", "freeze": True}], run__steps=4)
    expected = freeze_and_unfreeze(plan, texts)
    for values in ranks(2)(freeze_and_unfreeze, layout_of(layout, plan), texts):
        assert_close_gradients(expected, values, 1e-10)


def skip_steps(tables: Tables, folder: Path) -> tuple[RunRecord, dict[str, tuple[int, ...]]]:
    """Returns the record of two steps, and the shapes of the matrices that this rank owns."""
    runs: list[Run] = []
    recorded = record(tables, 2, folder=folder, prepare=runs.append)
    owners = runs[0].stepper.update.masters.owners
    assert owners is not None
    return recorded, {param.name: param.shape for param in owners.owned_params}


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["wp2 wdp2 sharded", "dp2 sharded"])
def test_skipped_fp16_steps_change_nothing_and_owners_are_balanced(ranks: Any, texts: Path, layout: str) -> None:
    precision = {"compute": "fp16", "loss_scale": {"init_scale": 2.0**40}}
    tables = layout_of(layout, changed(PLAN, precision=precision, run__steps=12))
    results = ranks(num_ranks(tables))(skip_steps, tables, texts)
    for recorded, _ in results:
        assert_same_bits(recorded.initial_weights, recorded.weights)
    names = [name for _, owned in results for name in owned]
    assert len(names) == len(set(names)), "a matrix has two owners"
    assert set(names) == set(results[0][0].gradients[0]), "a matrix has no owner"
    works = [sum(map(update_cost, owned.values())) for _, owned in results]
    largest = max(update_cost(shape) for _, owned in results for shape in owned.values())
    assert max(works) - min(works) <= largest


@pytest.mark.parametrize(
    ("layout", "codes"), [("dp2 sharded", ["optimizer-layout"]), ("wp2", ["optimizer-layout"]), ("pp2", [])]
)
def test_matrices_on_the_host_are_refused_if_they_are_split(texts: Path, layout: str, codes: list[str]) -> None:
    plan = plan_from_dict(layout_of(layout, PLAN, offload=[{"use": "memory.host_optimizer"}]), texts)
    problems = check_plan(plan, 2)
    assert [problem.code for problem in problems] == codes
    assert all("remove `memory.host_optimizer`" in str(problem.hint) for problem in problems)


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", ["dp2 sharded", "wp2"])
def test_owners_on_cuda_have_the_update_of_one_process(ranks: Any, texts: Path, layout: str) -> None:
    plan = changed(PLAN, run__device="cuda")
    results = ranks(2, timeout_s=180, init=False)(record, layout_of(layout, plan), 3, folder=texts)
    assert_parity_of_parts(record(plan, 3, folder=texts), results, "fp64")
