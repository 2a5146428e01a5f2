"""`data show`, `data prepare` and `data export`; and a run folder keeps the plan's chat template."""

import json
import shutil
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_folder import TEMPLATE, write_chats
from started_program import Cli

from sley_core.checkpointing import load_plan_and_weights
from sley_core.data.batches import open_dataset
from sley_core.data.dataset import DataContext
from sley_core.files import PLAN_FILE
from sley_core.plan.load import load_plan
from sley_core.run_folder import create_attempt, write_attempt
from sley_data.chat_template import ChatTemplate, load_text_ids
from train_cli.saved_run import copy_run_files, load_run_plan

CHAT = "name='chats', use='data.chat', files=['chats.jsonl'], tokenizer='tokenizer'"
MIXTURE = (
    "data={use='data.mixture', sequence=160, sources=[{name='texts', use='data.text', files=['words.txt'], "
    f"separator='\\n\\n', tokenizer='tokenizer', held_out=0.0, weight=1}}, {{{CHAT}, held_out=0.1, weight=2}}]}}"
)
WORDS = 'data={use="data.text", files=["words.txt"], sequence=16, separator="\\n\\n", held_out=0.2, documents="cut"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations, a byte tokenizer, texts, and a plan."""
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder)
    (folder / "words.txt").write_text("\n\n".join(f"word {number} of many" for number in range(90)), "utf-8")
    return folder


def show(folder: Path, cli: Cli, *options: str) -> Any:
    """Returns the JSON output of `data show`."""
    return json.loads(cli("data", "show", folder / "plan.toml", "--format", "json", *options).expect(0).out)


def test_show_prints_samples_and_counts(folder: Path, cli: Cli) -> None:
    output = show(folder, cli, "--sample", "1")
    assert output["documents"] + show(folder, cli, "--split", "held_out")["documents"] == 120
    assert output["trained"] < output["tokens"]
    assert output["packing"] == 1 - output["padding"] / (160 * output["samples"])
    assert output["dropped"] == {}
    assert {name: len(output["sample"][name]) for name in ("tokens", "labels")} == {"tokens": 160, "labels": 160}
    path = folder / "plan.toml"
    text = cli("data", "show", path, "--sample", "1").expect(0).out
    answers = [part.partition("]\n")[0] for part in text.split("<|im_start|>assistant\n[")[1:]]
    assert answers
    assert all(answer.endswith("<|im_end|>") for answer in answers)
    assert "-- positions 0 to" in text
    assert cli("data", "show", path, "--sample", "99999").code == 2
    assert cli("data", "show", path, "--split", "test").code == 2


def test_show_counts_each_source(folder: Path, cli: Cli) -> None:
    output = show(folder, cli, "--sample", "0", "--set", MIXTURE)
    texts, chats = (output["sources"][name] for name in ("texts", "chats"))
    assert texts["samples"] + chats["samples"] == output["samples"]
    assert texts["samples"] == pytest.approx(output["samples"] / 3, abs=1)
    assert texts["tokens"] == 160 * texts["samples"]
    assert chats["trained"] / chats["tokens"] < 0.6 < texts["trained"] / texts["tokens"]
    assert output["trained"] == texts["trained"] + chats["trained"]
    dataset: Any = open_dataset(load_plan(folder / "plan.toml", [MIXTURE]).data, DataContext())
    assert output["samples"] == len(dataset)
    assert output["sample"] == {name: value.reshape(-1).tolist() for name, value in dataset[0].items()}
    sets = "evaluation={every=1, sets={fresh={use='data.text', files=['words.txt'], sequence=16}}}"
    assert show(folder, cli, "--set", sets, "--split", "fresh")["split"] == "fresh"
    held_out = cli("data", "show", folder / "plan.toml", "--set", MIXTURE, "--split", "held_out").expect(0)
    assert "  chats: " in held_out.out


