"""`sample` generates text by the logits of a run's model, and `eval` is the evaluation of the run."""

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sley_core.comm.world import World
from sley_core.data.dataset import DataInfo, Field
from sley_core.errors import UsageError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import Tables, changed, small_plan
from sley_trainer.assemble import assemble
from sley_trainer.run import Run
from train_cli.commands.sample import generate

PLAN = small_plan(
    optimizer={"use": "core.adamw", "lr": 1e-2}, precision__compute="fp32", evaluation={"every": 10, "steps": 2}, run__steps=10
)
PROMPT = "the sley beats home and Größe"
PARALLEL = {"parallel": {"dp": 2, "pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}}
"""The layout in the plan of a run, of which only the weights are used."""

Trained = Callable[..., Path]


@pytest.fixture
def trained(texts: Path, folder: Path) -> Iterator[Trained]:
    """`trained(tables)` trains for two steps and returns the run folder; `trained.run` is the run."""

    def train(tables: Tables, saved: str = "weights", **layout: Any) -> Path:
        run = stack.enter_context(assemble(plan_from_dict(tables, texts), World.alone("cpu")))
        for _ in range(2):
            run.step()
        to = folder / "run"
        to.mkdir()
        if saved == "weights":
            run.save_weights(to / "weights")
        elif saved == "checkpoint":
            run.save_checkpoint(to / "checkpoints" / "step-00000002")
        resolved = plan_from_dict(changed(tables, **layout), texts) if layout else run.resolved_plan
        (to / "plan.toml").write_text(resolved.to_toml(), "utf-8")
        train.run = run  # type: ignore[attr-defined]
        return to

    with ExitStack() as stack:
        yield train


def greedy_ids(run: Run, ids: list[int], number: int, window: int) -> list[int]:
    """Returns `ids` and the most likely next ones, computed from the full window for each token."""
    sequence = list(ids)
    for layer in run.layers:
        layer.module.eval()
    with torch.no_grad():
        for _ in range(number):
            output: Any = torch.tensor([sequence[-window:]])
            for layer in run.layers:
                output = layer.module(output)
            sequence.append(int(output[0, -1].argmax()))
    return sequence


@pytest.mark.parametrize("saved", ["weights", "checkpoint"])
def test_texts_follow_the_logits_and_eval_the_evaluation_of_the_run(cli: Any, trained: Trained, saved: str) -> None:
    run = trained(PLAN, saved, **PARALLEL)
    expected = greedy_ids(trained.run, list(PROMPT.encode()), 30, 24)  # type: ignore[attr-defined]
    result = cli("sample", run, "--prompt", PROMPT, "--temperature", 0, "--tokens", 30)
    assert result.expect(0).out == bytes(expected).decode("utf-8", "replace") + "\n"
    loss = trained.run.evaluate()  # type: ignore[attr-defined]
    shown = cli("eval", run).expect(0).out
    assert f"held-out loss  {loss:.4f}  (2 batches of 8 samples)" in shown
    assert f"bits per byte  {loss / math.log(2):.4f}" in shown


def test_seed_temperature_and_top_k(cli: Any, trained: Trained) -> None:
    run = trained(PLAN)

    def text(*options: object) -> str:
        return str(cli("sample", run, "--prompt", "the", "--tokens", 5, *options).expect(0).out)

    assert text() == text("--seed", 0) != text("--seed", 1)
    assert text("--top-k", 1, "--temperature", 5) == text("--temperature", 0)
    assert text("--temperature", 1e6) != text("--temperature", 0)


OWN = """
from torch import nn

class Embed(nn.Embedding):
    def forward(self, tokens{fields}):
        return super().forward(tokens)

class Mean(nn.Linear):
    def forward(self, hidden):
        logits = super().forward(hidden.mean(1, keepdim=True)).expand(-1, hidden.shape[1], -1)
        return logits if self.training else logits[..., :{width}]

def layers():
    return [Embed(256, 16), Mean(16, 256)]
"""


@pytest.mark.parametrize(("fields", "width", "code"), [("", 256, ""), (", labels", 256, "sample-fields"), ("", 1, "no-logits")])
def test_an_own_model_must_return_logits(
    cli: Any, trained: Trained, texts: Path, monkeypatch: pytest.MonkeyPatch, fields: str, width: int, code: str
) -> None:
    (texts / "sampled.py").write_text(OWN.format(fields=fields, width=width), "utf-8")
    monkeypatch.syspath_prepend(texts)
    monkeypatch.delitem(sys.modules, "sampled", raising=False)
    result = cli("sample", trained(changed(PLAN, model={"factory": "sampled:layers"})), "--prompt", "the", "--tokens", 3)
    assert (result.code, f"error[{code}]" in result.err) == ((2, True) if code else (0, False)), result.err


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("tokens", {}, '[data.fields] of `plan.toml` in the run\'s folder, for example `tokens = {dtype = "int64", '),
        ("input_ids", {"input_ids": Field("int64", 0, 1)}, "reads the field `input_ids`, which a prompt does not have"),
        ("image", {"tokens": Field("int64", 0, 1, ids="token")}, "reads the field `image`, which a prompt does not have"),
    ],
)
def test_a_field_that_a_prompt_lacks_is_refused(name: str, fields: dict[str, Field], message: str) -> None:
    layers = [SimpleNamespace(name="embed", fields=(name,))]
    run: Any = SimpleNamespace(layers=layers, dataset=SimpleNamespace(info=DataInfo(fields)))
    with pytest.raises(UsageError, match=re.escape(message)):
        next(generate(run, [1], 9, temperature=0.0, top_k=None, seed=0))


