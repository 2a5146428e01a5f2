"""What a run tells others: notifications, listeners, rows, a profile; how it ends; and the example of a loop of one's own."""

import json
import math
import os
import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sley_core.actions.action import sequential_actions
from sley_core.comm.world import World
from sley_core.engine.parts import StepNumbers
from sley_core.errors import PluginError, RunError
from sley_core.hookspecs import hookimpl
from sley_core.plan.load import plan_from_dict
from sley_core.plugin import JsonlConfig
from sley_core.records import MetricsWriterRecord
from sley_testing.plans import loader_of, small_plan
from sley_testing.runs import running
from sley_trainer.assemble import assemble

ROW = ["step", "loss", "grad_norm", "lr", "tokens", "trained_tokens", "seconds", "tokens_per_s", "data_wait_s", "memory_mb"]
ROW += ["tflops"]


class Listener:
    """A plugin that writes down the three notifications; `fail_at` raises in that step's."""

    def __init__(self, fail_at=0):
        self.told = []
        self.fail_at = fail_at

    @hookimpl
    def sley_records(self):
        return [MetricsWriterRecord(name="writer", config=JsonlConfig, build="sley_core.run_folder:JsonlWriter")]

    @hookimpl
    def sley_run_started(self, run):
        self.told.append(("started", run.num_steps_done))

    @hookimpl
    def sley_step_finished(self, run, row):
        if row["step"] == self.fail_at:
            raise ValueError("as asked")
        self.told.append(("step", row["step"], run.num_steps_done))

    @hookimpl
    def sley_run_finished(self, run, outcome):
        self.told.append(("finished", outcome))


STEPS = [("step", 1, 1), ("step", 2, 2), ("step", 3, 3)]


@pytest.fixture
def heard(alone, small):
    """`with heard(listener, **changes) as run`: the plan names a plugin that listens, by its writer."""

    def heard(listener, **changes):
        return alone(small(metrics=[{"use": "ear.writer"}], **changes), loader=loader_of({"ear": listener}))

    return heard


@pytest.mark.parametrize("ends", ["with", "close", "twice"])
def test_a_loop_of_ones_own_tells_the_same(heard, ends):
    """It was told of no beginning and no end, and a run that trained twice of two."""
    listener = Listener()
    with heard(listener) as run:
        for _ in range(2 if ends == "twice" else 3):
            run.step()
        if ends == "twice":
            assert run.train() == run.train() == "finished"
        assert listener.told[0] == ("started", 0)
        assert listener.told[1:] == STEPS
        if ends == "close":
            run.close()
            assert listener.told[-1] == ("finished", "finished")
    assert listener.told == [("started", 0), *STEPS, ("finished", "finished")]


POISONED = {
    "model": {"factory": "own_models:poisoned", "options": {"token": 5}},
    "data__shuffle": False,
    "batch__global_size": 2,
}


@pytest.mark.parametrize(
    ("fail_at", "changes", "num_steps", "end", "error", "says"),
    [
        (0, {}, 2, "interrupted", None, ""),
        (0, POISONED, 2, "failed", RunError, r"not-finite.*step 3: loss nan"),
        (2, {}, 1, "failed", PluginError, r"`ear`.*`sley_step_finished`: ValueError: as asked"),
    ],
    ids=["interrupted", "failed", "listener"],
)
def test_how_a_run_ends_is_told(heard, fail_at, changes, num_steps, end, error, says):
    """Interrupted after the step in progress; failed by a sample that makes the loss NaN; or by what a plugin raises."""
    listener = Listener(fail_at)
    with heard(listener, **changes) as run, pytest.raises(error, match=says) if error else nullcontext():
        if error is None:
            run.listeners.append(lambda row: run.stop() if row["step"] == 1 else None)
        assert run.train() == "interrupted"
    assert listener.told == [("started", 0), *STEPS[:num_steps], ("finished", end)]


def test_a_row_has_what_it_promises(alone, small):
    rows = []
    with alone(small(learning_rate={"use": "core.linear", "warmup_steps": 2})) as run:
        run.listeners.append(rows.append)
        run.train()
    assert [list(row) for row in rows] == [ROW] * 3
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["tokens"] for row in rows] == [4 * 12] * 3
    assert rows[0]["lr"] == pytest.approx(0.05)
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert 0 <= row["data_wait_s"] <= row["seconds"]
        assert row["memory_mb"] > 1
        assert all(math.isfinite(value) for value in row.values())


