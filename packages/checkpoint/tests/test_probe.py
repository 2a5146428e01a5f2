"""Before the first step, ranks try whether they can save in one folder."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sley_checkpoint import checkpoints, folders
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan

DP = {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}], "limits": {"collective_timeout_s": 4}}


def of_host(path: str | Path, host: str) -> folders.Folder:
    """Returns the folder that another host has at the same path."""
    return folders.LocalFolder(Path(host, *Path(path).parts[1:]))


def refusing(*_: Any) -> Any:
    raise PermissionError(13, "Permission denied", "there")


def trained(tables: dict[str, Any], texts: Path, folder: Path, wrong: str) -> str:
    """Returns the error of a run on this rank. wrong: what rank 1 does not have."""
    with World.join("cpu") as world, pytest.MonkeyPatch.context() as patch:
        if world.rank == 1 and wrong == "another host":
            patch.setattr(checkpoints, "open_folder", partial(of_host, host=str(folder / "host-1")))
        if world.rank == 1 and wrong == "no right to write":
            patch.setattr(folders.LocalFolder, "write", refusing)
        with assemble(plan_from_dict(tables, texts), world, folder=folder) as run:
            try:
                run.train()
            except RunError as error:
                return str(error)
    return ""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("another host", "rank 1 cannot save in {}/checkpoints: it does not see what rank 0 writes there"),
        ("no right to write", "rank 1 cannot save in {}/checkpoints: Permission denied (there)"),
        ("nothing", ""),
    ],
)
def test_a_folder_that_is_not_one_for_all_ranks_is_refused_first(texts, tmp_path, ranks, wrong, said):
    tables = changed(small_plan(run__steps=2, checkpoint={"every_steps": 1}), **DP)
    errors = ranks(2, 60, init=False)(trained, tables, texts, tmp_path, wrong)
    assert all(said.format(tmp_path) in error for error in errors)
    assert all(bool(error) == bool(said) for error in errors), errors
    assert bool((tmp_path / "metrics.jsonl").stat().st_size) == (not said), "before the first step"
    left = list((tmp_path / "checkpoints").iterdir()) if (tmp_path / "checkpoints").exists() else []
    assert not [path for path in left if path.name.startswith(".")]
    assert bool(left) == (not said)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_without_the_right_to_write_is_refused_first(texts, tmp_path):
    (tmp_path / "checkpoints").mkdir(mode=0o500)
    tables = small_plan(run__steps=2, checkpoint={"every_steps": 1})
    with assemble(plan_from_dict(tables, texts), World.alone("cpu"), folder=tmp_path) as run:
        with pytest.raises(RunError, match="checkpoint-folder"):
            run.train()
        assert run.num_steps_done == 0


def test_a_rank_that_leaves_its_part_of_a_save_out_ends_no_run(texts, tmp_path, ranks):
    """Rank 0 stopped waiting when the others stopped waiting for it, and the run ended by a timeout."""
    tables = changed(small_plan(run__steps=2, checkpoint={"every_steps": 1, "mode": "sync"}), **DP)
    for notes in ranks(2, 60, init=False)(losing, tables, texts, tmp_path):
        assert any("rank 1 did not finish in 2 s; the run goes on without it" in note for note in notes)


def losing(tables: dict[str, Any], texts: Path, folder: Path) -> list[str]:
    """Returns the notes of a run whose rank 1 writes checkpoints elsewhere once the run is under way."""
    with (
        World.join("cpu") as world,
        pytest.MonkeyPatch.context() as patch,
        assemble(plan_from_dict(tables, texts), world, folder=folder) as run,
    ):
        if world.rank == 1:
            staging = folders.LocalFolder.staging
            run.readers.append(
                lambda _: patch.setattr(
                    folders.LocalFolder, "staging", lambda own, token: of_host(staging(own, token).path, str(folder / "host"))
                )
            )
        run.train()
        return list(run.notes)
