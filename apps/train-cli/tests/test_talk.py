"""`sample`, `chat` and `eval --harness` have the results of transformers and lm-eval for an export of the run."""

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import trained_runs

from sley_testing.plans import small_plan
from train_cli.commands import sample
from train_cli.main import main

WORDS = ["<end>", "<user>", "<bot>", "the", "sley", "beats", "home", "warp", "weft", "?"]
TEMPLATE = "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }} {{ m.content }} <end>{% endfor %}<bot>"
PROMPTS = ["the sley", "home the warp beats"]
USES = ["hf.decoder", "models.llama"]
CORPUS = "\n\n".join(" ".join(WORDS[3 + (index * step) % 6] for index in range(40)) for step in range(1, 30))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The run folder and the export of a run of each model, with a word tokenizer and a chat template."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("talk")
    (folder / "corpus.txt").write_text(CORPUS, "utf-8")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:3])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)
    fast.save_pretrained(folder / "tokenizer")
    sizes = trained_runs.SIZES | {"vocab_size": 10, "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None}
    transformers.AutoConfig.for_model("qwen2", **sizes).save_pretrained(folder / "config")
    tables_of = {"hf.decoder": {"config": str(folder / "config")}, "models.llama": {"num_layers": 2, "hidden": 32, "heads": 4}}
    paths = {}
    for use, model in tables_of.items():
        tables = small_plan(data__sequence=64, precision__compute="fp32", optimizer={"use": "core.sgd", "lr": 0.1})
        tables["data"] |= {"files": ["corpus.txt"], "tokenizer": str(folder / "tokenizer"), "end_of_document": "<end>"}
        run_folder, export = folder / use, folder / f"{use} export"
        tables["model"] = {"use": use, **model}
        trained_runs.train(tables, folder, run_folder, lambda run, to: run.save_weights(to / "weights"))
        assert main(["export", str(run_folder), "--format", "huggingface", "--out", str(export)]) == 0
        paths[use] = (run_folder, export)
    return paths


def greedy(export: Path, text: str, tokens: int, stop: int | None = 0) -> list[str]:
    """Returns the words that transformers' `generate` adds, without an end token."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype="auto")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(export)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, eos_token_id=stop)
    return [WORDS[i] for i in output[0, ids.shape[1] :].tolist() if i != stop]


@pytest.mark.parametrize("use", USES)
def test_greedy_texts_equal_those_of_transformers(cli: Any, runs: dict[str, tuple[Path, Path]], use: str) -> None:
    _, export = runs[use]
    expected = [[*prompt.split(), *greedy(export, prompt, 12)] for prompt in PROMPTS]
    options = ["--temperature", 0, "--tokens", 12]
    for source in runs[use]:
        result = cli("sample", source, "--prompt", PROMPTS[0], *options)
        assert (result.code, result.out.split()) == (0, expected[0]), result.err
        result = cli("sample", source, *(part for prompt in PROMPTS for part in ("--prompt", prompt)), *options)
        assert [line.split() for line in result.out.splitlines()] == expected, result.err


def test_an_end_token_of_the_model_ends_a_text(cli: Any, runs: dict[str, tuple[Path, Path]]) -> None:
    _, export = runs["hf.decoder"]
    words = greedy(export, "the sley", 12, stop=None)
    end = words[-1]
    config = export / "generation_config.json"
    text = config.read_text("utf-8")
    config.write_text(json.dumps({"eos_token_id": [WORDS.index(end)]}))
    result = cli("sample", export, "--prompt", "the sley", "--temperature", 0, "--tokens", 12)
    config.write_text(text, "utf-8")
    expected = words[: min(words.index(word) for word in {end, "<end>"} & set(words))]
    assert len(expected) < 12
    assert result.out.split() == ["the", "sley", *expected], result.err


def test_chat_remembers_the_conversation_until_a_reset(
    cli: Any, runs: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, export = runs["hf.decoder"]
    conversations = []
    encode = sample._encode_messages

    def record(generator: Any, messages: list[dict[str, str]], num_system: int) -> list[int]:
        conversations.append([message["content"] for message in messages])
        return encode(generator, messages, num_system)

    monkeypatch.setattr(sample, "_encode_messages", record)
    monkeypatch.setattr("sys.stdin", io.StringIO("the sley\nhome\n\n/reset\nhome\n/quit\nwarp\n"))
    result = cli("chat", export, "--temperature", 0, "--tokens", 5).expect(0)
    first, second, third = (line.strip() for line in result.out.splitlines())
    assert first.split() == greedy(export, "<user> the sley <end> <bot>", 5)
    assert conversations == [["the sley"], ["the sley", first, "home"], ["home"]]
    assert second.split() == greedy(export, f"<user> the sley <end> <bot> {first} <end> <user> home <end> <bot>", 5)
    assert third.split() == greedy(export, "<user> home <end> <bot>", 5)
    result = cli("sample", export, "--chat", "--prompt", "home", "--temperature", 0, "--tokens", 5)
    assert result.out.split() == third.split()


def test_ctrl_c_stops_only_the_answer(cli: Any, runs: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    from sley_hf.generate import Generator

    generate, calls = Generator.generate, []

    def interrupt_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        for step in generate(self, *args, **kwargs):
            if len(calls) == 1:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(Generator, "generate", interrupt_first)
    monkeypatch.setattr("sys.stdin", io.StringIO("home\nhome\n"))
    result = cli("chat", runs["models.llama"][1], "--temperature", 0, "--tokens", 3)
    assert (result.code, len(calls), len(result.out.splitlines())) == (0, 2, 2), result.err


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


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval, from the sley-hf[eval] extra")
@pytest.mark.parametrize("use", USES)
def test_tasks_of_lm_eval_have_the_numbers_of_the_export(
    cli: Any, runs: dict[str, tuple[Path, Path]], folder: Path, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast

    rows = [{"text": text, "choices": [f" {word}" for word in WORDS[3:9]], "answer": 2} for text in (*PROMPTS, *WORDS[3:])]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "next.yaml").write_text(TASK.format(rows=folder / "rows.jsonl"), "utf-8")
    run_folder, export = runs[use]
    (run_folder / "summary.json").write_text('{"outcome": "finished"}', "utf-8")
    manager = TaskManager(include_path=tasks, include_defaults=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(export)
    model = HFLM(pretrained=str(export), tokenizer=tokenizer, device="cpu")
    results = lm_eval.simple_evaluate(model, tasks=["next"], task_manager=manager)["results"]["next"]
    expected = {f"next/{name}": results[name] for name in ("acc,none", "brier_score,none")}
    for source in (run_folder, export):
        result = cli("eval", source, "--harness", "next", "--include", tasks).expect(0)
        printed = dict(line.split() for line in result.out.splitlines() if line.startswith("next/acc"))
        assert printed == {"next/acc,none": f"{expected['next/acc,none']:.4f}"}
    summary = json.loads((run_folder / "summary.json").read_text("utf-8"))
    assert summary == {"outcome": "finished", "harness": {"newest": pytest.approx(expected)}}
    cli("eval", export, "--harness", "next,other", "--include", tasks).expect(2, "error[harness-task]")


def test_errors_name_a_missing_package(cli: Any, runs: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder, _ = runs["models.llama"]
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    cli("eval", run_folder, "--harness", "next").expect(4, 'pip install -e "packages/hf[eval]"')
    cli("eval", run_folder, "--harness", "next", "--data", "x=1").expect(2, "tasks of lm-eval have their own data")
    monkeypatch.setattr("train_cli.main.find_spec", lambda name: None)
    cli("chat", run_folder).expect(4, "error[command-missing]: `train-cli chat` needs sley-hf")