def counted(tables, folder):
    with running(tables, folder) as run:
        row = run.step()
        return row["tokens"], row["trained_tokens"]


def test_the_kernel_that_a_plan_names_for_attention_is_noted(texts):
    with running(small_plan(model__attention="math"), texts) as run:
        assert "attention uses torch's kernel `math`" in run.notes


def test_tokens_are_those_of_all_ranks_though_their_batches_differ(ranks, own, small):
    """Samples of 4 and 8 tokens on rank 0, padded to 8, and of 12 and 4 on rank 1. Eight labels of all 28 are ignored."""
    tables = small(data={"factory": "own_data:Padded", "shuffle": False})
    assert counted(tables, own) == (4 * 12, 20)
    assert ranks(2)(counted, {**tables, "parallel": {"dp": 2}}, own) == [(2 * 8 + 2 * 12, 20)] * 2


def stop_one(tables, folder):
    """Rank 1 alone asks to stop, after its first step. Then training goes on."""
    with running(tables, folder) as run:
        if run.world.rank == 1:
            run.listeners.append(lambda row: run.stop() if row["step"] == 1 else None)
        return [(run.train(), run.num_steps_done) for _ in range(2)]


def test_one_rank_that_asks_to_stop_stops_all_in_the_same_step(ranks, own, small):
    assert ranks(2)(stop_one, small(run__steps=5), own) == [[("interrupted", 2), ("finished", 5)]] * 2


def test_what_fails_to_close_keeps_nothing_else_open(own, small, tmp_path):
    run = assemble(plan_from_dict(small(), own), World.alone("cpu"), folder=tmp_path)
    run.step()
    closed = []

    def fail():
        closed.append("feed")
        raise OSError("as asked")

    end = run.feed.close
    run.feed.close = fail
    (writer,) = run.writers
    writer.close = lambda close=writer.close: (close(), closed.append("writer"))
    with pytest.raises(OSError, match="as asked"):
        run.close()
    end()
    assert closed == ["feed", "writer"]
    assert not any(param.parameter._post_accumulate_grad_hooks for param in run.registry)


NORMS = [{"use": "core.each"}, {"use": "core.gradient_norms"}]


def rows_and_norms_of_each(every, folder):
    return [rows_and_norms(tables, folder) for tables in every]


def rows_and_norms(tables, folder, steps=2):
    """The rows of some steps, and the norms of their gradients as autograd's accumulated ones have them."""
    found = []
    with running(tables, folder) as run:
        for _ in range(steps):
            row = run.step()
            own = {param.name: run.store.gradient(param).double().norm().item() for param in run.registry.trainable}
            found.append((row, own))
    return found


CLIPS = [None, 1e-3]


@pytest.mark.parametrize("clip", CLIPS)
def test_the_norm_of_each_gradient_is_in_the_rows_of_all_ranks_and_adds_up_to_that_of_all(ranks, small, own, clip):
    every = [small(gradient_handlers=NORMS, optimizer__clip_norm=each) for each in CLIPS]
    alone = rows_and_norms(every[CLIPS.index(clip)], own)
    assert alone[0][0] != alone[1][0]
    for row, norms in alone:
        wanted = {f"gradient_norm/{name}": norm for name, norm in norms.items()}
        assert len(wanted) > 3
        assert math.hypot(*wanted.values()) == pytest.approx(row["grad_norm"] if clip is None else clip, rel=1e-5)
        if clip is None:
            assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)
    for rank in ranks(2).once(rows_and_norms_of_each, every, own):
        for (before, _), (after, _) in zip(alone, rank[CLIPS.index(clip)], strict=True):
            names = [name for name in before if "/" in name or name in ("loss", "grad_norm")]
            assert {name: after[name] for name in names} == pytest.approx({name: before[name] for name in names})


