"""A damaged checkpoint is named with its damage, and the one before it is loaded."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from sley_checkpoint.folders import LocalFolder, open_folder
from sley_checkpoint.reader import INDEX_NAME, CheckpointFileReader, newest, read, try_read_index, verify
from sley_core.comm.world import World
from sley_core.errors import RunError, SleyError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.processes import ForkedProgram
from sley_testing.runs import assert_same_run, record
from sley_trainer.assemble import assemble

PLAN = small_plan(run__steps=6, batch__micro_size=4)


def flip_bit(file: Path, _other: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    file.write_bytes(data)


def flip_bit_in_header(file: Path, _other: Path) -> None:
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)


def truncate(file: Path, _other: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def delete(file: Path, _other: Path) -> None:
    file.unlink()


def copy_other(file: Path, other: Path) -> None:
    shutil.copy(other / file.name, file)


DAMAGES: dict[tuple[str, Callable[[Path, Path], None]], str] = {
    ("rank-00000.safetensors", flip_bit): "does not match its checksum",
    ("rank-00000.safetensors", flip_bit_in_header): "does not match its checksum",
    ("rank-00000.safetensors", truncate): "has ",
    ("rank-00000.safetensors", delete): "is missing",
    ("rank-00000.safetensors", copy_other): "does not match its checksum",
    (INDEX_NAME, flip_bit): "is damaged",
    (INDEX_NAME, truncate): "is damaged",
    (INDEX_NAME, delete): "is missing",
    (INDEX_NAME, copy_other): "is of",
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints of a run, after steps 2 and 4."""
    from sley_testing.plans import write_texts

    folder = tmp_path_factory.mktemp("two_checkpoints")
    write_texts(folder)
    tables = changed(PLAN, checkpoint={"every_steps": 2, "mode": "sync"}, run__steps=4)
    with assemble(plan_from_dict(tables, folder), World.alone("cpu"), folder=folder) as run:
        run.train()
    return folder


@pytest.mark.parametrize(("file", "how"), DAMAGES, ids=lambda one: getattr(one, "__name__", one))
def test_each_damage_is_named_and_the_checkpoint_before_is_the_newest(two_checkpoints, tmp_path, file, how):
    shutil.copytree(two_checkpoints / "checkpoints", tmp_path / "all")
    old, new = (tmp_path / "all" / f"step-0000000{step}" for step in (2, 4))
    how(new / file, old)
    (damage,) = verify(new)
    assert damage.file in (file, "rank-00000.safetensors")
    if how is not copy_other or file != INDEX_NAME:
        assert damage.file == file
        assert DAMAGES[file, how] in damage.description
    if how in (flip_bit_in_header, truncate):
        with pytest.raises(RunError, match="checkpoint-damaged"):
            dict(read(new))
    assert (try_read_index(open_folder(new)) is None) == (file == INDEX_NAME and how is not copy_other)
    assert newest(tmp_path / "all").path == str(old)
    assert [path for path, _ in newest(tmp_path / "all").damaged_checkpoints] == [str(new)]


def test_a_folder_without_a_whole_one_is_an_error_and_one_without_any_is_none(two_checkpoints, tmp_path):
    folder = tmp_path / "all"
    tables = changed(PLAN, run__name="other", checkpoint={"folder": str(folder)})
    with assemble(plan_from_dict(tables, two_checkpoints), World.alone("cpu")) as run:
        assert run.load_checkpoint("auto") is None
        shutil.copytree(two_checkpoints / "checkpoints", folder)
        with pytest.raises(RunError, match=r"checkpoint-mismatch.*must be 'other', but is 'small'"):
            run.load_checkpoint("auto")
        for path in folder.glob("*/rank*"):
            delete(path, path)
        with pytest.raises(RunError, match="checkpoint-damaged"):
            run.load_checkpoint("auto")
    for path in (folder, folder / "step-00000002"):
        with pytest.raises(RunError, match=r"checkpoint-damaged.*rank-00000.safetensors is missing"):
            CheckpointFileReader().open(str(path))
    with pytest.raises(RunError, match="no-checkpoint"):
        verify(tmp_path / "none")


@pytest.mark.parametrize(
    ("sizes", "changes", "words"),
    [
        ((16,), {"run__seed": 9}, "resume-differs.*`run.seed = 7`, but the plan has 9"),
        ((32,), {}, r"checkpoint-mismatch.*has the shape \[\d+, 16\] in the checkpoint and \[\d+, 32\] here"),
        ((16, 16), {}, "checkpoint-mismatch.*'weights/.*' is not in the checkpoint"),
        ((), {}, "checkpoint-mismatch.*'weights/.*' is not in the model"),
    ],
)
def test_another_plan_or_a_factory_that_makes_another_model_is_refused(texts, tmp_path, monkeypatch, sizes, changes, words):
    """The weights do not change. The plan names the same factory."""
    made = ModuleType("resized")
    monkeypatch.setitem(sys.modules, "resized", made)
    plan = changed(PLAN, model={"factory": "resized:layers"})
    made.layers = lambda: build_layers(16)
    record(plan, 1, folder=texts, save=tmp_path / "saved")
    made.layers = lambda: build_layers(*sizes)
    with assemble(plan_from_dict(changed(plan, **changes), texts), World.alone("cpu")) as run:
        before = [param.parameter.detach().clone() for param in run.registry]
        with pytest.raises(SleyError, match=words):
            run.load_checkpoint(tmp_path / "saved")
        assert all(one.equal(param.parameter) for one, param in zip(before, run.registry, strict=True))


