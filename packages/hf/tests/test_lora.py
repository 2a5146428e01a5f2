"""`hf.lora`: in every layout adapters train as in a plain loop with peft; checkpoints and exports have nothing else."""

from pathlib import Path
from typing import Any

import hf_families
import pytest
import torch
from hf_families import LAYOUTS, record_plans, small_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from sley_core.errors import PlanError, RunError
from sley_hf.structure import find_structure, to_layer_name
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import RunRecord, assert_parity_of_parts, assert_resumed_parity, record, record_reference

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it

STEPS, LENGTH = 3, 24
BATCH = {"global_size": 4, "micro_size": 2}
LORA_TABLE = {"use": "hf.lora", "rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama with tied embeddings, as `save_pretrained` writes it."""
    return write_base(tmp_path_factory.mktemp("base"))


def write_base(folder: Path, family: str = "llama") -> Path:
    config = small_config(family, vocab_size=257, tie_word_embeddings=True, eos_token_id=None)
    torch.manual_seed(0)
    hf_families.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def plan(base: Path, **changes: Any) -> Tables:
    model = {"use": "hf.decoder", "weights": str(base)}
    tables = small_plan(model=model, adapters=LORA_TABLE, batch=BATCH, optimizer__clip_norm=None)
    return changed(tables, **changes)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 255, (4, LENGTH + 1), generator=generator) for _ in range(STEPS)]
    positions = torch.arange(LENGTH).expand(4, -1)
    bounds = torch.tensor([0, LENGTH], dtype=torch.int32).expand(4, -1)
    return [{"tokens": i[:, :-1], "labels": i[:, 1:], "positions": positions, "cu_seqlens": bounds} for i in ids]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("table", "options"),
    [
        (LORA_TABLE | {"dora": True, "train": ["blocks.*norm.weight"]}, {"use_dora": True}),
        (LORA_TABLE | {"targets": ["q_proj", "blocks.1.*.down_proj"], "rslora": True}, {"use_rslora": True}),
        (LORA_TABLE, {}),
    ],
    ids=["dora and norms", "patterns", "all-linear"],
)
def test_three_steps_equal_those_of_peft(table: Tables, options: dict[str, Any], base: Path, texts: Path) -> None:
    import peft

    recorded = record(plan(base, adapters=table, optimizer__weight_decay=0.0), STEPS, folder=texts, batches=batches())
    model: Any = hf_families.AutoModelForCausalLM.from_pretrained(base).double()
    structure = find_structure(model)
    targets = "all-linear"
    if "targets" in table:
        targets = [f"model.layers.{index}.self_attn.q_proj" for index in range(2)] + ["model.layers.1.mlp.down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options)).double()
    named = {to_layer_name(name.removeprefix("base_model.model."), structure): p for name, p in adapted.named_parameters()}
    for name, parameter in named.items():
        if "train" in table and name.endswith("norm.weight") and name.startswith("blocks."):
            parameter.requires_grad_(True)
        parameter.data.copy_(recorded.initial_weights[name])
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    assert trained.keys() == recorded.gradients[0].keys()
    optimizer = torch.optim.AdamW(trained.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for batch, row, gradients in zip(batches(), recorded.rows, recorded.gradients, strict=True):
        logits = adapted(input_ids=batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-10)
        expected = {name: parameter.grad for name, parameter in trained.items()}
        assert_close_gradients(expected, gradients, 1e-10, floor=1e-12)
        optimizer.step()
    weights = {name: parameter.detach() for name, parameter in named.items()}
    assert_close_gradients(weights, {name: recorded.weights[name] for name in weights}, 1e-10)


def test_adapters_in_layouts_equal_those_of_one_process(base: Path, texts: Path, ranks: Any) -> None:
    """In the second step, both matrices of an adapter have gradients."""
    one_layer, tied_adapters, trained_head, all_linears = (
        plan(base, adapters=LORA_TABLE | table)
        for table in (
            {"targets": ["blocks.1.*.q_proj"]},
            {"targets": ["lm_head", "q_proj"]},
            {"targets": ["q_proj"], "train": ["head.*"]},
            {},
        )
    )
    llama = small_plan(adapters=LORA_TABLE | {"targets": ["query", "down"], "train": ["head.norm.*"]}, batch=BATCH)
    cases = [
        (one_layer, "zb_h1", 2),
        (tied_adapters, "wp", 6),
        (trained_head, "1f1b", 2 * 2 + 2),
        (llama, "dp sharded", 2 * 2 * 2 + 1),
        (all_linears, "host", 2 * 7 * 2),
    ]
    recorded = record_plans(ranks(2, 400), [changed(tables, **LAYOUTS[layout]) for tables, layout, _ in cases], 2, texts)
    for (tables, layout, num_trained), results in zip(cases, recorded, strict=True):
        print(layout, tables)
        reference = record_reference(tables, 2, folder=texts)
        assert len(reference.gradients[0]) == num_trained
        assert_parity_of_parts(reference, results, "fp64")
        if tables is one_layer:
            assert [len(result.gradients[0]) for result in results] == [0, 2], "a stage without trainable parameters"


@pytest.mark.campaign
@pytest.mark.parametrize("names", [("dp sharded", "zb_h1", "wp"), ("dp bucketed", "1f1b", "sp", "recompute")])
def test_layouts_equal_one_process(base: Path, texts: Path, ranks: Any, names: tuple[str, ...]) -> None:
    tables = plan(base)
    reference = record_reference(tables, 2, folder=texts)
    recorded = record_plans(ranks(2, 400), [changed(tables, **LAYOUTS[name]) for name in names], 2, texts)
    for name, results in zip(names, recorded, strict=True):
        print(name)
        assert_parity_of_parts(reference, results, "fp64")


def test_checkpoint_has_adapters_only_and_resumes_in_another_layout(
    base: Path, texts: Path, tmp_path: Path, ranks: Any
) -> None:
    tables = plan(base, adapters=LORA_TABLE | {"targets": ["o_proj", "gate_proj"]})
    uninterrupted = record(tables, 3, folder=texts)
    plans = [changed(tables, **LAYOUTS[layout]) for layout in ("1f1b", "dp sharded")]
    assert_resumed_parity(uninterrupted, ranks(2, 180)(save_and_resume, *plans, texts, tmp_path / "saved"), "fp64")
    tensors = {name: value for file in (tmp_path / "saved").glob("*.safetensors") for name, value in load_file(file).items()}
    weights = {name: value for name, value in tensors.items() if name.startswith("weights/")}
    assert len(weights) == 2 * 2 * 2
    assert all("lora_" in name for name in weights)
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
    of_adapters = 3 * sum(value.nbytes for value in weights.values())  # with both moments of AdamW
    assert of_adapters < num_bytes < of_adapters + 100_000, "headers, index and states of random generators"


def save_and_resume(first: Tables, second: Tables, folder: Path, path: Path) -> RunRecord:
    record(first, 2, folder=folder, save=path)
    return record(second, 1, folder=folder, load=path)


def test_another_base_is_refused(base: Path, texts: Path, tmp_path: Path) -> None:
    table = LORA_TABLE | {"targets": ["up_proj"]}
    record(plan(base, adapters=table), 1, folder=texts, save=tmp_path / "saved")
    other = tmp_path / "other"
    write_base(other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-6
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError) as refused:
        record(plan(other, adapters=table), 1, folder=texts, load=tmp_path / "saved")
    assert refused.value.diagnostics[0].code == "adapters-base"
    assert "'blocks.1.layer.mlp.up_proj.base_layer.weight'" in refused.value.diagnostics[0].message


@pytest.mark.parametrize(
    ("targets", "message"), [(["q_prj"], "no parameters"), (["input_layernorm"], "is a LlamaRMSNorm, which cannot")]
)
def test_targets_that_cannot_be_adapted_are_refused(targets: list[str], message: str, base: Path, texts: Path) -> None:
    with pytest.raises(PlanError, match=message):
        record(plan(base, adapters=LORA_TABLE | {"targets": targets}), 1, folder=texts)


def test_linears_beside_experts_have_adapters_and_experts_are_refused_or_trained(texts: Path, tmp_path: Path) -> None:
    write_base(tmp_path, "mixtral")

    def run(**adapters: Any) -> set[str]:
        tables = plan(tmp_path, adapters=LORA_TABLE | adapters, model__experts="eager")
        return {name.split(".")[-1] for name in record(tables, 1, folder=texts).gradients[0]}

    assert run() == {"weight"}
    assert run(targets=["q_proj"], train=["*.experts.*"]) == {"weight", "gate_up_proj", "down_proj"}
    with pytest.raises(PlanError, match=r"experts.gate_up_proj` contains the weights of all experts"):
        run(targets=["q_proj", "gate_up_proj"])
