"""What handlers say that a step exchanges, against the bytes that they count in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.draft import draft_model
from sley_core.engine.on_meta import meta_micro_batch
from sley_core.engine.stage import stage_of
from sley_core.errors import PlanError
from sley_core.model.layers import Model
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.bytes.stages import stage_bytes
from sley_estimate.layers.of_plan import priced_layers
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.seconds_of_plan import estimate_both, estimate_seconds
from sley_estimate.stage_facts import stage_facts
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import changed, small_plan

DATA = {"use": "core.text", "source": "python-stdlib", "sequence": 24}


def plan_of(**changes: Any) -> dict[str, Any]:
    return small_plan(**{"data": DATA, "precision": {"compute": "fp32"}} | changes)


PASSES = {"sum": 2, "gather": 1, "reduce": 1, "swap": 1}


def told_and_counted(tables: dict[str, Any]) -> list[tuple[int, int]]:
    """For each handler of a run, after two steps: the bytes that a rank sends by its exchanges, and those that it counted."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables), world) as run:
        for _ in range(2):
            run.step()
        found = []
        for handler in run.stepper.handlers:
            told = 0
            for one in handler.exchanges() or ():
                size = run.groups[one.axis].size
                told += one.num_bytes * (size - 1) * PASSES[one.kind] // size
            found.append((told, int(handler.counts()["sent_bytes_per_step"])))
        return found


@pytest.mark.parametrize(
    "handler",
    [{"use": "core.each"}, {"use": "dp.bucketed"}, {"use": "dp.bucketed", "reduction": "bf16", "bucket_mb": 0.01}],
)
def test_a_reducer_tells_the_bytes_that_it_sends(ranks: Callable[..., Any], handler: dict[str, Any]) -> None:
    for ((told, counted),) in ranks(2)(told_and_counted, plan_of(gradient_handlers=[handler])):
        assert told == counted > 0


def test_a_tie_is_told_as_it_is_sent(ranks: Callable[..., Any]) -> None:
    plan = plan_of(
        model__tie_embeddings=True,
        parallel={"pp": 2, "dp": 1},
        pipeline={"use": "pp.one_f_one_b"},
        gradient_handlers=[{"use": "pp.shared_modules"}],
    )
    for ((told, counted),) in ranks(2)(told_and_counted, plan):
        assert told == counted > 0


def test_every_shard_is_reduced_and_gathered_once() -> None:
    plan = plan_from_dict(plan_of(parallel={"dp": 4}, gradient_handlers=[{"use": "dp.sharded", "bucket_mb": 0.01}]))
    with World.fake(1, 4) as world, assemble(plan, world) as run:
        told = run.stepper.handlers[0].exchanges() or ()
        for kind in ("reduce", "gather"):
            entries = [entry for one in told if one.kind == kind for entry in one.entries]
            assert sorted(entry.name for entry in entries) == sorted(entry.name for entry in run.book.trainable)
        reduced = sum(one.num_bytes for one in told if one.kind == "reduce")
        assert reduced == sum(buffer.data.nbytes for buffer in run.store.buffers)


LINK = {"latency_s": 1e-4, "bandwidth": 1e9}
MACHINE = small_machine(device__kind="cpu", links={"ranks_per_host": 2, "same_host": LINK})


def seconds(tables: dict[str, Any], size: int, machine: dict[str, Any] = MACHINE) -> float:
    return estimate_seconds(plan_from_dict(tables), size, machine_from_dict(machine)).step.seconds


def draft(plan: Plan) -> Model:
    return draft_model(plan, open_dataset(plan.data, DataContext(0, "train")).info)


@pytest.mark.parametrize("handler", ["core.each", "dp.bucketed", "dp.sharded"])
def test_a_slower_link_makes_a_step_longer_with_every_reducer(handler: str) -> None:
    plan = plan_of(parallel={"dp": 2}, gradient_handlers=[{"use": handler}])
    slow = changed(MACHINE, links__same_host=LINK | {"bandwidth": 1e6})
    assert seconds(plan, 2, slow) > 1.1 * seconds(plan, 2)


