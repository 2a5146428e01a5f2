"""Folders of checkpoints: behind a URL, tried before the first step, and read by a rank whose read does not go on."""

from __future__ import annotations

import os
import threading
import time
from errno import ENOSPC
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_checkpoint import checkpoints, folders
from sley_checkpoint.folders import LocalFolder, RemoteFolder, StalledError, TimedFolder, TimedReads, open_folder
from sley_checkpoint.format import INDEX
from sley_checkpoint.reader import newest, read, verify
from sley_core.api.state import bytes_of
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError, UsageError
from sley_core.plan.load import plan_from_dict
from sley_testing.checkpointer_contract import stretch
from sley_testing.plans import changed, small_plan

fsspec = pytest.importorskip("fsspec")


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_run_saves_to_a_url_and_goes_on_from_there(texts, tmp_path, kind):
    url = f"{kind}://{tmp_path}/saved"
    plan = plan_from_dict(small_plan(run__steps=6, batch__micro_size=8, checkpoint={"every_steps": 2, "folder": url}), texts)
    with assemble(plan, World.alone("cpu")) as run:
        run.train()
        rows = [run.step()]
    folder = open_folder(url)
    assert folder.names() == ["step-00000004", "step-00000006"]
    found = newest(url)
    assert found == (f"{url}/step-00000006", [])
    assert read(found.path).step == 6
    with assemble(plan, World.alone("cpu")) as run:
        assert run.load_checkpoint("auto").step == 6
        again = run.step()
    assert again["loss"] == rows[0]["loss"]

    half = folder.child("step-00000006")
    half.delete(INDEX)
    assert newest(url) == (f"{url}/step-00000004", []), "without its index it was never one"
    whole = folder.child("step-00000004")
    data = whole.read("rank-00000.safetensors")
    whole.write("rank-00000.safetensors", [data[:-1]])
    (damage,) = verify(whole.text)
    assert "is truncated" in damage.description
    with assemble(plan, World.alone("cpu")) as run:
        run.step()
        run.save_checkpoint()
        assert folder.names() == ["step-00000001-1", "step-00000004", "step-00000006"], "another attempt may be writing"
        folder.child("step-00000001-1").delete(INDEX)
        run.save_checkpoint()
    assert folder.names() == ["step-00000001-2", "step-00000004", "step-00000006"], "what it has half written is gone"


def test_a_store_without_room_leaves_nothing_of_a_save_and_takes_the_next(texts, monkeypatch):
    """It refuses in the middle of the second save's file of tensors."""
    url = "memory://full/saved"
    plan = plan_from_dict(small_plan(checkpoint={"every_steps": 1, "folder": url, "mode": "sync"}), texts)
    plain, room = RemoteFolder.write, [2]

    def write(self, name, chunks):
        room[0] -= name.endswith(".safetensors")
        return plain(self, name, refusing(chunks) if room[0] == 0 else chunks)

    def refusing(chunks):
        yield from islice(chunks, 3)
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(RemoteFolder, "write", write)
    with assemble(plan, World.alone("cpu")) as run:
        run.step()
        run.step()
        assert open_folder(url).names() == ["step-00000001"]
        assert newest(url) == (f"{url}/step-00000001", [])
        assert any(note.endswith("No space left on device; the run continues without this checkpoint") for note in run.notes)
        run.step()
        assert run.counts["checkpoint"] | {"saved": 2, "failed": 1} == run.counts["checkpoint"]
    assert newest(url) == (f"{url}/step-00000003", [])


def test_a_url_that_nothing_opens_is_said():
    with pytest.raises(UsageError, match="no-fsspec"):
        read("nosuch://there/is")


# -- before the first step, ranks try whether they can save in one folder ----------------------------------------------


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
        ("another host", "rank 1 cannot save in {}/checkpoints: it cannot see the file of rank 0"),
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
        assert any("rank 1 did not finish in 2 s; the run continues without this checkpoint" in note for note in notes)


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


# -- a read that does not go on, on one rank: all ranks say on which, and of which file --------------------------------


LIMIT_S = 6.0
TIMED = changed(
    small_plan(batch__micro_size=4),
    parallel={"dp": 2},
    gradient_handlers=[{"use": "core.each"}],
    limits__collective_timeout_s=LIMIT_S,
)


def loaded_with_a_stall(folder: Path, path: Path, name: str, at: int) -> tuple[str, float, bool]:
    """Loads; on rank 1 the `at`-th read of the file `name` stalls. Returns the error, after how long, and whether the run has
    changed.
    """
    plain, seen, gate = LocalFolder.read_into, [], threading.Event()

    def stalls(self: LocalFolder, file: str, first: int, memory: memoryview) -> int:
        seen.append(file)
        if os.environ["RANK"] == "1" and file == name and seen.count(name) == at:
            gate.wait(30)
        return plain(self, file, first, memory)

    with World.join("cpu") as world, assemble(plan_from_dict(TIMED, folder), world) as run:
        LocalFolder.read_into = stalls
        before = [param.parameter.detach().clone() for param in run.registry]
        began = time.monotonic()
        with pytest.raises(RunError) as raised:
            run.load_checkpoint(path)
        lasted_s = time.monotonic() - began
        same = all(one.equal(param.parameter) for one, param in zip(before, run.registry, strict=True))
        gate.set()
        return str(raised.value), lasted_s, same


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "at"), [("rank-00001.safetensors", 1), ("rank-00000.safetensors", 2), ("checkpoint.json", 1)])
def test_the_rank_and_the_file_are_named_by_all_ranks(texts: Path, tmp_path: Path, ranks: Any, name: str, at: int) -> None:
    """As it looks for damages, and as it takes what it needs."""
    ranks(2)(stretch, TIMED, 1, folder=texts, save=tmp_path / "saved")
    found = ranks(2)(loaded_with_a_stall, texts, tmp_path / "saved", name, at)
    for told, lasted_s, is_same in found:
        assert "rank 1 could not load the checkpoint" in told
        assert f"reading {tmp_path / 'saved' / name} made no progress for 3 s" in told
        assert lasted_s < LIMIT_S + 10
        assert is_same or name == "rank-00000.safetensors"


def test_what_a_stalled_read_was_to_fill_is_still_its_own(tmp_path: Path) -> None:
    """It may come to its end when nobody waits for it any more."""
    (tmp_path / "file").write_bytes(bytes(range(64)))
    gate, done = threading.Event(), threading.Event()

    class Slow(LocalFolder):
        def read_into(self, name: str, first: int, memory: memoryview) -> int:
            gate.wait(30)
            got = super().read_into(name, first, memory)
            seen.append(bytes(memory))
            done.set()
            return got

    seen: list[bytes] = []
    with TimedReads(0.1) as reads:
        folder = TimedFolder(Slow(tmp_path), reads)
        target = torch.zeros(64, dtype=torch.uint8)
        memory = bytes_of(target)
        assert memory.obj.tensor is target
        with pytest.raises(StalledError, match="made no progress"):
            folder.read_into("file", 0, memory)
        del target, memory
        with pytest.raises(StalledError, match="made no progress"):
            folder.names()
        gate.set()
        assert done.wait(10)
    assert seen == [bytes(range(64))]