class Embed(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens)


def build_layers(*sizes):
    """An embedding of 16 and a head, with a layer of each of these widths between them."""
    inner = [nn.Sequential(nn.Linear(16, size), nn.Linear(size, 16)) for size in sizes]
    return [Embed(256, 16), *inner, nn.Linear(16, 256)]


KILLED = """
import os, signal, sys
from pathlib import Path
from sley_trainer.assemble import assemble
from sley_checkpoint.folders import LocalFolder
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.processes import ForkedProgram

tables, folder, at = eval(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
count = 0

def kill_at_call(method):
    def call(self, *args, **options):
        global count
        count += 1
        if count == int(at):
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args, **options)
    return call

with assemble(plan_from_dict(tables, folder), World.alone("cpu"), folder=folder) as run:
    run.step()
    run.save_checkpoint()
    run.step()
    for name in ("write", "drop_cached_pages", "delete_file", "publish", "read_into"):
        setattr(LocalFolder, name, kill_at_call(getattr(LocalFolder, name)))
    run.save_checkpoint()
    run.step()
    print("whole", count)
"""


def run_until_kill(folder: Path, at: int) -> tuple[int, str]:
    """The exit code and the output of a process of its own."""
    (folder / "killed_in_a_save.py").write_text(KILLED, "utf-8")
    arguments = [repr(PLAN), str(folder), str(at)]
    program = ForkedProgram("killed_in_a_save", arguments, cwd=folder, env=dict(os.environ))
    with program.stdout as out, program.stderr as err:
        return program.wait(120), out.read() + err.read()


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [5, 1, 2, 7])
def test_a_process_killed_within_a_save_leaves_the_one_before(texts, tmp_path, at):
    """Before the first file is written, before a note is, before the index is, and before the folder gets its name."""
    shutil.copytree(texts / "text", tmp_path / "text")
    code, message = run_until_kill(tmp_path, at)
    assert code == -signal.SIGKILL, message
    found = newest(tmp_path / "checkpoints")
    assert found.path is not None
    assert (read(found.path).step, found.damaged_checkpoints) == (1, [])
    whole = record(PLAN, 3, folder=tmp_path)
    with assemble(plan_from_dict(PLAN, tmp_path), World.alone("cpu"), folder=tmp_path) as run:
        run.load_checkpoint("auto")
        run.step()
        run.save_checkpoint()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
    resumed = record(PLAN, 1, folder=tmp_path, load=tmp_path / "checkpoints" / "step-00000002")
    assert_same_run(whole, resumed)


def load_damaged(tables: dict[str, Any], folder: Path, path: Path) -> tuple[str, int, list[str]]:
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        restored = run.load_checkpoint(path)
        assert restored is not None
        damaged = [damaged_path for damaged_path, _ in restored.damaged_checkpoints]
        with pytest.raises(RunError, match="checkpoint-damaged"):
            run.load_checkpoint(damaged[0])
        return restored.path, run.num_steps_done, damaged


def test_ranks_share_the_verification_and_load_the_same_checkpoint(two_checkpoints, tmp_path, ranks):
    shutil.copytree(two_checkpoints / "checkpoints", tmp_path / "all")
    old, new = (tmp_path / "all" / f"step-0000000{step}" for step in (2, 4))
    flip_bit(new / "rank-00000.safetensors", tmp_path)
    tables = changed(PLAN, parallel={"dp": 2}, gradient_handlers=[{"use": "core.each"}])
    assert ranks(2)(load_damaged, tables, two_checkpoints, tmp_path / "all") == [(str(old), 2, [str(new)])] * 2


def load_without_index(tables: dict[str, Any], folder: Path, path: Path, at: int) -> str:
    """Loads, while the index is gone for rank 1 when that reads it the `at`-th time; returns what came of it."""
    plain, seen = LocalFolder.read, []

    def gone(self: LocalFolder, name: str, *at_bytes: Any) -> bytearray:
        seen.append(name)
        if int(os.environ["RANK"]) == 1 and name == INDEX_NAME and seen.count(INDEX_NAME) >= at:
            raise FileNotFoundError(name)
        return plain(self, name, *at_bytes)

    LocalFolder.read = gone
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        try:
            run.load_checkpoint(path)
        except RunError as error:
            return error.diagnostics[0].message
        return f"after step {run.num_steps_done}"


@pytest.mark.parametrize(("at", "message"), [(1, "it has no checkpoint.json"), (2, "after step 4")])
def test_an_index_that_vanishes_for_one_rank_keeps_no_other_waiting(two_checkpoints, ranks, at, message):
    """All say the same: that it is gone, or, where all have read it, what they have loaded."""
    tables = changed(PLAN, parallel={"dp": 2}, gradient_handlers=[{"use": "core.each"}], limits__collective_timeout_s=5.0)
    one, other = ranks(2)(load_without_index, tables, two_checkpoints, two_checkpoints / "checkpoints" / "step-00000004", at)
    assert message in one
    assert one == other
