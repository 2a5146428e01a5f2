"""A run with `[adapters]`, averaged or not, is exported for peft and as a merged model, evaluated and sampled."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import trained_runs
from safetensors.torch import load_file, save_file
from trained_runs import PLAN, TOKENS

from sley_core.files import PLAN_FILE
from sley_testing.plans import Tables, changed
from sley_trainer.run import Run

if find_spec("peft") is None:
    pytest.skip("needs peft", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it

Trained = Callable[..., tuple[Path, torch.Tensor]]
CHANGES = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": None}
CASES: dict[str, tuple[str, str, Tables]] = {
    "llama": ("hf.decoder", "llama", {}),
    "models.llama, rsLoRA": ("models.llama", "llama", {"rslora": True, "targets": ["query", "blocks.1.*.down"]}),
    "gpt2, tied, DoRA": ("hf.decoder", "gpt2", {"dora": True}),
    "head and norms": ("hf.decoder", "llama", {"train": ["head.*", "blocks.*_layernorm.weight"]}),
    "embedding": ("hf.decoder", "llama", {"targets": ["embed_tokens", "q_proj"]}),
    "beside experts": ("hf.decoder", "mixtral", {}),
}


def save(run: Run, to: Path) -> None:
    run.save_weights(to / "weights")
    run.save_checkpoint(to / "saved" / "2")


@pytest.fixture
def trained(texts: Path, folder: Path) -> Trained:
    """`trained(use, family, adapters)` trains for two steps. It returns the run folder, with a checkpoint, and the logits."""

    def train(use: str, family: str, adapters: Tables) -> tuple[Path, torch.Tensor]:
        tables = changed(
            PLAN,
            model={"use": use, "weights": str(trained_runs.save_model(folder / "base", family, **CHANGES))},
            adapters={"use": "hf.lora", "rank": 4, "alpha": 8.0, **adapters},
            averaging={"use": "optim.ema", "decay": 0.5} if use == "hf.decoder" else None,
        )
        return folder / "run", trained_runs.train(tables, texts, folder / "run", save)

    return train


def succeed(cli: Any, *arguments: Any) -> str:
    return str(cli(*arguments).expect(0).out)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_peft_and_transformers_compute_the_logits_of_a_run(cli: Any, trained: Trained, folder: Path, case: str) -> None:
    run, expected = trained(*CASES[case])
    succeed(cli, "export", run, "--format", "peft", "--out", folder / "adapter")
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(base, str(folder / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size < 60_000
    for source, out in ((run, "merged"), (run / "saved" / "2", "from a checkpoint")):
        succeed(cli, "export", source, "--format", "huggingface", "--merge", "--out", folder / out)
        with torch.no_grad():
            logits = transformers.AutoModelForCausalLM.from_pretrained(folder / out)(TOKENS).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_run_with_a_changed_base_is_not_exported_and_without_a_base_is_evaluated_and_sampled(
    cli: Any, trained: Trained, folder: Path
) -> None:
    """Exports that do not fit the plan's `[adapters]` are refused."""
    run, _ = trained(*CASES["llama"])
    assert "export-adapters" in cli("export", run, "--format", "huggingface", "--out", folder / "hf").err
    file = folder / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.1
    save_file(tensors, file, {"format": "pt"})
    result = cli("export", run, "--format", "peft", "--out", folder / "adapter")
    assert all(text in result.err for text in ("export-differs", "up_proj"))
    assert not (folder / "adapter").exists()
    assert "adapters-base" in cli("export", run / "saved" / "2", "--format", "safetensors", "--out", folder / "whole").err
    shutil.rmtree(folder / "base")
    assert "held-out loss" in succeed(cli, "eval", run)
    assert succeed(cli, "sample", run, "--prompt", "the sley", "--tokens", "5")
    text = (run / PLAN_FILE).read_text("utf-8")
    before, _, after = text.partition("[adapters]")
    (run / PLAN_FILE).write_text(before + after[after.index("\n[") :], "utf-8")
    for options in (["--format", "peft"], ["--merge"]):
        assert "export-adapters" in cli("export", run, *options, "--out", folder / "hf").err
