"""A plan of chats: in every layout the numbers of a plain loop over the same conversations, one by one, and `data show`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_folder import TEMPLATE, documents, loop_of, write_chats

from sley_core.assemble import assemble
from sley_core.attempt import PLAN
from sley_core.comm.world import World
from sley_core.plan.load import load_plan, plan_from_dict
from sley_data.chat_template import text_ids
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import Recorded, assert_parity_of_parts, record, weights
from train_cli.main import main
from train_cli.saved import copy_run_files, load_run_plan

NUM_STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations, a tokenizer of bytes, and a plan."""
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder)
    return folder


def plan(**changes: Any) -> Tables:
    chat = {"use": "data.chat", "files": ["chats.jsonl"], "tokenizer": "tokenizer", "sequence": 160}
    return changed(small_plan(data=chat, optimizer__eps=1e-3, batch={"global_size": 4, "micro_size": 1}), **changes)


BUCKETS = [{"use": "dp.bucketed", "bucket_mb": 0.002}]
LAYOUTS: dict[str, Tables] = {
    "dp 2": {"parallel__dp": 2, "gradient_handlers": BUCKETS},
    "pp 2": {"parallel__pp": 2, "pipeline__use": "pp.one_f_one_b"},
    "wp 2": {"parallel__dp": 2, "parallel__wp": 2, "weights__use": "isp.communicator"},
    "sp 2": {"parallel__sp": 2, "sequence__use": "isp.all_to_all", "gradient_handlers": BUCKETS},
    "canonical": {"parallel__dp": 2, "parallel__reduction": "canonical", "gradient_handlers": BUCKETS},
}


@pytest.fixture(scope="module")
def one_by_one(folder: Path) -> Recorded:
    """The steps of a plain loop, for which each conversation of a batch is a batch of its own, without boundaries."""
    with World.alone("cpu") as world, assemble(plan_from_dict(plan(), folder), world) as run:
        first = weights(run)
        batches = [run.samples.splitter.split_feed(run.feed.next()).micros for _ in range(NUM_STEPS)]
        layers = [(layer.name, layer.module) for layer in run.layers]
    loop = loop_of(layers)
    loop.load(first)
    recorded = Recorded(first=first)
    for number, micros in enumerate(batches):
        conversations = [one for micro in micros for one in documents(micro)]
        assert len(conversations) > 2 * len(micros)
        step = loop.step(conversations)
        tokens = sum(micro["tokens"].numel() for micro in micros)
        recorded.rows.append({"step": number + 1, "loss": step.loss, "grad_norm": step.grad_norm, "tokens": tokens})
        recorded.gradients.append(step.gradients)
    recorded.weights = first | loop.weights
    return recorded


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_chats_train_as_one_by_one(ranks: Any, folder: Path, one_by_one: Recorded, layout: str) -> None:
    found = ranks(2)(record, plan(**LAYOUTS[layout]), NUM_STEPS, folder=folder)
    assert_parity_of_parts(one_by_one, found, "fp64")


