"""What a model has beside weights: extra state and buffers are in checkpoints, files and exports, or refused by name."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.checkpointing import checkpoint_files, load_plan_and_weights
from sley_core.comm.world import World
from sley_core.errors import PlanError, RunError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.loader import PluginLoader
from sley_core.weight_files.read import WeightFiles
from sley_testing.contract import SQUARES, WIDTH, contract_plan
from sley_testing.runs import assert_same_run, record, running
from sley_trainer.assemble import assemble


class Scaled(nn.Linear):
    """Divides by the largest input so far, which is no buffer."""

    def __init__(self, width: int, extra: Any = None) -> None:
        super().__init__(width, width)
        self.largest: Any = 0.1
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, float(x.detach().abs().max()))
        return super().forward(x / self.largest)

    def get_extra_state(self) -> Any:
        return {"largest": self.largest, "history": (torch.tensor([self.largest]), b"x"), "extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.largest, (history, _) = state["largest"], state["history"]
        assert float(history[0]) == pytest.approx(self.largest)


def layers(refused: bool = False) -> list[nn.Module]:
    return [Scaled(WIDTH), Scaled(WIDTH, extra=nn.Identity() if refused else None)]


def tables(**more: Any) -> dict[str, Any]:
    return contract_plan(
        "sley_testing.contract",
        loss=SQUARES,
        batch={"global_size": 4, "micro_size": 2},
        optimizer={"use": "core.sgd", "lr": 0.1},
        **{"model": {"factory": f"{__name__}:layers"}, **more},
    )


def states_of(run: Any) -> list[float]:
    return [layer.module.largest for layer in run.layers]


def begun(plan: dict[str, Any], folder: Path) -> tuple[float, list[float]]:
    """Takes a step and saves checkpoint and weights; returns the loss of the next step, and the states at the save."""
    with running(plan) as run:
        run.step()
        for number, layer in enumerate(run.layers):
            layer.module.largest = 10.0 + number + run.world.rank
        states = states_of(run)
        run.save_checkpoint(folder / "checkpoint")
        run.save_weights(folder / "weights", precision="full")
        return float(run.step()["loss"]), states


def resumed(plan: dict[str, Any], folder: Path) -> tuple[float, list[float]]:
    with running(plan) as run:
        run.load_checkpoint(folder / "checkpoint")
        states = states_of(run)
        return float(run.step()["loss"]), states


def test_each_replica_goes_on_with_its_own_and_another_layout_with_those_of_one(tmp_path: Path, ranks: Any) -> None:
    assert begun(tables(), tmp_path / "alone") == resumed(tables(), tmp_path / "alone")
    two = tables(parallel={"dp": 2}, gradient_handlers=[{"use": "core.each"}])
    before = ranks(2)(begun, two, tmp_path)
    assert before == ranks(2)(resumed, two, tmp_path)
    assert resumed(tables(), tmp_path)[1] == before[0][1]


def test_files_of_weights_and_exports_have_them(tmp_path: Path) -> None:
    _, states = begun(tables(), tmp_path)
    files = checkpoint_files(PluginLoader())
    found = files and files.open(str(tmp_path / "checkpoint"))
    assert found
    for source in (WeightFiles(tmp_path / "weights"), load_plan_and_weights(found)[1]):
        with running(tables()) as run:
            run.load_weights({name: source.tensor(name) for name in source.names})
            assert states_of(run) == states


def test_one_that_is_no_plain_data_is_refused_before_the_first_step() -> None:
    plan = plan_from_dict(tables(model={"factory": f"{__name__}:layers", "options": {"refused": True}}))
    with World.join("cpu") as world, pytest.raises(RunError, match=r"extra-state.*Scaled.*Identity"):
        assemble(plan, world)


NORMALISED = {"factory": "own_models:batch_norm", "options": {"declared": True}}
DP = {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]}


def there_and_back(tables, folder, path):
    whole = record(tables, 4, folder=folder)
    record(tables, 2, folder=folder, save=path)
    return whole, record(tables, 2, folder=folder, load=path)


def test_each_rank_gets_its_own_running_statistics(ranks, small, own, tmp_path):
    tables = small(model=NORMALISED, run__steps=9, **DP)
    every = ranks(2)(there_and_back, tables, own, tmp_path / "saved")
    for whole, resumed in every:
        assert_same_run(whole, resumed)
    (one, _), (other, _) = every
    name = "blocks.0.norm.running_mean"
    assert not one.weights[name].equal(other.weights[name]), "ranks see other samples"


def test_buffers_that_training_writes_and_nobody_declared_are_told_in_a_run_that_goes_on(small, own, tmp_path, monkeypatch):
    """Its first step is not the first of the run."""
    tables = small(model=NORMALISED, run__steps=9)
    record(tables, 1, folder=own, save=tmp_path / "saved")
    made = import_module("own_models")
    as_before = made.batch_norm
    monkeypatch.setattr(made, "batch_norm", lambda data, declared: as_before(data, declared=not declared))
    with running(tables, own) as run:
        run.load_checkpoint(tmp_path / "saved")
        with pytest.raises(PlanError, match="model-buffer-written"):
            run.step()
