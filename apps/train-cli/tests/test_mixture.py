"""A mixture of packed text and chats: in every layout the numbers of a plain loop, with each source's loss; `data show`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from chat_folder import documents, loop_of, write_chats
from started_program import Result
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.errors import RunError
from sley_core.plan.load import load_plan, plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import GRADIENTS, WEIGHTS, Recorded, assert_parity_of_parts, record, weights
from train_cli.main import main

NUM_STEPS = 2
NAMES = ("texts", "chats")
OWN_LOSS = """\
from sley_core.config import CrossEntropyConfig
from sley_core.losses.cross_entropy import CrossEntropy


def loss():
    return CrossEntropy(CrossEntropyConfig())
"""
PLAN = """\
[run]
name = "mixed"
steps = 4
[model]
use = "models.llama"
num_layers = 1
hidden = 16
heads = 2
[data]
use = "data.mixture"
sequence = 160
[[data.sources]]
name = "texts"
use = "data.text"
files = ["texts.txt"]
separator = "\\n\\n"
tokenizer = "tokenizer"
held_out = 0.0
weight = 1
[[data.sources]]
name = "chats"
use = "data.chat"
files = ["chats.jsonl"]
tokenizer = "tokenizer"
held_out = 0.1
weight = 2
[batch]
global_size = 4
micro_size = 1
[optimizer]
use = "core.adamw"
lr = 1e-3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, conversations, a tokenizer of bytes, and a plan of both."""
    folder = tmp_path_factory.mktemp("mixed")
    write_chats(folder)
    random = Random(5)
    texts = (" ".join(random.choices(["weft", "warp", "sley"], k=random.randint(1, 30))) for _ in range(90))
    (folder / "texts.txt").write_text("\n\n".join(texts), "utf-8")
    (folder / "plan.toml").write_text(PLAN, "utf-8")
    (folder / "own_loss.py").write_text(OWN_LOSS, "utf-8")
    return folder


def plan(**changes: Any) -> Tables:
    text = {
        "name": "texts",
        "use": "data.text",
        "files": ["texts.txt"],
        "separator": "\n\n",
        "tokenizer": "tokenizer",
        "weight": 1,
    }
    chat = {"name": "chats", "use": "data.chat", "files": ["chats.jsonl"], "tokenizer": "tokenizer", "weight": 2}
    mixture = {"use": "data.mixture", "sequence": 160, "sources": [text, chat]}
    return changed(small_plan(data=mixture, optimizer__eps=1e-3, batch={"global_size": 8, "micro_size": 2}), **changes)


BUCKETS = [{"use": "dp.bucketed", "bucket_mb": 0.002}]
LAYOUTS: dict[str, Tables] = {
    "alone": {},
    "dp 2": {"parallel__dp": 2, "gradient_handlers": BUCKETS},
    "pp 2": {"parallel__pp": 2, "pipeline__use": "pp.one_f_one_b"},
    "wp 2": {"parallel__dp": 2, "parallel__wp": 2, "weights__use": "isp.communicator"},
    "wp 2, split logits": {"parallel__dp": 2, "parallel__wp": 2, "weights": {"use": "isp.communicator", "head": "vocabulary"}},
    "sp 2": {"parallel__sp": 2, "sequence__use": "isp.all_to_all", "gradient_handlers": BUCKETS},
    "sp 2, a loss of whole sequences": {
        "parallel__sp": 2,
        "sequence__use": "isp.all_to_all",
        "gradient_handlers": BUCKETS,
        "loss": {"factory": "own_loss:loss", "sequence": "whole"},
    },
    "canonical": {"parallel__dp": 2, "parallel__reduction": "canonical", "gradient_handlers": BUCKETS},
}


@pytest.fixture(scope="module")
def one_by_one(folder: Path) -> Recorded:
    """The steps of a plain loop, for which each document of a batch is a batch of its own; rows have the losses by source."""
    with World.alone("cpu") as world, assemble(plan_from_dict(plan(), folder), world) as run:
        first = weights(run)
        batches = [run.feed.next() for _ in range(NUM_STEPS)]
        layers = [(layer.name, layer.module) for layer in run.layers]
    loop = loop_of(layers)
    loop.load(first)
    recorded = Recorded(first=first)
    for number, batch in enumerate(batches):
        assert len(set(batch["source"].tolist())) == 2
        by_source: dict[str, list[dict[str, Tensor]]] = {name: [] for name in NAMES}
        for row, source in enumerate(batch["source"].tolist()):
            by_source[NAMES[source]] += documents({name: value[row : row + 1] for name, value in batch.items()})
        counts = {name: sum(map(loop.loss.weight, each)) for name, each in by_source.items()}
        row = {f"loss/{name}": loop.evaluate(each) for name, each in by_source.items()}
        row |= {f"share/{name}": count / sum(counts.values()) for name, count in counts.items()}
        step = loop.step([one for each in by_source.values() for one in each])
        row |= {"step": number + 1, "loss": step.loss, "grad_norm": step.grad_norm, "tokens": batch["tokens"].numel()}
        recorded.rows.append(row)
        recorded.gradients.append(step.gradients)
    recorded.weights = first | loop.weights
    return recorded


def assert_sources(wanted: Recorded, layouts: Sequence[Recorded]) -> None:
    for layout in layouts:
        for one, other in zip(wanted.rows, layout.rows, strict=True):
            limit = (GRADIENTS if one["step"] == 1 else WEIGHTS)["fp64"]
            for key in (f"{label}/{name}" for label in ("loss", "share") for name in NAMES):
                assert math.isclose(one[key], other[key], rel_tol=limit), (key, one, other)


IN_CI = ("alone", "pp 2", "wp 2, split logits", "sp 2, a loss of whole sequences")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.campaign) for name in LAYOUTS]
)
def test_a_mixture_trains_as_its_documents_one_by_one(ranks: Any, folder: Path, one_by_one: Recorded, layout: str) -> None:
    recorded = ranks(2 if LAYOUTS[layout] else 1)(record, plan(**LAYOUTS[layout]), NUM_STEPS, folder=folder)
    assert_parity_of_parts(one_by_one, recorded, "fp64")
    assert_sources(one_by_one, recorded)


def test_canonical_losses_of_sources_have_the_same_bits_in_every_layout(ranks: Any, folder: Path) -> None:
    canonical = plan(parallel__reduction="canonical", batch={"global_size": 8, "micro_size": 1})
    layouts = [ranks(size)(record, changed(canonical, parallel__dp=size), NUM_STEPS, folder=folder)[0] for size in (1, 2)]
    for one, other in zip(*(layout.rows for layout in layouts), strict=True):
        names = [key for key in one if key.startswith(("loss", "share"))]
        assert len(names) == 5
        assert {key: one[key] for key in names} == {key: other[key] for key in names}
    assert_same_bits(layouts[0].weights, layouts[1].weights)


def test_data_show_counts_each_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder / "plan.toml")
    assert main(["data", "show", path, "--sample", "0", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    texts, chats = (shown["sources"][name] for name in NAMES)
    assert texts["samples"] + chats["samples"] == shown["samples"]
    assert texts["samples"] == pytest.approx(shown["samples"] / 3, abs=1)
    assert texts["tokens"] == 160 * texts["samples"]
    assert chats["trained"] / chats["tokens"] < 0.6 < texts["trained"] / texts["tokens"]
    assert shown["trained"] == texts["trained"] + chats["trained"]
    dataset = open_dataset(load_plan(folder / "plan.toml").data, DataContext())
    assert shown["samples"] == len(dataset)
    assert shown["sample"] == {name: value.reshape(-1).tolist() for name, value in dataset[0].items()}
    sets = ["--set", "evaluation={every=1, sets={fresh={use='data.text', files=['texts.txt'], sequence=16}}}"]
    assert main(["data", "show", path, *sets, "--split", "fresh"]) == 0
    assert "fresh: " in capsys.readouterr().out
    assert main(["data", "show", path, "--sample", "0", "--split", "held_out"]) == 0
    text = capsys.readouterr().out
    assert "  chats: " in text
    assert "-- positions 0 to" in text
    assert main(["data", "prepare", path]) == 0


def test_a_run_of_a_mixture_goes_on_in_another_layout(
    folder: Path, capsys: pytest.CaptureFixture[str], together: Callable[..., Result]
) -> None:
    """With the rows of a run that was not interrupted; changed content is refused."""
    options = ["--set", "precision.compute='fp64'", "--set", "checkpoint={every_steps=2}", "--set", f"run.folder='{folder}'"]
    path = str(folder / "plan.toml")
    assert main(["run", path, *options, "--set", "run.name='whole'", "--set", "parallel.dp=1"]) == 0
    wanted = rows(folder / "whole")
    assert main(["run", path, *options, "--set", "run.steps=2", "--set", "parallel.dp=1"]) == 0
    chats = (folder / "chats.jsonl").read_text("utf-8")
    (folder / "chats.jsonl").write_text(chats.replace("user", "system", 1), "utf-8")
    again = ["run", path, *options, "--resume", "auto"]
    assert main(again) != 0
    assert "data-changed" in capsys.readouterr().err
    (folder / "chats.jsonl").write_text(chats, "utf-8")
    assert together(2, *again, "--set", "parallel.dp=2").code == 0
    found = rows(folder / "mixed")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    for one, other in zip(wanted, found, strict=True):
        names = [key for key in one if key.startswith(("loss", "share"))]
        assert len(names) == 5
        assert {key: other[key] for key in names} == pytest.approx({key: one[key] for key in names}, rel=1e-9)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_batches_of_a_program(folder: Path) -> None:
    """A batch of one source; a source that the data does not have is refused."""
    with World.alone("cpu") as world, assemble(plan_from_dict(plan(), folder), world) as run:
        batch = run.feed.next()
        ones = {**batch, "source": torch.ones(8, dtype=torch.int64)}
        row = run.step(ones)
        assert row["loss/chats"] == row["loss"]
        assert row["share/texts"] == 0
        assert "loss/texts" not in row
        with pytest.raises(RunError, match=r"a sample has the source 2, but the data has 2 sources: texts, chats"):
            run.step({**batch, "source": torch.arange(8)})


def test_evaluation_sets_need_no_sources_and_may_have_others(folder: Path) -> None:
    text = {"use": "data.text", "files": ["texts.txt"], "separator": "\n\n", "tokenizer": "tokenizer", "held_out": 0.3}
    three = [{**text, "name": name, "weight": 1} for name in ("a", "b", "c")]
    mixed = {"use": "data.mixture", "sequence": 160, "sources": three, "split": "held_out"}
    sets = {"plain": {**text, "sequence": 160, "split": "held_out"}, "mixed": mixed}
    evaluation = {"every": 1, "held_out": False, "sets": sets}
    plain = {key: value for key, value in sets["plain"].items() if key != "split"}
    for data in (plan()["data"], plain):
        tables = plan(data=data, evaluation=evaluation)
        with World.alone("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            row = run.step()
        assert math.isfinite(row["held_out/plain/loss"])
        assert row["held_out/mixed/loss"] == pytest.approx(row["held_out/plain/loss"], rel=0.05)
