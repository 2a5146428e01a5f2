"""`[model] weights`: a run starts at transformers' loss on the same batch in every layout, and `check` needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from first_losses import starts

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
}
PLAN = small_plan(
    data__sequence=16,
    data__documents="cut",
    batch={"global_size": 4, "micro_size": 1},
    optimizer={"use": "core.adamw", "lr": 1e-2},
    precision__compute="fp32",
)
LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {"dp": 2}},
    {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded"}]},
    {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}},
    {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}},
    {"parallel": {"wp": 2, "sp": 2}, "weights": {"use": "isp.communicator"}, "sequence": {"use": "isp.all_to_all"}},
]
EVERY = [(kind, at) for kind in CONFIGS for at in range(len(LAYOUTS))]
SAMPLE = [("llama", 0), ("qwen2", 1), ("qwen2", 2), ("llama", 3), ("qwen3", 4)]
"""Each model and each layout; the tied model where its two layers are on two stages, and where ranks own parts."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of three models in several files, whose weights no initialisation would give."""
    folders = {}
    for kind, config in CONFIGS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = transformers.AutoModelForCausalLM.from_config(config())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        folders[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folders[kind], max_shard_size="20KB")
    return folders


def tables(folder: Path, **changes: Any) -> dict[str, Any]:
    return changed(PLAN, model={"use": "models.llama", "weights": str(folder)}, **changes)


def their_loss(folder: Path, texts: Path) -> float:
    """transformers' own, of the model that it reads itself, on the first batch of the plan."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with assemble(plan_from_dict(tables(folder), texts), World.alone("cpu")) as run:
        batch = run.feed.next() if run.feed else {}
    with torch.no_grad():
        found = model(input_ids=batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"])
    return float(found.loss)


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(EVERY, marks=pytest.mark.campaign)], ids=["some", "all"])
def test_a_run_starts_at_transformers_loss_in_every_layout(
    ranks: Any, saved: dict[str, Path], texts: Path, cases: list[tuple[str, int]]
) -> None:
    plans = [tables(saved[kind], **LAYOUTS[at]) for kind, at in cases]
    alone = dict(zip(saved, starts([tables(folder) for folder in saved.values()], texts), strict=True))
    layouts = ranks(2, timeout_s=200)(starts, plans, texts)
    for kind, folder in saved.items():
        _, losses = alone[kind]
        assert losses[0] == pytest.approx(their_loss(folder, texts), rel=1e-6)
        assert losses[2] != losses[0]
    for of_rank in layouts:
        for case, (theirs, their_losses) in zip(cases, of_rank, strict=True):
            first, losses = alone[case[0]]
            assert their_losses[0] == pytest.approx(losses[0], rel=1e-6), case
            assert their_losses == pytest.approx(losses, rel=1e-5), case
            assert all(torch.equal(value, first[name]) for name, value in theirs.items())


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
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("head_dim = 8 "))
    assert line.endswith("base/config.json"), "where the value comes from"
    assert "qk_norm = true " in done.stdout
    wrong, _, missing = done.stderr.partition("hidden_size = 16")
    assert "`model.hidden`: 32 is not what the weights need" in wrong
    assert "config.json" in missing
