"""When a run saves itself, beside training or not, and what it keeps."""

import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_checkpoint.folders import LocalFolder
from sley_checkpoint.reader import read, verify
from sley_checkpoint.saving import BackgroundWriter
from sley_core.comm.world import World
from sley_core.errors import RunError, UsageError
from sley_core.plan.load import plan_from_dict
from sley_core.weight_files.read import open_weights
from sley_testing.plans import changed, small_plan
from sley_testing.runs import record, save_at, weights
from sley_trainer.assemble import assemble
from sley_trainer.run import Run


def plan(**changes: Any) -> dict[str, Any]:
    return changed(small_plan(run__steps=6, batch__micro_size=8, model__num_layers=1), **changes)


def train(tables: dict[str, Any], texts: Path, folder: Path, prepare: Any = None) -> Run:
    folder.mkdir(exist_ok=True)
    with assemble(plan_from_dict(tables, texts), World.alone("cpu"), folder=folder) as run:
        if prepare is not None:
            prepare(run)
        run.train()
    return run


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def wait_for_save():
    """Waits for the save in progress."""
    for thread in threading.enumerate():
        if thread.name == "sley-checkpoint":
            thread.join(30)


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["core.adamw", "core.sgd"])
def test_an_asynchronous_save_has_the_state_of_its_step(texts, tmp_path, monkeypatch, precision, optimizer):
    """Writing takes longer than the next step, which changes every tensor that is not yet written."""
    options = {"use": optimizer, "lr": 0.01} | ({"momentum": 0.9} if optimizer == "core.sgd" else {})
    tables = plan(precision__compute=precision, optimizer=options)
    record(tables, 4, folder=texts, prepare=partial(save_at, 2, tmp_path / "still-2"), save=tmp_path / "still-4")
    write = LocalFolder.write
    stepped = threading.Event()

    def write_slowly(self: Any, name: str, chunks: Any) -> Any:
        def yield_slowly() -> Any:
            for number, chunk in enumerate(chunks):
                if number == 3:
                    assert stepped.wait(30), "the next step waits for the disk"
                yield chunk

        return write(self, name, yield_slowly() if name.endswith("safetensors") else chunks)

    monkeypatch.setattr(LocalFolder, "write", write_slowly)
    tables = changed(tables, checkpoint={"every_steps": 2})
    with assemble(plan_from_dict(tables, texts), World.alone("cpu"), folder=tmp_path) as run:
        for step in range(1, 6):
            run.step()
            if step in (3, 5):
                stepped.set()
                wait_for_save()
                stepped.clear()
    for step in (2, 4):
        expected, actual = read(tmp_path / f"still-{step}"), read(tmp_path / "checkpoints" / f"step-{step:08}")
        assert set(actual) == set(expected)
        for name in expected:
            assert actual[name].equal(expected[name]), (step, name)


