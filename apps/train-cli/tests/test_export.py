"""transformers computes the logits of an exported run, and a factory's own module loads its weights."""

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import trained_runs
from safetensors.torch import load_file, save_file
from trained_runs import PLAN, TOKENS, transformers_model

from sley_core.weight_files.read import WeightFiles
from sley_testing.plans import Tables, changed
from sley_trainer.run import Run

SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_embeddings": True, "kv_heads": 4, "norm_eps": 1e-6},
    "llama3": {"rope_scaling": SCALING, "rope_theta": 500.0, "kv_heads": 1},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 8},
}
Trained = Callable[..., tuple[Path, torch.Tensor]]


@pytest.fixture
def trained(texts: Path, folder: Path) -> Trained:
    """`trained(tables, precision)` trains for two steps. It returns the run folder and the logits of `TOKENS` in fp32."""

    def train(tables: Tables, precision: Any = "working") -> tuple[Path, torch.Tensor]:
        def save(run: Run, to: Path) -> None:
            run.save_weights(to / "weights", precision=precision, max_file_bytes=8000)

        return folder / "run", trained_runs.train(tables, texts, folder / "run", save)

    return train


def first_file(run: Path) -> Path:
    return min((run / "weights").glob("*.safetensors"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_logits_of_the_run(cli: Any, trained: Trained, folder: Path, name: str) -> None:
    run, logits = trained(changed(PLAN, **{f"model__{key}": value for key, value in MODELS[name].items()}))
    cli("export", run, "--format", "huggingface", "--out", folder / "hf").expect(0)
    model = transformers_model(folder / "hf")
    assert model.config.model_type == {"tied": "llama", "llama3": "llama"}.get(name, name)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, logits, rtol=1e-5, atol=1e-5)
    assert model.config.max_position_embeddings == 16
    assert "lm_head.weight" not in WeightFiles(folder / "hf").names or not MODELS[name].get("tie_embeddings")


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", ["folder", "file"])
def test_the_tokenizer_is_exported(cli: Any, trained: Trained, folder: Path, source: str) -> None:
    import transformers

    tokenizers = pytest.importorskip("tokenizers")
    words = {"<end>": 0, "the": 1, "sley": 2, "beats": 3, "home": 4, "?": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    home = folder / "tokenizer"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(home)
    path = home if source == "folder" else home / "tokenizer.json"
    run, _ = trained(changed(PLAN, data__tokenizer=str(path), data__end_of_document="<end>"))
    assert cli("export", run, "--format", "huggingface", "--out", folder / "hf").code == 0
    config = json.loads((folder / "hf" / "config.json").read_text())
    assert (config["eos_token_id"], config["vocab_size"]) == (0, 6)
    assert (folder / "hf" / "tokenizer.json").read_bytes() == (home / "tokenizer.json").read_bytes()
    assert (folder / "hf" / "tokenizer_config.json").exists() == (source == "folder")
    if source == "folder":
        assert transformers.AutoTokenizer.from_pretrained(folder / "hf")("sley home").input_ids == [2, 4]


OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.register = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.register_buffer("passing", torch.ones(1), persistent=False)
    def forward(self, x):
        return x + self.up(x) * self.scale

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(256, 16)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(16, 256, bias=False)
        self.lm_head.weight = self.wte.weight

class First(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.table = net.wte
    def forward(self, tokens):
        return self.table(tokens)

def of_a_module(width=1):
    net = Net()
    return [First(net), *net.h, net.lm_head]

def of_none():
    net = Net()
    return [("in", First(net)), ("block", Block()), ("out", nn.Linear(16, 256))]
"""


@pytest.mark.parametrize("factory", ["of_a_module", "of_none"])
def test_an_own_module_loads_its_weights(
    cli: Any, trained: Trained, texts: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, factory: str
) -> None:
    (folder / "own_net.py").write_text(OWN, "utf-8")
    monkeypatch.syspath_prepend(folder)
    tables = changed(
        PLAN, model={"factory": f"own_net:{factory}"}, data__documents="cut", optimizer={"use": "core.sgd", "lr": 1e-2}
    )
    run, logits = trained(tables)
    result = cli("export", run, "--out", folder / "own").expect(0)
    cli("export", run, "--format", "huggingface", "--out", folder / "refused").expect(2, "error[export-format]")
    own_net = import_module("own_net")

    state = load_file(folder / "own" / "model.safetensors")
    if factory == "of_a_module":
        assert "names are the names in the state dict of `Net`" in result.err
        net = own_net.Net()
        net.load_state_dict(state, strict=True)
        layers: list[torch.nn.Module] = own_net.First(net), *net.h, net.lm_head  # type: ignore[assignment]
    else:
        layers = [module for _, module in own_net.of_none()]
        for name, module in zip(("in", "block", "out"), layers, strict=True):
            own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            module.load_state_dict(own, strict=True)
    output: Any = TOKENS
    with torch.no_grad():
        for layer in layers:
            output = layer(output)
    assert torch.equal(output, logits)
    values = load_file(first_file(run))
    save_file({f"{name}.old": value for name, value in values.items()}, run / "weights" / "model.safetensors")
    message = "error[weights-mismatch]: the factory no longer returns the run's model"
    cli("export", run, "--out", folder / "refused").expect(1, message)
    assert not (folder / "refused").exists()
    assert not list(folder.glob(".refused*"))


def test_failed_exports_leave_no_files(cli: Any, trained: Trained, folder: Path) -> None:
    run, _ = trained(changed(PLAN, model__qk_norm=True, model__qkv_bias=True))
    out = folder / "hf"
    message = "error[export-format]: transformers has no model with both"
    cli("export", run, "--format", "huggingface", "--out", out).expect(2, message)
    cli("export", run, "--format", "peft", "--merge", "--out", out).expect(2, "leaves no adapters for `--format peft`")
    assert "error[no-run]" in cli("export", folder, "--out", out).err
    assert "error[export-folder]" in cli("export", run, "--out", run).err
    file = first_file(run)
    file.write_bytes(file.read_bytes()[:-1])
    cli("export", run, "--out", out).expect(1, f"{file.name}`: it is damaged")
    assert not out.exists()
    shutil.rmtree(run / "weights")
    cli("export", run, "--out", out).expect(2, "error[no-weights]")


def test_a_run_that_cannot_save_its_weights_has_a_summary(
    cli: Any, plan: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Run.save_weights

    def save_beside_a_thesis(run: Run, to: Path, **options: Any) -> None:
        to.mkdir()
        (to / "thesis.tex").write_text("years of work")
        save(run, to, **options)

    monkeypatch.setattr(Run, "save_weights", save_beside_a_thesis)
    result = cli("run", plan, changes=["parallel.dp=1"]).expect(1, "`thesis.tex`, which is not a weight file")
    assert result.err.count("error[weights-unsaved]") == 1
    assert json.loads((folder / "runs" / "small" / "summary.json").read_text())["outcome"] == "finished"
    assert [path.name for path in (folder / "runs" / "small" / "weights").iterdir()] == ["thesis.tex"]
