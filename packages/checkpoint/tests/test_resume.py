"""A resumed run equals a run that was not interrupted."""

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any, ClassVar

import pytest
import torch

from sley_core.comm.world import World
from sley_core.errors import SleyError
from sley_core.plan.load import plan_from_dict
from sley_testing.attention_contract import sequence_plan
from sley_testing.plans import changed, small_plan, write_texts
from sley_testing.runs import assert_same_run, record, save_at
from sley_testing.state_contract import CheckpointerContract
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

DP = {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]}


def plan(**changes: Any) -> dict[str, Any]:
    return changed(small_plan(run__steps=6, batch__micro_size=4, learning_rate={"use": "core.cosine"}), **changes)


KINDS = {
    "bf16, with masters": {"precision__compute": "bf16"},
    "fp32": {"precision__compute": "fp32"},
    "a factory's optimizer": {"optimizer": {"factory": "torch.optim:NAdam", "lr": 1e-3}},
    "fp16, with a scale that moves": {
        "precision": {"compute": "fp16", "loss_scale": {"init_scale": 2.0**18, "growth_interval": 2}}
    },
    "momentum": {"optimizer": {"use": "core.sgd", "lr": 0.1, "momentum": 0.9}},
    "values in states": {"optimizer": {"factory": "torch.optim:Rprop", "lr": 1e-3}},
    "per matrix": {"optimizer": {"factory": "torch.optim:Adafactor", "lr": 1e-2}},
    "frozen": {"optimizer__groups": [{"match": "blocks.0.*", "freeze": True}]},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_bits(texts, tmp_path, kind):
    tables = plan(**KINDS[kind])
    uninterrupted = record(tables, 5, folder=texts, prepare=partial(save_at, 3, tmp_path / "saved"))
    assert_same_run(uninterrupted, record(tables, 2, folder=texts, load=tmp_path / "saved"))


def unfreeze(run: Run) -> None:
    for param in run.registry:
        param.parameter.requires_grad_(True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_bits_if_a_program_has_unfrozen_weights(texts, tmp_path, kind):
    tables, path = changed(plan(**KINDS[kind]), optimizer__groups=[{"match": "blocks.*", "freeze": True}]), tmp_path / "saved"

    def prepare(run: Run) -> None:
        unfreeze(run)
        save_at(2, path, run)

    uninterrupted = record(tables, 3, folder=texts, prepare=prepare)
    resumed = record(tables, 1, folder=texts, load=path, prepare=unfreeze)
    assert resumed.notes == []
    assert_same_run(uninterrupted, resumed)
    assert any("to keep them, unfreeze" in note for note in record(tables, 0, folder=texts, load=path).notes)


def test_nan_among_the_optimizers_values_is_saved_and_restored(texts, tmp_path):
    def prepare(run: Run) -> None:
        for group in run.stepper.update.optimizer.param_groups:
            group["best"] = [float("nan")]
            for parameter in group["params"]:
                run.stepper.update.optimizer.state[parameter]["best"] = {"loss": float("nan")}
        save_at(1, tmp_path / "saved", run)

    tables = plan(optimizer={"use": "core.sgd", "lr": 0.1, "momentum": 0.9})
    uninterrupted = record(tables, 2, folder=texts, prepare=prepare)
    assert_same_run(uninterrupted, record(tables, 1, folder=texts, load=tmp_path / "saved"))


def put(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def swap_names(folder: Path) -> None:
    one, other = (folder / "text" / name for name in ("a.txt", "b.txt"))
    put(one, lambda text: text + other.read_bytes())
    put(other, lambda text: one.read_bytes()[: -len(text)])
    put(one, lambda text: text[-len(other.read_bytes()) :])


CHANGES: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "one letter": (lambda to: put(to / "text/a.txt", lambda text: text[:-1] + b"!"), True),
    "names": (swap_names, True),
    "the order of documents": (lambda to: put(to / "text/a.txt", lambda text: b"\n\n".join(text.split(b"\n\n")[::-1])), True),
    "a boundary": (lambda to: put(to / "text/a.txt", lambda text: text.replace(b"\n\n", b"\n ", 1)), True),
    "the clock": (lambda to: os.utime(to / "text/a.txt", (1, 1)), False),
    "a name, in the same order": (lambda to: (to / "text/b.txt").rename(to / "text/c.txt"), False),
    "another document": (lambda to: (to / "text/c.txt").write_text("another " * 9), True),
    "a token": (lambda to: put(to / "ids.bin", lambda ids: ids[:4000] + b"\1" + ids[4001:]), True),
    "tokens at the end": (lambda to: put(to / "ids.bin", lambda ids: ids[:-2] + b"\1\0"), True),
}


def loaded(tables: dict[str, Any], folders: list[Path], path: Path) -> str:
    """Returns why this rank refuses the checkpoint, with its data in the folder of its number; "" if it does not."""
    try:
        record(tables, 1, folder=folders[int(os.environ.get("RANK", "0"))], load=path)
    except SleyError as error:
        return error.diagnostics[0].code
    return ""


TOKENS = {"use": "data.tokens", "files": ["ids.bin"], "vocab_size": 256, "sequence": 24}


@pytest.fixture(scope="module")
def saved_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with data, and with a checkpoint of a run on the texts and of one on the tokens."""
    folder = tmp_path_factory.mktemp("data")
    write_texts(folder)
    random = Random(0)
    (folder / "ids.bin").write_bytes(array("H", [random.randrange(200) for _ in range(4000)]).tobytes())
    record(plan(), 1, folder=folder, save=folder / "saved-text")
    record(plan(data=TOKENS), 1, folder=folder, save=folder / "saved-tokens")
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_than_those_of_the_checkpoint_are_refused(saved_data, tmp_path, change):
    make_change, is_refused = CHANGES[change]
    copytree(saved_data, tmp_path / "changed")
    make_change(tmp_path / "changed")
    tables, saved = (plan(data=TOKENS), "saved-tokens") if "token" in change else (plan(), "saved-text")
    assert loaded(tables, [tmp_path / "changed"], saved_data / saved) == ("data-changed" if is_refused else "")


def test_all_ranks_refuse_data_that_have_changed_or_that_differ_between_them(saved_data, tmp_path, ranks):
    changed_data = tmp_path / "changed"
    copytree(saved_data, changed_data)
    put(changed_data / "text/a.txt", lambda text: text[:-1] + b"!")
    folders = [[changed_data, changed_data], [saved_data, changed_data]]
    codes = ranks(2, init=False)(load_each, plan(**DP), folders, saved_data / "saved-text")
    assert codes == [["data-changed", "ranks-disagree"]] * 2


def load_each(tables: dict[str, Any], folders: list[list[Path]], path: Path) -> list[str]:
    return [loaded(tables, rank_folders, path) for rank_folders in folders]


class Samples:
    """Samples of a program's own; another length and other samples by the environment."""

    def __init__(self) -> None:
        self.shift = int(os.environ.get("SHIFT", "0"))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (torch.arange(25) * (index + 3) + self.shift) % 256
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def test_other_samples_of_a_programs_own_are_said(tmp_path, monkeypatch):
    data = {"factory": f"{__name__}:Samples", "vocab_size": 256, "sequence": 24}
    tables = plan(data=data, checkpoint={"every_steps": 5})
    record(tables, 1, save=tmp_path / "saved")
    assert not record(tables, 1, load=tmp_path / "saved").notes
    monkeypatch.setenv("SHIFT", "1")
    (note,) = record(tables, 1, load=tmp_path / "saved").notes
    assert "the length of the dataset, or samples" in note


# -- mistakes that a loss does not show ------------------------------------------------------------------------------------


@dataclass
class Steps:
    """Holds the steps of one rank. masks: the numbers of values that the first dropout kept."""

    samples: list[tuple[int, ...]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)


def take_steps(
    tables: dict[str, Any], num_steps: int, folder: Path | None, load: Path | None = None, save: Path | None = None
) -> Steps:
    """Takes `num_steps` steps, from the checkpoint `load` and to the checkpoint `save`."""
    steps = Steps()
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        if load is not None:
            run.load_checkpoint(load)
        for layer in run.layers:
            for module in layer.module.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.register_forward_hook(lambda _, __, output: steps.masks.append(float((output != 0).sum())))
        for _ in range(num_steps):
            steps.losses.append(float(run.step()["loss"]))
            assert run.feed is not None
            steps.samples.append(run.feed.samples)
        if save is not None:
            run.save_checkpoint(save)
    return steps


def test_no_sample_is_skipped_or_repeated(texts, tmp_path):
    """Neither the batch that was read ahead when the run was saved, nor at the end of an epoch."""
    tables = small_plan(run__steps=7, batch={"global_size": 64, "micro_size": 64}, model__num_layers=1)
    uninterrupted = take_steps(tables, 7, texts)
    first = take_steps(tables, 3, texts, save=tmp_path / "saved")
    second = take_steps(tables, 4, texts, load=tmp_path / "saved")
    assert first.samples + second.samples == uninterrupted.samples
    samples = list(chain(*uninterrupted.samples))
    assert len(set(samples)) < len(samples), "an epoch has ended"


def resume_in_turn(tables: dict[str, Any], folder: Path, path: Path) -> list[Steps]:
    """Takes two steps and saves, then resumes the checkpoint of one process."""
    first = take_steps(tables, 2, folder, save=path / "two ranks")
    return [first, take_steps(tables, 2, folder, load=path / "one rank")]


def test_the_position_in_the_data_is_resumed_by_fewer_and_by_more_ranks(texts, tmp_path, ranks):
    tables = small_plan(run__steps=4, batch__micro_size=4)
    first = take_steps(tables, 2, texts, save=tmp_path / "one rank")
    two_ranks = ranks(2, init=False)(resume_in_turn, changed(tables, **DP), texts, tmp_path)
    second = take_steps(tables, 2, texts, load=tmp_path / "two ranks")
    for number, steps in enumerate((first, second)):
        assert [one + two for one, two in zip(*(rank[number].samples for rank in two_ranks), strict=True)] == steps.samples


def take_steps_with_a_resume(tables: dict[str, Any], path: Path) -> list[Steps]:
    uninterrupted = take_steps(tables, 4, None)
    take_steps(tables, 2, None, save=path)
    return [uninterrupted, take_steps(tables, 2, None, load=path)]


def test_random_numbers_continue_and_differ_between_ranks(tmp_path, ranks):
    tables = changed(sequence_plan(None, dropout=0.3), run__steps=4, **DP)
    results = ranks(2, init=False)(take_steps_with_a_resume, tables, tmp_path / "saved")
    for uninterrupted, resumed in results:
        assert resumed.losses == uninterrupted.losses[2:]
        assert resumed.masks == uninterrupted.masks[-len(resumed.masks) :]
    assert results[0][1].masks != results[1][1].masks


class TestAnyLayout(CheckpointerContract):
    checkpoint: ClassVar[dict[str, Any]] = {"use": "checkpoint.any_layout"}
