"""An evaluation has the numbers of a plain loop over single samples, in every layout."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import layout_of, num_ranks

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.errors import RunError, SleyError, UsageError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_testing.plain import PlainLoop
from sley_testing.plans import Tables, changed, small_plan

SETS = {
    "odd": {"factory": "evaluated_parts:Rows", "options": {"num_samples": 13}},
    "one": {"factory": "evaluated_parts:Rows", "options": {"num_samples": 1}},
    "short": {"factory": "evaluated_parts:Rows", "options": {"num_samples": 5, "sequence": 8}},
    "few": {"factory": "evaluated_parts:Rows", "options": {"num_samples": 100}, "steps": 2, "shuffle": False},
    "texts": {"use": "data.text", "files": ["text/b.txt"], "sequence": 24, "separator": "\n\n", "documents": "cut"},
    "held": {"use": "data.text", "files": ["text/a.txt"], "sequence": 24, "separator": "\n\n", "documents": "cut"}
    | {"split": "held_out", "held_out": 0.3},
}
PLAN = small_plan(
    data__documents="cut",
    batch__micro_size=2,
    evaluation={"every": 2, "steps": 1, "sets": SETS, "metric": {"factory": "evaluated_parts:of_sequences"}},
)


def evaluate(tables: Tables, folder: Path) -> dict[str, float]:
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        return run.evaluate_sets()


@cache
def one_by_one(folder: Path) -> dict[str, float]:
    """Returns the results of each set from a loop over its samples."""
    plan = plan_from_dict(PLAN, folder)
    with World.alone("cpu") as world, assemble(plan, world) as run:
        loop = PlainLoop([(layer.name, layer.module) for layer in run.layers], None, optimizer=lambda named: None)  # type: ignore[arg-type, return-value]
        results: dict[str, float] = {}
        for name, evaluation_set in plan.evaluation_sets.items():
            data: Any = open_dataset(evaluation_set.data, DataContext(7, "held_out" if name == "held" else "train"))
            samples = [data[index] for index in range(16 if name == "few" else len(data))]
            total = weight = correct = highest = likelihood = 0.0
            with torch.no_grad():
                for sample in samples:
                    logits = loop.forward({key: value[None] for key, value in sample.items()})[0]
                    labels = sample["labels"]
                    total += F.cross_entropy(logits, labels, reduction="sum").item()
                    weight += (labels != -100).sum().item()
                    correct += (logits.argmax(-1) == labels).sum().item()
                    highest += logits.amax(-1).argmax().item()
                    likelihood += logits.log_softmax(-1).amax(-1).sum().item()
            means = {"loss": total / weight, "perplexity": math.exp(total / weight), "accuracy": correct / weight}
            means |= {
                "highest": highest / len(samples),
                "likelihood": likelihood / sum(len(sample["labels"]) for sample in samples),
            }
            results |= {f"held_out/{name}/{key}": value for key, value in means.items()}
    return results


EVALUATED = ["wp2 sp2", "alone", "dp2 each", "dp2 sharded", "pp2", "wp2", "sp2", "wp2 head", "interleaved"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", EVALUATED)
def test_each_sample_counts_once_in_every_layout(ranks: Any, texts: Path, layout: str) -> None:
    tables = layout_of(layout.removesuffix(" head"), PLAN)
    if layout == "wp2 head":
        tables["weights"]["head"] = "vocabulary"
    expected = one_by_one(texts)
    for rank, results in enumerate(ranks(num_ranks(tables))(evaluate, tables, texts)):
        assert {name for name in results if name.count("/") == 2} == expected.keys()
        for name, value in expected.items():
            assert results[name] == pytest.approx(value, rel=1e-10), f"{name} on rank {rank}"
        own = {name for name in results if name.count("/") < 2}
        assert own == {"held_out_loss", *(f"held_out/{key}" for key in ("perplexity", "accuracy", "highest", "likelihood"))}


def error_of(folder: Path, **changes: Any) -> str:
    with pytest.raises(SleyError) as error, World.alone("cpu") as world, assemble(loaded(folder, **changes), world) as run:
        run.evaluate_sets()
    return str(error.value)


def loaded(folder: Path, **changes: Any) -> Plan:
    return plan_from_dict(changed(small_plan(data__documents="cut", evaluation={"every": 2, "steps": 1}), **changes), folder)


def evaluation_error(tables: Tables, folder: Path) -> str:
    with pytest.raises(RunError) as error:
        evaluate(tables, folder)
    return str(error.value)


def test_metrics_with_other_names_on_one_rank_are_refused(ranks: Any, texts: Path) -> None:
    metric = {"factory": "evaluated_parts:of_sequences", "options": {"place": "a name"}}
    tables = changed(PLAN, evaluation={"every": 2, "metric": metric}, parallel__dp=2)
    first, second = ranks(2)(evaluation_error, tables, texts)
    assert first == second
    assert "error[metric-result]: the [evaluation] metric returns likelihood, more on rank 1, but highest" in first


@pytest.mark.parametrize(("place", "message"), [("a pair", "no pair of numbers as 'highest'"), ("in place", "writes in place")])
def test_an_invalid_metric_is_refused(texts: Path, place: str, message: str) -> None:
    metric = {"factory": "evaluated_parts:of_sequences", "options": {"place": place}}
    assert message in error_of(texts, evaluation__metric=metric)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"factory": "evaluated_parts:Rows", "options": {"num_samples": 0}}, "the set `mine` has no samples"),
        ({"factory": "evaluated_parts:Endless", "sequence": 24}, "`mine` is a stream, which has no end"),
        ({**SETS["texts"], "documents": "pack"}, "the set `mine` has the fields ['cu_seqlens', 'labels', 'pos"),
        ({**SETS["texts"], "held_out": 0.1}, "`held_out` holds out samples, but the set `mine` is evaluated on all samples"),
        ({**SETS["texts"], "files": ["none.txt"]}, "none.txt"),
        ({"files": ["text/a.txt"]}, "[evaluation.sets.mine] needs `use`"),
        (
            {"use": "data.mixture", "sources": [{"name": "a", "weight": 1.0, **SETS["texts"]}]},
            "`mine` cannot be evaluated whole",
        ),
        ({**SETS["texts"], "steps": 0}, "`evaluation.sets.mine.steps` must be an integer of at least 1"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_refused(texts: Path, table: Tables, message: str) -> None:
    assert message in error_of(texts, evaluation__sets={"mine": table})


def test_an_evaluation_of_sets_needs_no_held_out_data(texts: Path) -> None:
    tables = {"data__held_out": 0.0, "evaluation": {"every": 2, "held_out": False, "sets": {"odd": SETS["odd"]}}}
    with World.alone("cpu") as world, assemble(loaded(texts, **tables), world) as run:
        assert {name.rpartition("/")[0] for name in run.evaluate_sets()} == {"held_out/odd"}
        with pytest.raises(UsageError, match="has `held_out = false`"):
            run.evaluate()
    plan = loaded(texts, evaluation=None)
    with assemble(plan, World.alone("cpu")) as run, pytest.raises(UsageError, match=r"no \[evaluation\] table"):
        run.evaluate_sets()
    tables["evaluation"]["held_out"] = True
    assert "or set `held_out = false` to evaluate only on the sets" in error_of(texts, **tables)


def test_a_stream_is_read_for_its_steps(texts: Path) -> None:
    sets = {"mine": {"factory": "evaluated_parts:Endless", "sequence": 24, "steps": 2}}
    with World.alone("cpu") as world, assemble(loaded(texts, evaluation__sets=sets), world) as run:
        first, second = run.evaluate_sets(), run.evaluate_sets()
    assert first == second
    assert "held_out/mine/loss" in first


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"held_out": False}, "there is no data to evaluate"),
        ({"patience": 2}, "`patience` needs `keep_best`"),
        ({"keep_best": "held_out_loss"}, "`keep_best` keeps a checkpoint, but the plan saves no checkpoints"),
        ({"keep_best": "held_out/mine"}, 'write keep_best = { metric = "held_out/mine", mode = "max" }'),
        ({"keep_best": {"metric": "held_out/mine"}}, "set `mode` to"),
        ({"keep_best": "held_out/wiki/loss"}, "has no metric `held_out/wiki/loss`"),
    ],
)
def test_an_invalid_best_metric_is_refused(texts: Path, evaluation: Tables, message: str) -> None:
    assert message in error_of(texts, evaluation={"every": 2, **evaluation})


def test_the_best_metric_must_exist_for_the_data(texts: Path) -> None:
    changes: Tables = {"evaluation__keep_best": "held_out/accuracy", "checkpoint": {}, "loss": {"label_smoothing": 0.1}}
    assemble(loaded(texts, **changes), World.alone("cpu")).close()
    changes["evaluation__keep_best"] = "held_out/perplexity"
    assert "an evaluation of this data and this loss has no metric `held_out/perplexity`" in error_of(texts, **changes)


def test_canonical_sums_have_the_bits_of_one_process(ranks: Any, texts: Path) -> None:
    tables = changed(PLAN, parallel__reduction="canonical")
    with World.alone("cpu") as world, assemble(plan_from_dict(tables, texts), world) as run:
        expected = run.evaluate_sets()
    assert ranks(2)(evaluate, layout_of("pp2", tables), texts) == [expected, expected]


EVALUATION = """
[checkpoint]
keep = 1