def test_data_show_prints_what_the_model_will_see(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "plan.toml"
    assert main(["data", "show", str(path), "--sample", "1", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["documents"] + json.loads(_held_out(path, capsys))["documents"] == 120
    assert shown["trained"] < shown["tokens"]
    assert shown["packing"] == 1 - shown["padding"] / (160 * shown["samples"])
    assert shown["dropped"] == {}
    assert {name: len(shown["sample"][name]) for name in ("tokens", "labels")} == {"tokens": 160, "labels": 160}

    assert main(["data", "show", str(path), "--sample", "1"]) == 0
    text = capsys.readouterr().out
    answers = [part.partition("]\n")[0] for part in text.split("<|im_start|>assistant\n[")[1:]]
    assert answers
    assert all(answer.endswith("<|im_end|>") for answer in answers)
    assert "-- positions 0 to" in text
    assert main(["data", "show", str(path), "--sample", "99999"]) == 2
    assert main(["data", "show", str(path), "--split", "test"]) == 2


def _held_out(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["data", "show", str(path), "--split", "held_out", "--format", "json"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        "data.template='own.jinja'",
        "data={use='data.mixture', sequence=160, sources=[{name='chats', use='data.chat', files=['chats.jsonl'], "
        "tokenizer='tokenizer', template='own.jinja', weight=1}]}",
    ],
)
def test_a_run_keeps_its_template(folder: Path, tmp_path: Path, change: str) -> None:
    """The end of a turn is that of the plan's template, not of the tokenizer's, when the file is gone."""
    template = folder / "own.jinja"
    template.write_text(TEMPLATE.replace("<|im_end|>", "<|im_start|>"), "utf-8")
    resolved = load_plan(folder / "plan.toml", [change])
    (tmp_path / PLAN).write_text(resolved.to_toml(), "utf-8")
    copy_run_files(resolved, tmp_path)
    template.unlink()
    config: Any = load_run_plan(tmp_path).data.config
    ids = text_ids(config.sources[0].component.config if "mixture" in change else config, None)
    assert "".join(ids.decode([ids.end])) == "<|im_start|>"


def test_data_prepare_reads_both_splits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "evaluation={every=1}", "--set", "data.too_long='drop'", "--set", "data.sequence=60"]
    assert main(["data", "prepare", str(folder / "plan.toml"), *options]) == 0
    said = capsys.readouterr().err
    assert "train: " in said
    assert "held_out: " in said
    assert "samples are dropped" in said


def test_data_export_writes_what_data_tokens_reads(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (folder / "words.txt").write_text("\n\n".join(f"word {number} of many" for number in range(90)), "utf-8")
    text = 'data={use="data.text", files=["words.txt"], sequence=16, separator="\\n\\n", held_out=0.2, documents="cut"}'
    path, out = str(folder / "plan.toml"), tmp_path / "out"
    assert main(["data", "export", path, "--out", str(out), "--set", text]) == 0
    assert "vocab_size = 256" in capsys.readouterr().err
    tokens = (
        f'data={{use="data.tokens", files=["{out}/train.bin"], held_out_files=["{out}/val.bin"], vocab_size=256, sequence=16}}'
    )
    for split in ("train", "held_out"):
        shown = []
        for change in (text, tokens):
            options = ["--split", split, "--sample", "1", "--format", "json", "--set", change]
            assert main(["data", "show", path, *options]) == 0
            shown.append(json.loads(capsys.readouterr().out))
        assert shown[0]["sample"] == shown[1]["sample"]
        assert shown[0]["samples"] == shown[1]["samples"]
    assert main(["data", "export", path, "--out", str(out)]) == 2, "chats have no stream"


def test_data_show_counts_any_data_set_of_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.txt").write_text("hello world, " * 20, "utf-8")
    changes = ['data={use="data.text", files=["a.txt"], sequence=16, held_out=0.0, documents="cut"}']
    options = [option for change in changes for option in ("--set", change)]
    assert main(["data", "show", str(folder / "plan.toml"), "--format", "json", "--sample", "0", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["samples"], shown["trained"]) == (17, 259)
    assert bytes(shown["sample"]["tokens"]) == b"hello world, hel"


DATA = (
    'use="data.chat", files=["chats.jsonl"], tokenizer="tokenizer"',
    'use="data.text", files=["chats.jsonl"], tokenizer="tokenizer", separator="\\n"',
    'use="data.tokens", files=["tokens.bin"], vocab_size=65536',
    'use="data.mixture", sources=[{name="chats", use="data.chat", files=["chats.jsonl"], tokenizer="tokenizer", weight=1}]',
)
NO_TORCH = """
import sys
sys.modules["torch"] = None
from train_cli.main import main
plan, *changes = sys.argv[1:]
sys.exit(any([main(["data", "show", plan, "--sample", "0", "--set", change]) for change in changes]))
"""


@pytest.mark.timeout(60)
def test_data_show_needs_no_torch(folder: Path) -> None:
    """With an import of torch that fails, as where it is not installed."""
    (folder / "tokens.bin").write_bytes(b"tokens" * 100)
    changes = [f"data={{{data}, sequence=160}}" for data in DATA]
    command = [sys.executable, "-c", NO_TORCH, str(folder / "plan.toml"), *changes]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") >= len(DATA)
