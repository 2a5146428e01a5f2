"""The best checkpoint is kept beside the newest ones, a run without improvement ends early, and both go on after a resume."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from sley_checkpoint.reader import read
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import Tables, changed, small_plan
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

LOSSES = (3.0, 2.0, 2.5, 1.5, 1.75, 1.5, 1.625, 1.0)
"""The losses of the evaluations after each step; they replace the model's."""


def plan(**changes: Any) -> Tables:
    evaluation = {"every": 1, "steps": 1, "keep_best": "held_out_loss", "patience": 3}
    tables = small_plan(run__steps=len(LOSSES), batch__micro_size=8, model__num_layers=1, evaluation=evaluation, checkpoint={})
    return changed(tables, **changes)


def replace_evaluations(run: Run) -> None:
    """Makes the evaluations of `run` give LOSSES, and accuracies that fall with them."""

    def evaluate() -> dict[str, float]:
        loss = LOSSES[(run.num_steps_done - 1) % len(LOSSES)]
        return {"held_out_loss": loss, "held_out/accuracy": 1 / loss, "held_out/perplexity": loss}

    run._evaluate_sets = evaluate  # type: ignore[method-assign]


def train(tables: Tables, texts: Path, folder: Path, *, resume: bool = False, stop_at: int = 0) -> tuple[Run, list[int]]:
    """Returns the run and the steps that this rank took. stop_at: the step at which it is killed, without a checkpoint."""
    folder.mkdir(exist_ok=True)
    steps: list[int] = []

    def record_step(row: Any) -> None:
        steps.append(int(row["step"]))
        if row["step"] == stop_at:
            raise KeyboardInterrupt

    with World.join("cpu") as world, assemble(plan_from_dict(tables, texts), world, folder=folder) as run:
        replace_evaluations(run)
        run.listeners.append(record_step)
        if resume:
            run.load_checkpoint("auto")
        try:
            assert run.train() == "finished"
        except KeyboardInterrupt:
            run._checkpointer.finish_save()  # type: ignore[attr-defined]  # its own process had time for it
    return run, steps


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir())


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_best_is_kept_and_the_run_ends_without_a_better_one(texts: Path, tmp_path: Path, mode: str) -> None:
    """A loss that is equal is not better: it ends three evaluations after step 4."""
    run, steps = train(plan(checkpoint={"every_steps": 1, "keep": 1, "mode": mode}), texts, tmp_path)
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert run.stopped_early == "held_out_loss has not improved in 3 evaluations; the best value, 1.5, was reached at step 4"
    assert saved_steps(tmp_path) == [4, 7]
    assert [read(tmp_path / f"checkpoints/step-0000000{step}").description.is_best for step in (4, 7)] == [True, False]
    run, steps = train(plan(), texts, tmp_path, resume=True)
    assert steps == [], "patience is at its end in the checkpoint too"


def test_an_improvement_is_saved_at_once_and_the_others_as_the_plan_says(texts: Path, tmp_path: Path) -> None:
    train(plan(checkpoint={"keep": 9}, evaluation__patience=None), texts, tmp_path)
    assert saved_steps(tmp_path) == [1, 2, 4, 8]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_goes_back_keeps_its_best_and_newest_checkpoints(texts: Path, tmp_path: Path, seed: int) -> None:
    """Against a list of the checkpoints that belong to the run's steps. Those of steps that the run has discarded do not count,
    and are deleted once the run has saved later steps.
    """
    drawn, losses, own = Random(seed), list[float](), list[tuple[int, str, bool]]()
    keep, folder = drawn.randint(1, 3), tmp_path / "checkpoints"
    tables = plan(checkpoint={"every_steps": 1, "keep": keep, "mode": "sync"}, evaluation__patience=None, run__steps=99)

    def list_names() -> set[str]:
        return {path.name for path in folder.glob("*")}

    with assemble(plan_from_dict(tables, texts), World.alone("cpu"), folder=tmp_path) as run:
        run._evaluate_sets = lambda: {"held_out_loss": losses[-1]}  # type: ignore[method-assign]
        for _ in range(12):
            names = list_names()
            losses.append(drawn.random())
            run.step()
            (name,) = list_names() - names
            own.append((len(losses), name, losses[-1] == min(losses)))
            best = [saved for saved in own if saved[2]][-1:]
            own = [saved for saved in own if saved in own[-keep:] + best]
            others = list_names() - {name for _, name, _ in own}
            assert len(list_names()) == len(others) + len(own)
            assert len(own) < keep or all(int(name[5:13]) >= own[-keep][0] for name in others)
            if drawn.random() < 0.5:
                step, name, _ = drawn.choice(own)
                run.load_checkpoint(folder / name)
                del losses[step:]
                own = [saved for saved in own if saved[0] <= step]


def test_an_accuracy_is_best_at_its_highest_and_a_mode_turns_it_round(texts: Path, tmp_path: Path) -> None:
    best = {"metric": "held_out_loss", "mode": "max"}
    for folder, keep_best, step in (("one", "held_out/accuracy", 8), ("other", best, 1)):
        tables = plan(evaluation__keep_best=keep_best, evaluation__patience=None, checkpoint={"keep": 1})
        run, _ = train(tables, texts, tmp_path / folder)
        assert run.best is not None
        assert run.best.step == step
        assert saved_steps(tmp_path / folder) == sorted({step, 8})


@pytest.mark.sample(1)
@pytest.mark.parametrize("stop_at", [3, 6])
def test_a_run_that_is_killed_between_evaluations_goes_on_counting(texts: Path, tmp_path: Path, stop_at: int) -> None:
    """Also from a checkpoint that is older than the evaluations since."""
    tables = plan(checkpoint={"every_steps": 2, "keep": 1})
    _, first = train(tables, texts, tmp_path, stop_at=stop_at)
    run, second = train(tables, texts, tmp_path, resume=True)
    assert (first[-1], second[-1]) == (stop_at, 7)
    assert second[0] <= stop_at + 1
    assert run.best is not None
    assert (run.best.step, run.best.num_since_best) == (4, 3)
    assert saved_steps(tmp_path) == [4, 7]


def test_it_goes_on_in_another_layout_with_another_batch(ranks: Any, texts: Path, tmp_path: Path) -> None:
    tables = plan(batch={"global_size": 8, "micro_size": 4}, checkpoint={"every_steps": 1, "keep": 1})
    train(tables, texts, tmp_path, stop_at=5)
    other_layout = changed(tables, batch={"global_size": 16, "micro_size": 4}, parallel={"dp": 2})
    for run in ranks(2, init=False)(resume_and_summarize, other_layout, texts, tmp_path):
        assert run == [4, 3, 7]
    assert saved_steps(tmp_path) == [4, 7]


def resume_and_summarize(tables: Tables, texts: Path, folder: Path) -> list[int]:
    run, _ = train(tables, texts, folder, resume=True)
    assert run.best is not None
    return [run.best.step, run.best.num_since_best, run.num_steps_done]


def test_another_number_begins_anew_and_says_so(texts: Path, tmp_path: Path) -> None:
    train(plan(checkpoint={"every_steps": 1}), texts, tmp_path, stop_at=6)
    tables = plan(evaluation__keep_best="held_out/accuracy", checkpoint={"every_steps": 1})
    with assemble(plan_from_dict(tables, texts), World.alone("cpu"), folder=tmp_path) as run:
        restored = run.load_checkpoint("auto")
        assert restored is not None
        assert any("`keep_best` was `held_out_loss` in the checkpoint" in note for note in restored.notes)
        assert run.best is not None
        assert run.best.value is None