@pytest.mark.parametrize(
    ("changes", "size", "says"),
    [
        ({"parallel": {"dp": 4}}, 4, r"no `\[links.other_host\]`"),
        ({"precision": {"compute": "bf16"}}, 1, r"no `\[device.matmul.bf16\]`"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], size: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        seconds(plan_of(**changes), size)


def test_estimates_are_made_where_no_plan_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, and no process group is left."""
    monkeypatch.chdir(tmp_path)
    assert seconds(plan_of(parallel={"pp": 2, "dp": 1}, pipeline={"use": "pp.one_f_one_b"}), 2) > 0
    assert not list(tmp_path.iterdir())


def test_stages_that_are_alike_are_what_each_would_say_of_itself() -> None:
    """Keys that differ everywhere leave no two stages alike, so that each is asked."""
    tables = plan_of(
        model__num_layers=6,
        parallel={"pp": 4, "dp": 2},
        pipeline={"use": "pp.one_f_one_b"},
        partition={"use": "pp.uniform"},
        gradient_handlers=[{"use": "dp.sharded"}],
    )
    plan = plan_from_dict(tables)
    topology, machine = plan.topology(8), machine_from_dict(MACHINE)
    dataset, model = open_dataset(plan.data, DataContext(0, "train")), draft(plan)
    layers = priced_layers(plan, model, meta_micro_batch(plan, dataset), machine)
    stage = stage_of(plan, topology, 0, model, [1.0] * len(layers))
    shared = stage_facts(plan, topology, stage, layers)
    asked = stage_facts(plan, topology, stage, [replace(layer, key=layer.name) for layer in layers])
    assert shared[1] is shared[2]
    assert asked[1] is not asked[2]
    for number, (one, other) in enumerate(zip(shared, asked, strict=True)):
        assert one.update_bytes == other.update_bytes > 0
        first = [told.on(number, topology, machine.links) for told in one.exchanges]
        assert first == [told.on(number, topology, machine.links) for told in other.exchanges]
        assert first


@pytest.mark.parametrize("handler", ["dp.sharded", "dp.bucketed"])
def test_runs_that_tell_their_bytes_tell_the_same_exchanges(handler: str) -> None:
    """They are asked before their first step, as a run is that takes none."""
    tables = plan_of(
        model__tie_embeddings=True,
        parallel={"pp": 2, "dp": 2},
        pipeline={"use": "pp.one_f_one_b"},
        partition={"use": "pp.uniform"},
        gradient_handlers=[{"use": handler}, {"use": "pp.shared_modules"}],
    )
    plan, machine = plan_from_dict(tables), machine_from_dict(changed(MACHINE, links__ranks_per_host=4))
    held, seconds = estimate_both(plan, 4, machine)
    assert held == list(stage_bytes(plan, 4))
    assert seconds.step == estimate_seconds(plan, 4, machine).step
    assert seconds.step.exposed_s(0)


@pytest.mark.parametrize(("dp", "reduced"), [(1, {}), (2, {"gradient_handlers": [{"use": "dp.bucketed"}]})])
def test_all_that_stages_have_is_updated_whether_or_not_it_is_reduced(dp: int, reduced: dict[str, Any]) -> None:
    """By AdamW in fp32: the gradient is read twice, weight and two states are read and written."""
    staged = {"parallel": {"pp": 2, "dp": dp}, "pipeline": {"use": "pp.one_f_one_b"}}
    plan = plan_from_dict(plan_of(**staged, optimizer={"use": "core.adamw", "lr": 1e-3}, **reduced))
    parameters = {p for layer in draft(plan).layers for p in layer.module.parameters()}
    moved_bytes = 4 * (2 + 2 * 3) * sum(p.numel() for p in parameters)
    found = estimate_seconds(plan, 2 * dp, machine_from_dict(changed(MACHINE, links__ranks_per_host=4))).step
    assert sum(found.updating_s) == pytest.approx(moved_bytes / MACHINE["device"]["memory_bandwidth"])