@pytest.mark.parametrize("saves", [True, False])
def test_a_copy_elsewhere_is_not_the_runs_own_checkpoint(texts, tmp_path, saves):
    """The program saves step 2, and keeps a copy of each other step. The run still saves step 4, and when it is stopped."""

    def keep_copies(run: Run) -> None:
        run.listeners.append(lambda row: run.save_checkpoint(None if row["step"] == 2 else tmp_path / f"copy-{row['step']}"))
        run.listeners.append(lambda row: run.stop() if row["step"] == 4 else None)

    train(plan(checkpoint={"every_steps": 2, "on_interrupt": saves}), texts, tmp_path, keep_copies)
    assert checkpoint_names(tmp_path) == [f"step-0000000{step}" for step in ((4, 5) if saves else (2, 4))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_finished_run_can_be_continued_from_its_last_step(texts, tmp_path, mode):
    """The last step is no multiple of `every_steps`."""
    tables = plan(checkpoint={"every_steps": 4, "mode": mode})
    run = train(tables, texts, tmp_path)
    assert checkpoint_names(tmp_path) == ["step-00000004", "step-00000006"]
    assert all(verify(tmp_path / "checkpoints" / name) == [] for name in checkpoint_names(tmp_path))
    assert (run.counts["checkpoint"]["saved"], run.counts["checkpoint"]["failed"]) == (2, 0)
    (tmp_path / "plan.toml").write_text(run.resolved_plan.to_toml(), "utf-8")
    saved, trained = open_weights(tmp_path / "checkpoints" / "step-00000006"), weights(run)
    assert all(saved.tensor(name).equal(trained[name]) for name in [*saved.names, "embed.tokens.weight"])
    longer = train(changed(tables, run__steps=8), texts, tmp_path, lambda run: run.load_checkpoint("auto"))
    assert checkpoint_names(tmp_path) == ["step-00000006", "step-00000008"], "`keep` is 2"
    assert longer.counts["checkpoint"]["saved"] == 1, "step 8 is a multiple, and is saved once"
    if mode == "async":
        uninterrupted = train(plan(run__steps=8), texts, tmp_path / "uninterrupted")
        assert all(weights(longer)[name].equal(weight) for name, weight in weights(uninterrupted).items())


def test_a_run_that_fails_has_no_checkpoint_of_the_step_in_which_it_did(texts, tmp_path):
    def fail(run: Run) -> None:
        run.listeners.append(lambda row: 1 / 0 if row["step"] == 5 else None)

    with pytest.raises(ZeroDivisionError):
        train(plan(checkpoint={"every_steps": 4}), texts, tmp_path, fail)
    assert checkpoint_names(tmp_path) == ["step-00000004"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_last_save_that_failed_is_tried_once_more(texts, tmp_path, monkeypatch, mode):
    """A disk may have been full for a moment."""
    write = LocalFolder.write
    attempts = []

    def fail_once(self: Any, name: str, chunks: Any) -> Any:
        if "step-00000006" in self.uri and name.endswith("safetensors"):
            attempts.append(name)
            if len(attempts) == 1:
                raise OSError(28, "No space left on device")
        return write(self, name, chunks)

    monkeypatch.setattr(LocalFolder, "write", fail_once)
    run = train(plan(checkpoint={"every_steps": 3, "mode": mode}), texts, tmp_path)
    assert len(run.notes) == run.counts["checkpoint"]["failed"] == 1
    assert checkpoint_names(tmp_path)[-1] == "step-00000006"


def test_a_save_does_not_read_the_base_model_again(texts, tmp_path):
    base = tmp_path / "base"
    with assemble(plan_from_dict(plan(run__steps=1, checkpoint={}), texts), World.alone("cpu")) as run:
        with pytest.raises(UsageError, match="no-folder"):
            run.save_checkpoint()
        run.train()
        assert "the run has no folder, so no checkpoint of its last step is saved" in run.notes
        run.save_weights(base / "weights")
        (base / "plan.toml").write_text(run.resolved_plan.to_toml(), "utf-8")
    tables = plan(model={"use": "models.llama", "weights": str(base)}, checkpoint={"every_steps": 2})
    run = train(tables, texts, tmp_path, lambda run: run.listeners.append(lambda _: shutil.rmtree(base, True)))
    assert (run.counts["checkpoint"]["saved"], run.notes) == (3, [])


def test_the_folder_of_another_run_is_refused(texts, tmp_path):
    shared = {"folder": str(tmp_path / "shared"), "every_steps": 3}
    train(plan(checkpoint=shared), texts, tmp_path)
    with pytest.raises(RunError, match=r"checkpoint-folder.*has checkpoints of the run 'small'"):
        train(plan(checkpoint=shared, run__name="other"), texts, tmp_path / "other")
    assert not (tmp_path / "other" / "metrics.jsonl").read_text("utf-8"), "before the first step"


def test_a_program_that_writes_to_a_weight_while_it_is_copied_is_told(texts, tmp_path, monkeypatch):
    """On an asynchronous device copies go on beside the program; the checkpoint would have half of what it wrote."""
    monkeypatch.setattr(BackgroundWriter, "_run", lambda background: None)
    with assemble(plan_from_dict(plan(checkpoint={"every_steps": 1}), texts), World.alone("cpu"), folder=tmp_path) as run:
        run.step()
        background = run._checkpointer._background_writer
        background._changed_name = None  # as long as copies are under way
        (piece, *_), *_ = background.writer.files
        with torch.no_grad():
            run.registry.params[0].parameter.add_(1)
        background.copy_unwritten_state()
        with pytest.raises(RunError, match="the program wrote to"):
            next(background._read_chunks(piece))
        background.failure = "as asked"


def test_weights_that_a_program_writes_in_the_middle_of_a_save_are_not_in_it(texts, tmp_path, monkeypatch):
    gate = threading.Event()
    write = LocalFolder.write

    def write_late(self: Any, name: str, chunks: Any) -> Any:
        assert gate.wait(30)
        return write(self, name, chunks)

    monkeypatch.setattr(LocalFolder, "write", write_late)
    with assemble(plan_from_dict(plan(checkpoint={"every_steps": 1}), texts), World.alone("cpu"), folder=tmp_path) as run:
        run.step()
        for param in run.registry:
            param.parameter.detach().fill_(0.5)
        threading.Timer(0.5, gate.set).start()
        run.step()
    saved = read(tmp_path / "checkpoints" / "step-00000001")
    assert not any(saved[name].eq(0.5).any() for name in saved if name.startswith("weights/") and "norm" not in name)
