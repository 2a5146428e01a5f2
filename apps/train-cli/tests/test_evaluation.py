"""An evaluation has the numbers of a plain loop over single samples, in every layout."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from drawn_model import sample
from layouts import layout_of, num_ranks
from torch import Tensor

from sley_core.comm.world import World
from sley_core.data.batches import open_dataset
from sley_core.data.dataset import DataContext
from sley_core.errors import SleyError, UsageError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_testing.plain import PlainLoop
from sley_testing.plans import Tables, changed, small_plan
from sley_trainer.assemble import assemble


class Rows:
    """`num_samples` drawn samples of `sequence` tokens, some of whose labels are ignored."""

    def __init__(self, num_samples: int, sequence: int = 24) -> None:
        self.num_samples = num_samples
        self.sequence = sequence

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(index, self.sequence)


class Endless:
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (Rows(5)[index] for index in range(5))


def sequence_metric(fault: str = "") -> Callable[[Tensor, Mapping[str, Tensor]], dict[str, tuple[Any, Any]]]:
    """Returns a metric that needs full sequences: the position of the highest logit, and the likelihood of the best tokens.

    fault: what is wrong with its results: "a name" of rank 1, "a pair", "nothing", a name that is "taken", or "in place".
    """

    def count(output: Tensor, batch: Mapping[str, Tensor]) -> dict[str, tuple[Any, Any]]:
        assert "tokens" in batch
        highest = output.amax(-1).argmax(-1)
        if fault == "in place":
            output.zero_()
        results: dict[str, tuple[Any, Any]] = {
            "highest": (highest.sum(), len(highest)),
            "likelihood": (output.log_softmax(-1).amax(-1).sum(), float(output[..., 0].numel())),
        }
        if fault == "a name" and dist.is_initialized() and dist.get_rank() == 1:
            results["more"] = results.pop("highest")
        return {"a pair": {"highest": (highest, 1.0)}, "nothing": {}, "taken": {"loss": (1, 1)}}.get(fault, results)

    return count


SETS = {
    "odd": {"factory": "test_evaluation:Rows", "options": {"num_samples": 13}},
    "one": {"factory": "test_evaluation:Rows", "options": {"num_samples": 1}},
    "short": {"factory": "test_evaluation:Rows", "options": {"num_samples": 5, "sequence": 8}},
    "few": {"factory": "test_evaluation:Rows", "options": {"num_samples": 100}, "steps": 2, "shuffle": False},
    "texts": {"use": "data.text", "files": ["text/b.txt"], "sequence": 384, "separator": "\n\n", "documents": "cut"},
    "held": {"use": "data.text", "files": ["text/a.txt"], "sequence": 192, "separator": "\n\n", "documents": "cut"}
    | {"split": "held_out", "held_out": 0.3},
}
PLAN = small_plan(
    data__documents="cut",
    batch__micro_size=2,
    evaluation={"every": 2, "steps": 1, "sets": SETS, "metric": {"factory": "test_evaluation:sequence_metric"}},
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
            rows = [data[index] for index in range(16 if name == "few" else len(data))]
            total = weight = correct = highest = likelihood = 0.0
            with torch.no_grad():
                for row in rows:
                    logits, labels = loop.forward({key: value[None] for key, value in row.items()})[0], row["labels"]
                    total += F.cross_entropy(logits, labels, reduction="sum").item()
                    weight += (labels != -100).sum().item()
                    correct += (logits.argmax(-1) == labels).sum().item()
                    highest += logits.amax(-1).argmax().item()
                    likelihood += logits.log_softmax(-1).amax(-1).sum().item()
            means = {"loss": total / weight, "perplexity": math.exp(total / weight), "accuracy": correct / weight}
            means |= {"highest": highest / len(rows), "likelihood": likelihood / sum(len(row["labels"]) for row in rows)}
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


HELD_OUT = small_plan(data__documents="cut", evaluation={"every": 2, "steps": 1})


def loaded(folder: Path, **changes: Any) -> Plan:
    return plan_from_dict(changed(HELD_OUT, **changes), folder)


def error_of(tables: Tables, folder: Path) -> str:
    with pytest.raises(SleyError) as error:
        evaluate(tables, folder)
    return str(error.value)


def test_metrics_with_other_names_on_one_rank_are_refused(ranks: Any, texts: Path) -> None:
    metric = {"factory": "test_evaluation:sequence_metric", "options": {"fault": "a name"}}
    tables = changed(PLAN, evaluation={"every": 2, "metric": metric}, parallel__dp=2)
    first, second = ranks(2)(error_of, tables, texts)
    assert first == second
    assert "error[metric-result]: the [evaluation] metric returns likelihood, more on rank 1, but highest" in first


def metric(fault: str) -> Tables:
    return {"evaluation__metric": {"factory": "test_evaluation:sequence_metric", "options": {"fault": fault}}}


def one_set(**table: Any) -> Tables:
    return {"evaluation__sets": {"mine": table}}


MIXTURE = {"use": "data.mixture", "sources": [{"name": "a", "weight": 1.0, **SETS["texts"]}]}
SMOOTHED: Tables = {"loss": {"label_smoothing": 0.1}, "checkpoint": {}}
REFUSED: dict[str, Tables] = {
    "does not return a pair of numbers for 'highest'": metric("a pair"),
    "metric returns nothing": metric("nothing"),
    "returns the name 'loss', which is taken": metric("taken"),
    "must return a function `(output, batch)`, but returns a Rows": {
        "evaluation__metric": {"factory": "test_evaluation:Rows", "options": {"num_samples": 1}}
    },
    "writes in place": metric("in place"),
    "the set `mine` has no samples": one_set(factory="test_evaluation:Rows", options={"num_samples": 0}),
    "`mine` is a stream, which has no end": one_set(factory="test_evaluation:Endless", sequence=24),
    "the set `mine` has the fields ['cu_seqlens', 'labels', 'pos": one_set(**{**SETS["texts"], "documents": "pack"}),
    "holds out samples, but the set `mine` is evaluated on all samples": one_set(**{**SETS["texts"], "held_out": 0.1}),
    "none.txt": one_set(**{**SETS["texts"], "files": ["none.txt"]}),
    "[evaluation.sets.mine] needs `use`": one_set(files=["text/a.txt"]),
    "`mine` cannot be evaluated on all samples": one_set(**MIXTURE),
    "`evaluation.sets.mine.steps` must be an integer of at least 1": one_set(**{**SETS["texts"], "steps": 0}),
    "there is no data to evaluate": {"evaluation__held_out": False},
    "`patience` needs `keep_best`": {"evaluation__patience": 2},
    "`keep_best` keeps a checkpoint, but the plan saves no checkpoints": {"evaluation__keep_best": "held_out_loss"},
    'write keep_best = { metric = "held_out/mine", mode = "max" }': {"evaluation__keep_best": "held_out/mine"},
    "set `mode` to": {"evaluation__keep_best": {"metric": "held_out/mine"}},
    "has no metric `held_out/wiki/loss`": {"evaluation__keep_best": "held_out/wiki/loss"},
    "with this data and this loss has no metric `held_out/perplexity`": {"evaluation__keep_best": "held_out/perplexity"}
    | SMOOTHED,
}
"""The changes of plans whose evaluation is refused, by a part of the message."""


@pytest.mark.parametrize("message", REFUSED)
def test_an_impossible_evaluation_is_refused(texts: Path, message: str) -> None:
    assert message in error_of(changed(HELD_OUT, **REFUSED[message]), texts)


def test_an_evaluation_of_sets_needs_no_held_out_data(texts: Path) -> None:
    tables = {"data__held_out": 0.0, "evaluation": {"every": 2, "held_out": False, "sets": {"odd": SETS["odd"]}}}
    with World.alone("cpu") as world, assemble(loaded(texts, **tables), world) as run:
        assert {name.rpartition("/")[0] for name in run.evaluate_sets()} == {"held_out/odd"}
        with pytest.raises(UsageError, match="no held-out samples"):
            run.evaluate()
    assert "no [evaluation] table" in error_of(changed(HELD_OUT, evaluation=None), texts)
    tables["evaluation"]["held_out"] = True
    assert "or set `held_out = false` to evaluate only on the sets" in error_of(changed(HELD_OUT, **tables), texts)
    assemble(loaded(texts, evaluation__keep_best="held_out/accuracy", **SMOOTHED), World.alone("cpu")).close()


def test_a_stream_is_read_for_its_steps(texts: Path) -> None:
    sets = {"mine": {"factory": "test_evaluation:Endless", "sequence": 24, "steps": 2}}
    with World.alone("cpu") as world, assemble(loaded(texts, evaluation__sets=sets), world) as run:
        first, second = run.evaluate_sets(), run.evaluate_sets()
    assert first == second
    assert "held_out/mine/loss" in first


def test_canonical_sums_have_the_bits_of_one_process(ranks: Any, texts: Path) -> None:
    tables = changed(PLAN, parallel__reduction="canonical")
    expected = evaluate(tables, texts)
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
    reason = "held_out/own/loss has not improved in 2 evaluations; the best value, "
    cli("run", plan, changes=changes).expect(0, f", stopped early: {reason}")
    summary = json.loads((folder / "runs/small/summary.json").read_text("utf-8"))
    assert (summary["outcome"], summary["steps"], summary["best"]["step"]) == ("finished", 6, 2)
    assert summary["stopped_early"].startswith(reason)
    cli("run", plan, "--resume", "auto", changes=changes).expect(0, "has ended early: held_out/own/loss has not")
    cli("export", "runs/small", "--best", "--out", "best").expect(0, "after step 2 of 50")
    shown = cli("eval", "runs/small", "--best")
    assert f"held_out/own/loss        {summary['best']['value']:.4f}" in shown.out, (shown.out, shown.err)
    longer = (*changes, "evaluation.patience=3")
    cli("run", plan, "--resume", "auto", changes=longer).expect(0, "has not improved in 3 evaluations")
