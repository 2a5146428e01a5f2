"""Models of transformers, read from their files in a factory, start at transformers' own loss in every layout; so with LoRA."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.testing.runs import weights

transformers = pytest.importorskip("transformers")
MODELS = Path(__file__).parents[3] / "examples" / "models"
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PLAN: dict[str, Any] = {
    "run": {"name": "given", "steps": 3, "device": "cpu", "seed": 5},
    "data": {"use": "core.text", "source": "python-stdlib", "sequence": 16, "documents": "cut"},
    "batch": {"global_size": 4, "micro_size": 1},
    "optimizer": {"use": "core.adamw", "lr": 1e-2},
}
LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {"dp": 2}},
    {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}},
    {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}},
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.timeout(400),
]


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


def starts(plans: list[dict[str, Any]]) -> list[tuple[dict[str, torch.Tensor], list[float], int, list[str]]]:
    """Of each plan: first weights, the losses of two steps, and the parameters that are trained; in one process."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, MODELS), world) as run:
            first = weights(run)
            losses = [float(run.step()["loss"]) for _ in range(2)]
            found.append((first, losses, len(run.book), [entry.name for entry in run.book.trainable]))
    return found


def tables(folder: Path, lora_rank: int, layout: dict[str, Any]) -> dict[str, Any]:
    options = {"path": str(folder), "lora_rank": lora_rank}
    return PLAN | layout | {"model": {"factory": "hf_pretrained:layers", "options": options}}


def their_loss(folder: Path) -> float:
    """transformers' own, of the model that it reads itself, on the first batch of the plan."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with assemble(plan_from_dict(tables(folder, 0, {}), MODELS), World.alone("cpu")) as run:
        batch = run.feed.next() if run.feed else {}
    with torch.no_grad():
        found = model(input_ids=batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"])
    return float(found.loss)


def test_a_run_starts_at_transformers_loss_in_every_layout(
    ranks: Any, saved: dict[str, Path], monkeypatch: Any
) -> None:
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(MODELS)
    cases = [(saved[kind], rank) for kind in ("llama", "qwen2", "gpt_neox") for rank in (0, 4)]
    plans = [tables(folder, rank, layout) for folder, rank in cases for layout in LAYOUTS]
    alone = starts([tables(folder, rank, {}) for folder, rank in cases])
    layouts = ranks(2)(starts, plans)
    for at, (folder, rank) in enumerate(cases):
        first, losses, _, trained = alone[at]
        assert losses[0] == pytest.approx(their_loss(folder), rel=1e-6)
        assert losses[1] != losses[0]
        if rank:
            assert trained
            assert all(".lora_" in name for name in trained), "the base is frozen"
            assert not any(first[name].any() for name in trained if ".lora_B." in name), "adapters add nothing at first"
        for of_rank in layouts:
            for theirs in of_rank[at * len(LAYOUTS) : (at + 1) * len(LAYOUTS)]:
                assert theirs[1][0] == pytest.approx(losses[0], rel=1e-6)
                assert theirs[1][1] == pytest.approx(losses[1], rel=1e-5)
                for name, value in theirs[0].items():
                    assert torch.equal(value, first[name]), name