@pytest.mark.parametrize(
    "change",
    [
        "data.template='own.jinja'",
        f"data={{use='data.mixture', sequence=160, sources=[{{{CHAT}, template='own.jinja', weight=1}}]}}",
    ],
)
def test_a_run_folder_keeps_the_template(folder: Path, tmp_path: Path, change: str) -> None:
    """When the file is gone, a turn still ends with the end of the plan's template, not of the tokenizer's."""
    template = folder / "own.jinja"
    template.write_text(TEMPLATE.replace("<|im_end|>", "<|im_start|>"), "utf-8")
    resolved = load_plan(folder / "plan.toml", [change])
    (tmp_path / PLAN_FILE).write_text(resolved.to_toml(), "utf-8")
    copy_run_files(resolved, tmp_path)
    template.unlink()
    for place in ("template.jinja", "tokenizer/chat_template.jinja"):  # the second is the place in version 0.1.0
        (tmp_path / "template.jinja").rename(tmp_path / place)
        config: Any = load_run_plan(tmp_path).data.config
        ids = load_text_ids(config.sources[0].component.config if "mixture" in change else config, None)
        assert "".join(ids.decode([ids.end])) == "<|im_start|>"


def test_each_source_of_a_run_folder_keeps_its_files(folder: Path, tmp_path: Path) -> None:
    """A run has copies only of the first source's files, which must not replace files of others, or of a change to the data."""
    shutil.copytree(folder / "tokenizer", folder / "second")
    for name in ("second/chat_template.jinja", "own.jinja", "new.jinja"):
        (folder / name).write_text(f"{{# {name} #}}{TEMPLATE}", "utf-8")
    files = [("tokenizer", ""), ("second", ""), ("tokenizer", "own.jinja"), ("second", "new.jinja")]

    def read_templates(config: Any) -> list[Any]:
        configs = [source.component.config for source in config.sources]
        return [ChatTemplate(each.tokenizer, each.template).tokenizer.chat_template for each in configs]

    for number, pair in enumerate(permutations(files, 2)):
        sources = [
            f"{{name='{tokenizer}{template}', use='data.chat', files=['chats.jsonl'], tokenizer='{tokenizer}', weight=1"
            + (f", template='{template}'}}" if template else "}")
            for tokenizer, template in pair
        ]
        resolved = load_plan(
            folder / "plan.toml", [f"data={{use='data.mixture', sequence=160, sources=[{', '.join(sources)}]}}"]
        )
        run = tmp_path / str(number)
        run.mkdir()
        (run / PLAN_FILE).write_text(resolved.to_toml(), "utf-8")
        copy_run_files(resolved, run)
        config: Any = load_run_plan(run).data.config
        assert read_templates(config) == read_templates(resolved.data.config), pair
        assert config.tokenizer == run / "tokenizer"
        changed: Any = load_run_plan(run, [f"sources.{index}.template='new.jinja'" for index in (0, 1)]).data.config
        assert all("new.jinja" in template for template in read_templates(changed)), pair
        for attempt, is_of_run in [(None, False), (create_attempt(), False), (create_attempt(), True)]:
            if attempt is not None:
                write_attempt(run, attempt)
            lineage = attempt.lineage if attempt is not None and is_of_run else create_attempt().lineage
            description = SimpleNamespace(plan=resolved.to_toml(), lineage=lineage, values={})
            saved: Any = SimpleNamespace(place=str(run / "checkpoints" / "step-1"), names=(), description=description)
            of_checkpoint: Any = load_plan_and_weights(saved)[0].data.config
            assert of_checkpoint.tokenizer == (run / "tokenizer" if is_of_run else folder / pair[0][0])


def test_prepare_reads_both_splits(folder: Path, cli: Cli) -> None:
    changes = ("evaluation={every=1}", "data.too_long='drop'", "data.sequence=60")
    prepared = cli("data", "prepare", folder / "plan.toml", changes=changes)
    prepared.expect(0, "train: ", "held_out: ", "samples are dropped")


def test_export_writes_files_for_data_tokens(folder: Path, cli: Cli, tmp_path: Path) -> None:
    path, out = folder / "plan.toml", tmp_path / "out"
    cli("data", "export", path, "--out", out, "--set", WORDS).expect(0, "vocab_size = 256")
    files = f'files=["{out}/train.bin"], held_out_files=["{out}/val.bin"]'
    tokens = f'data={{use="data.tokens", {files}, vocab_size=256, sequence=16}}'
    for split in ("train", "held_out"):
        expected, actual = (show(folder, cli, "--split", split, "--sample", "1", "--set", data) for data in (WORDS, tokens))
        assert expected["sample"] == actual["sample"]
        assert expected["samples"] == actual["samples"]
    assert cli("data", "export", path, "--out", out).code == 2, "chats have no stream"
