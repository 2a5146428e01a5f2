"""A run whose plan has no `[checkpoint]`: it imports nothing that saves, until a program asks for it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PluginError, UsageError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.loader import Loader
from sley_core.run import Run
from sley_testing.plans import small_plan


def loader_without() -> Loader:
    """Returns a loader of what the small plan names, where no checkpointer is installed."""
    return Loader({name: import_module(f"sley_{name}.plugin") for name in ("models", "data")})


def bare(texts: Path, folder: Path | None = None) -> Run:
    """Returns a run of the small plan where no checkpointer is installed."""
    plan = plan_from_dict(small_plan(), texts, loader=loader_without())
    return assemble(plan, World.alone("cpu"), folder=folder)


def test_a_save_and_a_load_say_what_to_install(texts, tmp_path):
    with bare(texts) as run:
        with pytest.raises(PluginError, match="packages/checkpoint"):
            run.save_checkpoint(tmp_path / "saved")
        with pytest.raises(PluginError, match="packages/checkpoint"):
            run.load_checkpoint(tmp_path / "saved")


def test_auto_begins_a_run_that_has_done_nothing_and_refuses_another(texts, tmp_path):
    with bare(texts, tmp_path) as run:
        assert run.load_checkpoint("auto") is None
        run.train()
    with bare(texts, tmp_path) as run:
        with pytest.raises(UsageError, match=r"never-anew.*rows up to step 3"):
            run.load_checkpoint("auto")
        assert run.load_checkpoint("auto", anew=True) is None
        run.step()


def test_auto_asks_for_what_read_the_checkpoints_of_the_run(texts, tmp_path):
    with assemble(plan_from_dict(small_plan(), texts), World.alone("cpu"), folder=tmp_path) as run:
        run.step()
        run.save_checkpoint()
    with bare(texts, tmp_path) as run, pytest.raises(PluginError, match="packages/checkpoint"):
        run.load_checkpoint("auto", anew=True)