def test_runs_without_weights_prompts_or_vocabulary_are_refused(cli: Any, trained: Trained, folder: Path) -> None:
    assert "error[no-run]" in cli("sample", folder, "--prompt", "x").err
    assert "error[no-run]" in cli("eval", folder).err
    run = trained(PLAN, "nothing")
    assert "error[no-weights]" in cli("sample", run, "--prompt", "x").err
    assert "has written no best checkpoint" in cli("sample", run, "--prompt", "x", "--best").err
    assert "error[empty-prompt]" in cli("sample", run, "--prompt", "").err
    tokens = {"use": "data.tokens", "files": ["x.bin"], "vocab_size": 256, "sequence": 24}
    (run / "plan.toml").write_text(plan_from_dict(changed(PLAN, data=tokens), folder).to_toml(), "utf-8")
    assert "error[no-vocabulary]" in cli("sample", run, "--prompt", "x").err


def test_a_run_without_held_out_data_needs_other_data(cli: Any, trained: Trained, folder: Path) -> None:
    run = trained(changed(PLAN, data__held_out=0.0, evaluation=None))
    cli("eval", run).expect(3, "error[held-out]", "hint: use other data: `--data 'held_out_files=[\"other.txt\"]'`")


def test_eval_on_other_data_notes_documents_of_the_training_data(cli: Any, trained: Trained, texts: Path, folder: Path) -> None:
    run = trained(PLAN)
    documents = (texts / "text" / "a.txt").read_text("utf-8").split("\n\n")
    (folder / "copies.txt").write_text("\n\n".join([*documents, *["a new one of many letters " * 9] * 9]), "utf-8")
    own = cli("eval", run, "--data", 'files=["text/a.txt"]')
    assert "trained" not in own.err, "the split depends on content"
    copies = f'held_out_files=["{folder / "copies.txt"}"]'
    match = re.search(r"the run was trained on (\d+) of the 69 held-out documents", cli("eval", run, "--data", copies).err)
    assert match
    assert 40 < int(match[1]) < 60
    assert "this is not a held-out loss" in cli("eval", run, "--data", "held_out=0.5").err
    lines = cli("eval", run, "--data", copies, "--data", 'separator="\\n"')
    assert "it is not known whether it was trained on the held-out text" in lines.err

    def evaluated(text: str) -> tuple[float, str]:
        (folder / "other.txt").write_text(text, "utf-8")
        result = cli("eval", run, "--data", f'held_out_files=["{folder / "other.txt"}"]')
        match = re.match(r"held-out loss  ([0-9.]+)", result.expect(0).out)
        assert match
        return float(match[1]), result.err

    (other_loss, _), (loss, notes) = evaluated("zq" * 400), evaluated("the sley beats home " * 40)
    assert other_loss > loss + 0.4
    assert "held out, but" not in notes
    note = "only 5 samples are held out, but an evaluation needs 16, so each is used about 3.2 times"
    assert note in evaluated("the sley beats home " * 6)[1]
    cli("eval", run, "--data", "held_out_file=1").expect(3, "error[unknown-key]")
