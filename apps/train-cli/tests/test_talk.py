"""`sample` and `chat` print what transformers' `generate` makes of an export."""

from __future__ import annotations

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.attempt import PLAN
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan
from train_cli.commands import chat as chat_module
from train_cli.saved import copy_run_files

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<end>", "<user>", "<bot>", "the", "sley", "beats", "home", "warp", "weft", "?"]
TEMPLATE = "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }} {{ m.content }} <end>{% endfor %}<bot>"
PROMPTS = ["the sley", "home the warp beats"]


@pytest.fixture
def runs(texts: Path, folder: Path) -> dict[str, Path]:
    """Runs of `hf.decoder` and `models.llama` of two steps, with a tokenizer of words and a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:3])
    home = folder / "tokenizer"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)
    fast.save_pretrained(home)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 10}
    config = transformers.AutoConfig.for_model(
        "qwen2", **sizes, num_key_value_heads=2, initializer_range=0.3, eos_token_id=None
    )
    config.save_pretrained(folder / "config")
    models = {"hf.decoder": {"config": str(folder / "config")}, "models.llama": {"num_layers": 2, "hidden": 32, "heads": 4}}
    paths = {}
    for use, model in models.items():
        tables = small_plan(data__sequence=64, precision__compute="fp32", optimizer={"use": "core.sgd", "lr": 0.1})
        tables["data"] |= {"tokenizer": str(home), "end_of_document": "<end>"}
        plan = plan_from_dict({**tables, "model": {"use": use, **model}}, texts)
        paths[use] = folder / use
        paths[use].mkdir()
        copy_run_files(plan, paths[use])
        with assemble(plan, World.alone("cpu")) as run:
            run.step()
            run.save_weights(paths[use] / "weights")
            (paths[use] / PLAN).write_text(run.resolved_plan.to_toml(), "utf-8")
    return paths


def export(cli: Any, run: Path) -> Path:
    out = run.with_name(f"{run.name} export")
    result = cli("export", run, "--format", "huggingface", "--out", out)
    assert result.code == 0, result.err
    return out


def greedy(exported: Path, text: str, tokens: int, stop: int | None = 0) -> str:
    """The words that transformers' `generate` adds, without an end token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(exported)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, eos_token_id=stop)
    return " ".join(WORDS[i] for i in output[0, ids.shape[1] :].tolist() if i != stop)


@pytest.mark.parametrize("use", ["hf.decoder", "models.llama"])
def test_greedy_text_is_that_of_transformers_for_several_prompts(cli: Any, runs: dict[str, Path], use: str) -> None:
    exported = export(cli, runs[use])
    expected = [f"{prompt} {greedy(exported, prompt, 12)}".strip() for prompt in PROMPTS]
    for source in (runs[use], exported):
        options = ["--temperature", 0, "--tokens", 12]
        for prompt, text in zip(PROMPTS, expected, strict=True):
            result = cli("sample", source, "--prompt", prompt, *options)
            assert (result.code, result.out.split()) == (0, text.split()), result.err
        result = cli("sample", source, *(part for prompt in PROMPTS for part in ("--prompt", prompt)), *options)
        assert [line.split() for line in result.out.splitlines()] == [text.split() for text in expected], result.err


def test_an_end_token_of_the_model_ends_a_text(cli: Any, runs: dict[str, Path]) -> None:
    exported = export(cli, runs["hf.decoder"])
    words = greedy(exported, "the sley", 12, stop=None).split()
    end = words[-1]
    assert cli("sample", exported, "--prompt", "the sley", "--temperature", 0, "--tokens", 12).out.count(end) > 0
    (exported / "generation_config.json").write_text(json.dumps({"eos_token_id": [WORDS.index(end)]}))
    expected = words[: min(words.index(word) for word in {end, "<end>"} & set(words))]
    assert len(expected) < 12
    result = cli("sample", exported, "--prompt", "the sley", "--temperature", 0, "--tokens", 12)
    assert result.out.split() == ["the", "sley", *expected], result.err


