"""Buffers that training writes are in a checkpoint: each rank's own where the layout is the same."""

from __future__ import annotations

from importlib import import_module

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict
from sley_testing.checkpointer_contract import assert_same_stretch, stretch

NORMALISED = {"factory": "own_models:batch_norm", "options": {"declared": True}}
DP = {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]}


def there_and_back(tables, folder, path):
    whole = stretch(tables, 4, folder=folder)
    stretch(tables, 2, folder=folder, save=path)
    return whole, stretch(tables, 2, folder=folder, load=path)


def running(weights):
    return {name: value for name, value in weights.items() if "running_mean" in name}


def test_each_rank_gets_its_own_running_statistics(ranks, small, own, tmp_path):
    tables = small(model=NORMALISED, run__steps=9, **DP)
    every = ranks(2)(there_and_back, tables, own, tmp_path / "saved")
    assert_same_stretch([one for one, _ in every], [other for _, other in every])
    (one, _), (other, _) = every
    (name,) = running(one.weights)
    assert not one.weights[name].equal(other.weights[name]), "ranks see other samples"


def test_buffers_that_training_writes_and_nobody_declared_are_told_in_a_run_that_goes_on(small, own, tmp_path, monkeypatch):
    """Its first step is not the first of the run."""
    tables = small(model=NORMALISED, run__steps=9)
    stretch(tables, 1, folder=own, save=tmp_path / "saved")
    made = import_module("own_models")
    as_before = made.batch_norm
    monkeypatch.setattr(made, "batch_norm", lambda data, declared: as_before(data, declared=not declared))
    with assemble(plan_from_dict(tables, own), World.alone("cpu")) as run:
        run.load_checkpoint(tmp_path / "saved")
        with pytest.raises(PlanError, match="model-buffer-written"):
            run.step()