def test_a_frozen_parameter_has_none_until_it_is_trained_again(small, own, alone):
    with alone(small(gradient_handlers=NORMS)) as run:
        param = run.registry.trainable[0]
        before = run.step()[f"gradient_norm/{param.name}"]
        param.parameter.requires_grad_(False)
        during = run.step()[f"gradient_norm/{param.name}"]
        param.parameter.requires_grad_(True)
        after = run.step()[f"gradient_norm/{param.name}"]
    assert before > 0
    assert during == 0
    assert after > 0


def of_some_ranks(tables, folder):
    """Rank 1 alone adds a number, both another."""
    with running(tables, folder) as run:
        numbers = StepNumbers(run.groups)
        if run.world.rank == 1:
            numbers.add("own/second", lambda: torch.tensor(9.0), of="root")
        numbers.add("own/both", lambda: run.world.rank + 1.0)
        numbers.gather_names()
        values = numbers.local_shares(torch.device("cpu"))
        torch.distributed.all_reduce(values)
        return numbers.names, numbers.row(values.tolist())


def test_a_number_of_some_ranks_is_one_of_all(ranks, small, own):
    names = ("own/both", "own/second")
    assert ranks(2)(of_some_ranks, small(), own) == [(names, {"own/both": 3.0, "own/second": 3.0})] * 2


def test_a_number_on_the_device_is_not_read(small, alone):
    with alone(small()) as run, FakeTensorMode():  # whose tensors have no values
        numbers = StepNumbers(run.groups)
        numbers.add("own/one", lambda: torch.ones(()))
        numbers.gather_names()
        assert numbers.local_shares(torch.device("cpu")).shape == (1,)


def correct(every, folder):
    found = []
    for tables in every:
        with running(tables, folder) as run:
            found.append([run.step()["own/correct"] for _ in range(2)])
    return found


def test_a_loss_or_a_layer_adds_numbers_of_its_own(ranks, small, own):
    model = {"factory": "own_models:model", "options": {"kind": "Counted"}}
    every = [small(loss={"factory": "own_losses:Counted"}), small(model=model)]
    one = correct(every, own)
    assert all(sum(numbers) > 0 for numbers in one)
    assert ranks(2)(correct, every, own) == [one] * 2


@pytest.mark.parametrize(("steps", "taken", "recorded"), [([1, 2], 3, 2), ([2, 3], 2, 1), ([3, 3], 2, None)])
def test_the_steps_that_are_asked_for_as_far_as_the_run_gets(own, small, tmp_path, steps, taken, recorded):
    """torch marks optimizer steps in a trace."""
    plan = plan_from_dict(small(profile={"steps": steps}), own)
    with World.join("cpu") as world, assemble(plan, world, folder=tmp_path) as run:
        for _ in range(taken):
            run.step()
    traces = [path.name for path in tmp_path.glob("trace*")]
    assert traces == ([] if recorded is None else ["trace-rank0.json"])
    if recorded is not None:
        events = json.loads((tmp_path / "trace-rank0.json").read_text())["traceEvents"]
        assert sum(event.get("name") == "Optimizer.step#SGD.step" and event["ph"] == "X" for event in events) == recorded
        actions = [str(action) for action in sequential_actions(plan.num_microbatches(run.topology))]
        names = [event["name"] for event in sorted(events, key=lambda event: event.get("ts", 0)) if event["ph"] == "X"]
        assert [name for name in names if name in actions] == actions * recorded


PROGRAM = Path(__file__).parents[3] / "examples" / "own_loop.py"
CHANGES = ['run.device="cpu"', "model.num_layers=1", "model.hidden=64", "optimizer.lr=0.02"]
CHANGES += ["batch.global_size=4", "batch.micro_size=2"]


def main(cwd):
    os.chdir(cwd)
    sys.argv = [str(PROGRAM), *CHANGES]
    runpy.run_path(str(PROGRAM), run_name="__main__")


def test_alone_and_on_two_ranks_the_losses_are_the_same(ranks, tmp_path, capsys):
    losses = []
    for size in (1, 2):
        ranks(size, 100, init=False)(main, tmp_path)
        lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
        found = [re.fullmatch(r"\[rank 0\] step +(\d+)  loss (\d+\.\d{6})", line) for line in lines]
        assert [int(line[1]) for line in found] == list(range(1, 21)), lines
        losses.append([float(line[2]) for line in found])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[0][-1] < 2
    assert list(tmp_path.iterdir()) == [], "a loop of one's own writes nothing"
