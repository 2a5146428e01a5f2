"""A run's model goes on with a text as its logits say, and is evaluated as its run evaluates."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.data.dataset import DataInfo, Field
from sley_core.errors import UsageError
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.plans import Tables, changed, small_plan
from train_cli.commands.sample import generate

PLAN = small_plan(
    optimizer={"use": "core.adamw", "lr": 1e-2}, precision__compute="fp32", evaluation={"every": 10, "steps": 2}, run__steps=10
)
PROMPT = "the sley beats home and Größe"
SLICED = {"parallel": {"dp": 2, "pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}}
"""The layout in which a run says that it was trained: only its weights are looked at."""

Trained = Callable[..., Path]


@pytest.fixture
def trained(texts: Path, folder: Path) -> Iterator[Trained]:
    """`trained(tables)`: the folder of a run of three steps; `trained.run` is it. layout: tables of its plan."""
    runs = []

    def train(tables: Tables, kept: str = "weights", **layout: Any) -> Path:
        run = assemble(plan_from_dict(tables, texts), World.alone("cpu"))
        runs.append(run)
        for _ in range(3):
            run.step()
        to = folder / "run"
        to.mkdir()
        if kept == "weights":
            run.save_weights(to / "weights")
        elif kept == "checkpoint":
            run.save_checkpoint(to / "checkpoints" / "step-00000003")
        resolved = plan_from_dict(changed(tables, **layout), texts) if layout else run.resolved_plan
        (to / "plan.toml").write_text(resolved.to_toml(), "utf-8")
        train.run = run  # type: ignore[attr-defined]
        return to

    yield train
    for run in runs:
        run.close()


def likeliest(run: Run, ids: list[int], number: int, window: int) -> list[int]:
    """By hand: the whole window through the layers, for each token."""
    known = list(ids)
    for layer in run.layers:
        layer.module.eval()
    with torch.no_grad():
        for _ in range(number):
            output: Any = torch.tensor([known[-window:]])
            for layer in run.layers:
                output = layer.module(output)
            known.append(int(output[0, -1].argmax()))
    return known


def told(result: Any) -> str:
    assert result.code == 0, result.err
    return str(result.out)


def test_the_likeliest_text_is_that_of_the_logits(cli: Any, trained: Trained) -> None:
    run = trained(PLAN, **SLICED)
    expected = likeliest(trained.run, list(PROMPT.encode()), 30, 24)  # type: ignore[attr-defined]
    result = cli("sample", run, "--prompt", PROMPT, "--temperature", 0, "--tokens", 30)
    assert told(result) == bytes(expected).decode("utf-8", "replace") + "\n"


def test_a_seed_and_a_number_of_candidates_decide(cli: Any, trained: Trained) -> None:
    run = trained(PLAN)

    def text(*options: object) -> str:
        return told(cli("sample", run, "--prompt", "the", "--tokens", 20, *options))

    assert text() == text("--seed", 0) != text("--seed", 1)
    assert text("--top-k", 1, "--temperature", 5) == text("--temperature", 0)
    # Of one candidate in 256 at a temperature without preferences, one draw in 256 is the likeliest.
    assert text("--temperature", 1e6) != text("--temperature", 0)


def test_tokens_of_a_tokenizer_are_words_until_a_document_ends(cli: Any, trained: Trained, folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<end>": 0, "the": 1, "sley": 2, "beats": 3, "home": 4, "?": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tok.json"))
    run = trained(changed(PLAN, data__tokenizer=str(folder / "tok.json"), data__end_of_document="<end>"))
    expected = likeliest(trained.run, [1, 2], 12, 24)  # type: ignore[attr-defined]
    expected = expected[: expected.index(0)] if 0 in expected else expected
    text = told(cli("sample", run, "--prompt", "the sley", "--temperature", 0, "--tokens", 12))
    names = {number: word for word, number in words.items()}
    assert text.split() == [names[one] for one in expected]
    other = cli("sample", run, "--prompt", "the sley", "--tokens", 3, "--tokenizer", folder / "none.json")
    assert (other.code, "error[tokenizer-missing]" in other.err) == (3, True)


OWN = """
from torch import nn

class Embed(nn.Embedding):
    def forward(self, tokens{more}):
        return super().forward(tokens)

class Mean(nn.Linear):
    def forward(self, hidden):
        logits = super().forward(hidden.mean(1, keepdim=True)).expand(-1, hidden.shape[1], -1)
        return logits if self.training else logits[..., :{width}]

def layers():
    return [Embed(256, 16), Mean(16, 256)]
