"""Models that a factory reads by `from_pretrained` start at transformers' own loss in every layout; with LoRA too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import weights

transformers = pytest.importorskip("transformers")
MODELS = Path(__file__).parents[3] / "examples" / "models"
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
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
    {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}},
    {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}},
]

pytestmark = [pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"), pytest.mark.timeout(400)]


def config(kind: str) -> Any:
    """Of a tiny model; Qwen2's head is tied."""
    if kind == "gpt_neox":
        return transformers.GPTNeoXConfig(**SIZES)
    if kind == "qwen2":
        return transformers.Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.LlamaConfig(**SIZES, num_key_value_heads=2)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of three models, whose weights no initialisation would give."""
    folders = {}
    for kind in ("llama", "qwen2", "gpt_neox"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = transformers.AutoModelForCausalLM.from_config(config(kind))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        folders[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folders[kind])
    return folders


def starts(plans: list[dict[str, Any]], texts: Path) -> list[tuple[dict[str, torch.Tensor], list[float], int, list[str]]]:
    """Of each plan: first weights, the losses of two steps, and the parameters that are trained; in one process."""
    transformers.utils.logging.disable_progress_bar()
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, texts), world) as run:
            first = weights(run)
            losses = [float(run.step()["loss"]) for _ in range(2)]
            found.append((first, losses, len(run.registry), [param.name for param in run.registry.trainable]))
    return found


def tables(folder: Path, lora_rank: int, layout: dict[str, Any]) -> dict[str, Any]:
    options = {"path": str(folder), "lora_rank": lora_rank}
    return changed(PLAN, model={"factory": "hf_pretrained:layers", "options": options}, **layout)


def their_loss(folder: Path, texts: Path) -> float:
    """transformers' own, of the model that it reads itself, on the first batch of the plan."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with assemble(plan_from_dict(tables(folder, 0, {}), texts), World.alone("cpu")) as run:
        batch = run.feed.next() if run.feed else {}
    with torch.no_grad():
        found = model(input_ids=batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"])
    return float(found.loss)


def test_a_run_starts_at_transformers_loss_in_every_layout(
    ranks: Any, saved: dict[str, Path], texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(MODELS)
    cases = [(saved["llama"], 0), (saved["llama"], 4), (saved["qwen2"], 4), (saved["gpt_neox"], 0)]
    spread = [1]  # with adapters, on a base that is read
    plans = [tables(*cases[at], layout) for at in spread for layout in LAYOUTS]
    alone = starts([tables(folder, rank, {}) for folder, rank in cases], texts)
    layouts = ranks(2, timeout_s=110)(starts, plans, texts)
    for at, (folder, rank) in enumerate(cases):
        first, losses, _, trained = alone[at]
        assert losses[0] == pytest.approx(their_loss(folder, texts), rel=1e-6)
        assert losses[1] != losses[0]
        if rank:
            assert trained
            assert all(".lora_" in name for name in trained), "the base is frozen"
            assert not any(first[name].any() for name in trained if ".lora_B." in name), "adapters add nothing at first"
    for of_rank in layouts:
        for number, (theirs, their_losses, *_) in enumerate(of_rank):
            first, losses, *_ = alone[spread[number // len(LAYOUTS)]]
            assert their_losses[0] == pytest.approx(losses[0], rel=1e-6)
            assert their_losses[1] == pytest.approx(losses[1], rel=1e-5)
            assert all(torch.equal(value, first[name]) for name, value in theirs.items())
