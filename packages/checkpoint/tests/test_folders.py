"""Folders of checkpoints: at a URL, and probed before the first step."""

from errno import ENOSPC
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sley_checkpoint import checkpoints, folders
from sley_checkpoint.folders import RemoteFolder, open_folder
from sley_checkpoint.reader import INDEX_NAME, newest, read, verify
from sley_checkpoint.saving import HostCopies
from sley_core.comm.world import World
from sley_core.errors import RunError, UsageError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_trainer.assemble import assemble
from sley_trainer.run_state import RunState

fsspec = pytest.importorskip("fsspec")


def test_a_run_saves_to_a_url_and_resumes_from_it(texts, tmp_path):
    url = f"memory://{tmp_path}/saved"
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
    half.delete_file(INDEX_NAME)
    assert newest(url) == (f"{url}/step-00000004", []), "without its index it was never one"
    whole = folder.child("step-00000004")
    data = whole.read("rank-00000.safetensors")
    whole.write("rank-00000.safetensors", [data[:-1]])
    (damage,) = verify(whole.uri)
    assert f"has {len(data) - 1} of {len(data)} bytes" in damage.description
    with assemble(plan, World.alone("cpu")) as run:
        run.step()
        run.save_checkpoint()
        assert folder.names() == ["step-00000001-1", "step-00000004", "step-00000006"], "another attempt may be writing"
        folder.child("step-00000001-1").delete_file(INDEX_NAME)
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
        assert any(note.endswith("No space left on device; training is not affected") for note in run.notes)
        run.step()
        assert run.counts["checkpoint"] | {"saved": 2, "failed": 1} == run.counts["checkpoint"]
    assert newest(url) == (f"{url}/step-00000003", [])


def test_a_url_that_nothing_opens_is_said():
    with pytest.raises(UsageError, match="no-fsspec"):
        read("nosuch://there/is")


# -- before the first step, ranks try whether they can save in one folder ----------------------------------------------


DP = {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}], "limits": {"collective_timeout_s": 4}}


class HostFolder(folders.LocalFolder):
    """The folder that the host in the folder `host` has at `path`."""

    def __init__(self, path: str | Path, host: str) -> None:
        super().__init__(Path(host, *Path(path).parts[1:]))
        self.path_on_host = str(path)

    @property
    def uri(self) -> str:
        return self.path_on_host


def refusing(*_: Any) -> Any:
    raise PermissionError(13, "Permission denied", "there")


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("write", lambda digest: digest._replace(crc=1), "the checksum of rank-00000.safetensors must be 1, but is"),
        ("write", lambda digest: digest._replace(num_bytes=1), "the size of rank-00000.safetensors must be 1 bytes, but is"),
        ("names", refusing, "cannot be read: Permission denied (there)"),
    ],
)
def test_a_save_that_fails_is_a_note_and_the_run_goes_on(texts, tmp_path, method, change, message):
    plain = getattr(folders.LocalFolder, method)
    plan = plan_from_dict(small_plan(checkpoint={"every_steps": 1, "mode": "sync"}), texts)
    with assemble(plan, World.alone("cpu"), folder=tmp_path) as run:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folders.LocalFolder, method, lambda *args: change(plain(*args)))
            run.step()
        run.step()
    assert (run.counts["checkpoint"]["saved"], run.counts["checkpoint"]["failed"]) == (1, 1)
    assert message in run.notes[0]
    assert newest(tmp_path / "checkpoints") == (f"{tmp_path}/checkpoints/step-00000002", [])


def train(tables: dict[str, Any], texts: Path, folder: Path, fault: str) -> str:
    """Returns the error of a run on this rank. fault: what rank 1 does not have."""
    with World.join("cpu") as world, pytest.MonkeyPatch.context() as patch:
        if world.rank == 1 and fault == "another host":
            patch.setattr(checkpoints, "open_folder", partial(HostFolder, host=str(folder / "host-1")))
        if world.rank == 1 and fault == "no right to write":
            patch.setattr(folders.LocalFolder, "write", refusing)
        with assemble(plan_from_dict(tables, texts), world, folder=folder) as run:
            try:
                run.train()
            except RunError as error:
                return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("another host", "rank 1 cannot save in {}/checkpoints: it cannot see the file of rank 0"),
        ("no right to write", "rank 1 cannot save in {}/checkpoints: Permission denied (there)"),
    ],
)
def test_a_folder_that_is_not_one_for_all_ranks_is_refused_first(texts, tmp_path, ranks, fault, message):
    tables = changed(small_plan(run__steps=2, checkpoint={"every_steps": 1}), **DP)
    errors = ranks(2, 60, init=False)(train, tables, texts, tmp_path, fault)
    assert all(message.format(tmp_path) in error for error in errors)
    assert not (tmp_path / "metrics.jsonl").stat().st_size, "before the first step"
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").iterdir())


def test_a_rank_that_leaves_its_part_of_a_save_out_ends_no_run(texts, tmp_path, ranks):
    """Rank 0 stops waiting before the other ranks stop waiting for it."""
    tables = changed(small_plan(run__steps=1, checkpoint={"every_steps": 1, "mode": "sync"}), **DP)
    for notes in ranks(2, 60, init=False)(train_without_part, tables, texts, tmp_path):
        assert any("rank 1 did not finish in 2 s; training is not affected" in note for note in notes)


def test_a_save_that_one_rank_cannot_begin_is_a_note_on_all_ranks(texts, tmp_path, ranks):
    tables = changed(small_plan(run__steps=6, checkpoint={"every_steps": 1}), **DP)
    for notes, counts in ranks(2, 60, init=False)(train_with_faults, tables, texts, tmp_path):
        assert all("Permission denied" in note and note.endswith("training is not affected") for note in notes), notes
        assert (counts["saved"], counts["failed"]) == (1, 4)


def train_with_faults(tables: dict[str, Any], texts: Path, folder: Path) -> tuple[list[str], Any]:
    """Returns the notes and counts of a run in which each save but the last fails on rank 1, in another method."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, texts), world, folder=folder) as run:
        for owner, method in ((RunState, "rank_values"), (RunState, "pieces"), (RunState, "describe"), (HostCopies, "start")):
            with pytest.MonkeyPatch.context() as patch:
                if world.rank == 1:
                    patch.setattr(owner, method, refusing)
                run.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run._checkpointer, "folder", f"{folder}/{world.rank}")
            with pytest.raises(RunError, match=r"ranks-differ.*: their folder differs"):
                run.step()
        run.train()
        return list(run.notes), run.counts["checkpoint"]


def train_without_part(tables: dict[str, Any], texts: Path, folder: Path) -> list[str]:
    """Returns the notes of a run whose rank 1 writes checkpoints elsewhere once the run is under way."""
    with (
        World.join("cpu") as world,
        pytest.MonkeyPatch.context() as patch,
        assemble(plan_from_dict(tables, texts), world, folder=folder) as run,
    ):
        if world.rank == 1:
            staging = folders.LocalFolder.staging_folder
            run.readers.append(
                lambda _: patch.setattr(
                    folders.LocalFolder,
                    "staging_folder",
                    lambda own, token: HostFolder(staging(own, token).path, str(folder / "host")),
                )
            )
        run.train()
        return list(run.notes)