"""


@pytest.mark.parametrize(("more", "width", "said"), [("", 256, ""), (", labels", 256, "sample-fields"), ("", 1, "no-logits")])
def test_a_model_of_ones_own_is_sampled_if_it_gives_logits(
    cli: Any, trained: Trained, texts: Path, monkeypatch: pytest.MonkeyPatch, more: str, width: int, said: str
) -> None:
    (texts / "sampled.py").write_text(OWN.format(more=more, width=width), "utf-8")
    monkeypatch.syspath_prepend(texts)
    monkeypatch.delitem(sys.modules, "sampled", raising=False)
    result = cli("sample", trained(changed(PLAN, model={"factory": "sampled:layers"})), "--prompt", "the", "--tokens", 3)
    assert (result.code, f"error[{said}]" in result.err) == ((2, True) if said else (0, False)), result.err


@pytest.mark.parametrize(
    ("reads", "fields", "said"),
    [
        ("tokens", {}, '[data.fields] of `plan.toml` in the run\'s folder, for example `tokens = {dtype = "int64", '),
        ("input_ids", {"input_ids": Field("int64", 0, 1)}, "reads `input_ids`, but no field of the data is declared"),
        ("image", {"tokens": Field("int64", 0, 1, ids="token")}, "reads the field `image`, which a prompt does not have"),
    ],
)
def test_a_field_that_no_prompt_has_is_refused_with_what_to_do(reads: str, fields: dict[str, Field], said: str) -> None:
    layers = [SimpleNamespace(name="embed", fields=(reads,))]
    run: Any = SimpleNamespace(layers=layers, dataset=SimpleNamespace(info=DataInfo(fields)))
    with pytest.raises(UsageError, match=re.escape(said)):
        next(generate(run, [1], 9, temperature=0.0, top_k=None, generator=torch.Generator()))


def test_what_cannot_be_sampled_is_refused(cli: Any, trained: Trained, folder: Path) -> None:
    assert "error[no-run]" in cli("sample", folder, "--prompt", "x").err
    run = trained(PLAN, "nothing")
    assert "error[no-weights]" in cli("sample", run, "--prompt", "x").err
    assert "error[empty-prompt]" in cli("sample", run, "--prompt", "").err
    tokens = {"use": "data.tokens", "files": ["x.bin"], "vocab_size": 256, "sequence": 24}
    (run / "plan.toml").write_text(plan_from_dict(changed(PLAN, data=tokens), folder).to_toml(), "utf-8")
    assert "error[no-vocabulary]" in cli("sample", run, "--prompt", "x").err


@pytest.mark.parametrize("kept", ["weights", "checkpoint"])
def test_eval_is_the_runs_own_evaluation(cli: Any, trained: Trained, kept: str) -> None:
    run = trained(PLAN, kept)
    loss = trained.run.evaluate()  # type: ignore[attr-defined]
    text = told(cli("eval", run))
    assert f"held-out loss  {loss:.4f}  (2 batches of 8 samples)" in text
    assert f"bits per byte  {loss / math.log(2):.4f}" in text


def test_a_run_that_held_nothing_out_is_measured_on_other_data(cli: Any, trained: Trained, folder: Path) -> None:
    """Not by holding out now what it has trained on, as its plan would be told."""
    run = trained(changed(PLAN, data__held_out=0.0, evaluation=None))
    found = cli("eval", run)
    assert (found.code, "error[held-out]" in found.err) == (3, True), found.err
    assert "hint: use other data: `--data 'held_out_files=[\"other.txt\"]'`" in found.err


def test_eval_on_documents_that_were_trained_on_is_said(cli: Any, trained: Trained, texts: Path, folder: Path) -> None:
    run = trained(PLAN)
    documents = (texts / "text" / "a.txt").read_text("utf-8").split("\n\n")
    (folder / "copies.txt").write_text("\n\n".join([*documents, *["a new one of many letters " * 9] * 9]), "utf-8")
    own = cli("eval", run, "--data", 'files=["text/a.txt"]')
    assert "trained" not in own.err, "the split goes by content"
    copies = f'held_out_files=["{folder / "copies.txt"}"]'
    found = re.search(r"the run was trained on (\d+) of the 69 held-out documents", cli("eval", run, "--data", copies).err)
    assert found
    assert 40 < int(found[1]) < 60
    more = cli("eval", run, "--data", "held_out=0.5")
    assert "this is not a held-out loss" in more.err
    lines = cli("eval", run, "--data", copies, "--data", 'separator="\\n"')
    assert "it is not known whether it was trained on these" in lines.err


def test_eval_on_other_data(cli: Any, trained: Trained, folder: Path) -> None:
    """Of tiny data it is said that an evaluation goes through them again."""
    run = trained(PLAN)

    def evaluated(text: str) -> tuple[float, str]:
        (folder / "other.txt").write_text(text, "utf-8")
        result = cli("eval", run, "--data", f'held_out_files=["{folder / "other.txt"}"]')
        found = re.match(r"held-out loss  ([0-9.]+)", told(result))
        assert found
        return float(found[1]), result.err

    (odd, _), (same, said) = evaluated("zq" * 400), evaluated("the sley beats home " * 40)
    assert odd > same + 0.4
    assert "held out, but" not in said
    again = "only 5 samples are held out, but an evaluation needs 16, so each is used about 3.2 times"
    assert again in evaluated("the sley beats home " * 6)[1]
    assert "3 batches" in told(cli("eval", run, "--batches", 3))
    result = cli("eval", run, "--data", "held_out_file=1")
    assert (result.code, "error[unknown-key]" in result.err) == (3, True)