[evaluation]
every = 2
steps = 1
keep_best = "held_out/own/loss"
patience = 2

[evaluation.sets.own]
use = "data.text"
files = ["other.txt"]
sequence = 16
"""


def test_a_run_without_improvement_stops_early(cli: Any, plan: Path, folder: Path) -> None:
    (folder / "other.txt").write_text("the sley beats home\n" * 9, "utf-8")
    (folder / "corpus.txt").rename(folder / "a.txt")
    (folder / "b.txt").write_text("another\n" * 40, "utf-8")
    text = plan.read_text("utf-8").replace('["corpus.txt"]', '["?.txt"]\nheld_out_files = ["other.txt"]')
    plan.write_text(text.replace("dp = 2", "dp = 1") + EVALUATION, "utf-8")
    changes = ("run.steps=50", "optimizer.lr=1e-30")
    result = cli("run", plan, changes=changes)
    assert result.code == 0, result.err
    reason = "held_out/own/loss has not improved in 2 evaluations; the best, "
    assert f", early: {reason}" in result.err, result.err
    summary = json.loads((folder / "runs/small/summary.json").read_text("utf-8"))
    assert (summary["outcome"], summary["steps"], summary["best"]["step"]) == ("finished", 6, 2)
    assert summary["stopped_early"].startswith(reason)
    again = cli("run", plan, "--resume", "auto", changes=changes)
    assert (again.code, "has ended early: held_out/own/loss has not" in again.err) == (0, True), again.err
    exported = cli("export", "runs/small", "--best", "--out", "best")
    assert "after step 2 of 50" in exported.err, exported.err
    shown = cli("eval", "runs/small", "--best")
    assert f"held_out/own/loss        {summary['best']['value']:.4f}" in shown.out, (shown.out, shown.err)
    longer = cli("run", plan, "--resume", "auto", changes=(*changes, "evaluation.patience=3"))
    assert "has not improved in 3 evaluations" in longer.err