def test_chat_keeps_the_conversation_until_a_reset(cli: Any, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export(cli, runs["hf.decoder"])
    conversations = []
    encode = chat_module._encode_recent

    def record(generator: Any, messages: list[dict[str, str]], num_first: int) -> list[int]:
        conversations.append([message["content"] for message in messages])
        return encode(generator, messages, num_first)

    monkeypatch.setattr(chat_module, "_encode_recent", record)
    monkeypatch.setattr("sys.stdin", io.StringIO("the sley\nhome\n\n/reset\nhome\n/quit\nwarp\n"))
    result = cli("chat", exported, "--temperature", 0, "--tokens", 5)
    assert result.code == 0, result.err
    first, second, third = (line.strip() for line in result.out.splitlines())
    assert first.split() == greedy(exported, "<user> the sley <end> <bot>", 5).split()
    assert conversations == [["the sley"], ["the sley", first, "home"], ["home"]]
    assert second.split() == greedy(exported, f"<user> the sley <end> <bot> {first} <end> <user> home <end> <bot>", 5).split()
    assert third.split() == greedy(exported, "<user> home <end> <bot>", 5).split()
    result = cli("sample", exported, "--chat", "--prompt", "home", "--temperature", 0, "--tokens", 5)
    assert result.out.split() == third.split()


def test_ctrl_c_stops_an_answer_and_not_the_chat(cli: Any, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export(cli, runs["models.llama"])
    from sley_hf.generate import Generator

    generate, answers = Generator.generate, []

    def interrupt(self: Any, *args: Any, **kwargs: Any) -> Any:
        answers.append(0)
        for step in generate(self, *args, **kwargs):
            if len(answers) == 1:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(Generator, "generate", interrupt)
    monkeypatch.setattr("sys.stdin", io.StringIO("home\nhome\n"))
    result = cli("chat", exported, "--temperature", 0, "--tokens", 3)
    assert (result.code, len(answers), len(result.out.splitlines())) == (0, 2, 2), result.err


TASK = """
task: next
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: brier_score}}]
"""


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval, of the extra sley-hf[eval]")
@pytest.mark.parametrize("use", ["hf.decoder", "models.llama"])
def test_tasks_of_lm_eval_have_the_numbers_of_the_export(
    cli: Any, runs: dict[str, Path], folder: Path, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = [{"text": text, "choices": [f" {word}" for word in WORDS[3:9]], "answer": 2} for text in (*PROMPTS, *WORDS[3:])]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "next.yaml").write_text(TASK.format(rows=folder / "rows.jsonl"), "utf-8")
    (runs[use] / "summary.json").write_text('{"outcome": "finished"}', "utf-8")
    exported = export(cli, runs[use])
    manager = TaskManager(include_path=tasks, include_defaults=False)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(exported)
    model = HFLM(pretrained=str(exported), tokenizer=tokenizer, device="cpu")
    results = lm_eval.simple_evaluate(model, tasks=["next"], task_manager=manager)["results"]["next"]
    expected = {f"next/{name}": results[name] for name in ("acc,none", "brier_score,none")}
    for source in (runs[use], exported):
        result = cli("eval", source, "--harness", "next", "--include", tasks)
        assert result.code == 0, result.err
        shown = dict(line.split() for line in result.out.splitlines() if line.startswith("next/acc"))
        assert shown == {"next/acc,none": f"{expected['next/acc,none']:.4f}"}
    summary = json.loads((runs[use] / "summary.json").read_text("utf-8"))
    assert summary == {"outcome": "finished", "harness": {"newest": pytest.approx(expected)}}
    result = cli("eval", exported, "--harness", "next,other", "--include", tasks)
    assert (result.code, "error[harness-task]" in result.err) == (2, True), result.err


def test_eval_names_what_the_harness_needs(cli: Any, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = cli("eval", runs["models.llama"], "--harness", "next")
    assert (result.code, 'pip install -e "packages/hf[eval]"' in result.err) == (4, True), result.err
    result = cli("eval", runs["models.llama"], "--harness", "next", "--batches", 1)
    assert (result.code, "tasks of lm-eval have their own data" in result.err) == (2, True), result.err


def test_models_that_transformers_lacks_and_missing_packages_are_named(
    cli: Any, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_module, "find_spec", lambda name: None)
    result = cli("chat", runs["models.llama"])
    assert result.code == 4
    assert "error[command-missing]: `train-cli chat` needs sley-hf" in result.err
