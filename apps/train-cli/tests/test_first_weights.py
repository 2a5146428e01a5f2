"""Runs start with the weights of transformers in every layout, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import layout_of, starts

from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import running

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
SEED, VOCAB = 11, 260
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
}
PLAN = small_plan(
    run__seed=SEED,
    data__sequence=16,
    data__documents="cut",
    batch={"global_size": 4, "micro_size": 1},
    optimizer={"use": "core.adamw", "lr": 1e-2},
    precision__compute="fp32",
)
pytestmark = [pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"), pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with models in several files, with random weights."""
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("saved")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for kind, config in CONFIGS.items():
            model = transformers.AutoModelForCausalLM.from_config(config())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            model.save_pretrained(folder / kind, max_shard_size="20KB")
    return {kind: folder / kind for kind in CONFIGS}


def from_files(folder: Path) -> Tables:
    return {"use": "models.llama", "weights": str(folder)}


def from_factory(folder: Path, lora_rank: int = 0) -> Tables:
    return {"factory": "pretrained_model:layers", "options": {"path": str(folder), "lora_rank": lora_rank}}


def transformers_loss(folder: Path, plan: Tables, texts: Path) -> float:
    """Returns the loss of transformers' model on the first batch of the plan."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with running(plan, texts) as run:
        batch = run.feed.next() if run.feed else {}
    with torch.no_grad():
        return float(model(input_ids=batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"]).loss)


def test_the_first_loss_is_that_of_transformers_in_every_layout(ranks: Any, saved: dict[str, Path], texts: Path) -> None:
    """The weights come from files or a factory, which may add adapters. Layouts have the weights and losses of one process."""
    models = {
        "llama": (saved["llama"], from_files(saved["llama"]), ["dp2 sharded"]),
        "qwen2, tied": (saved["qwen2"], from_files(saved["qwen2"]), ["pp2"]),
        "qwen3": (saved["qwen3"], from_files(saved["qwen3"]), ["wp2 sp2"]),
        "adapters": (saved["llama"], from_factory(saved["llama"], 4), ["wp2"]),
        "gpt_neox": (saved["gpt_neox"], from_factory(saved["gpt_neox"]), []),
    }
    plans = {name: changed(PLAN, model=model) for name, (_, model, _) in models.items()}
    one_process = dict(zip(plans, starts([*plans.values()], texts), strict=True))
    for name, (folder, _, _) in models.items():
        first, losses, trained = one_process[name]
        assert losses[0] == pytest.approx(transformers_loss(folder, plans[name], texts), rel=1e-6)
        assert losses[2] != losses[0]
        if name.startswith("adapters"):
            assert trained
            assert all(".lora_" in parameter for parameter in trained), "the base is frozen"
            assert not any(first[key].any() for key in trained if ".lora_B." in key), "adapters add nothing at first"
    cases = [(name, layout) for name, (_, _, layouts) in models.items() for layout in layouts]
    by_rank = ranks(2, timeout_s=200)(starts, [layout_of(layout, plans[name]) for name, layout in cases], texts)
    for rank in by_rank:
        for case, (first, losses, _) in zip(cases, rank, strict=True):
            expected, expected_losses, _ = one_process[case[0]]
            assert losses[0] == pytest.approx(expected_losses[0], rel=1e-6), case
            assert losses == pytest.approx(expected_losses, rel=1e-5), case
            assert all(torch.equal(value, expected[name]) for name, value in first.items())


def test_check_and_show_read_the_sizes_without_torch(saved: dict[str, Path], folder: Path) -> None:
    plan = folder / "plan.toml"
    text = '[run]\nname = "w"\nsteps = 1\n[model]\nuse = "models.llama"\nweights = "base"\n'
    text += '[data]\nuse = "data.text"\nfiles = ["corpus.txt"]\nsequence = 16\n'
    plan.write_text(text + '[batch]\nglobal_size = 1\nmicro_size = 1\n[optimizer]\nuse = "core.adamw"\nlr = 1e-3\n')
    (folder / "base").symlink_to(saved["qwen3"])
    commands = [["show"], ["check"], ["check", "--set", "model.hidden=32"], ["check", "--set", 'model.weights="."']]
    program = f"""
import sys
from train_cli.main import main
codes = [main([*command, "plan.toml"]) for command in {commands}]
sys.exit(f"codes {{codes}}, torch: {{'torch' in sys.modules}}")
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.stderr.endswith("codes [0, 0, 3, 3], torch: False\n"), done.stderr
    assert "head_dim = 8 " in done.stdout
