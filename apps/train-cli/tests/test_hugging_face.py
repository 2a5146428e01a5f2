"""transformers opens the export of a run of `hf.decoder`, and a run starts from the weights of other runs."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trained_runs
from safetensors.torch import load_file, save_file
from trained_runs import PLAN, TOKENS, transformers_model

from sley_core.errors import PlanError, RunError
from sley_core.plan.load import plan_from_dict
from sley_core.weight_files.read import WeightFiles
from sley_core.weight_files.write import write_tensors
from sley_testing.plans import Tables, changed
from sley_trainer.run import Run
from train_cli.commands.export import write_config_files
from train_cli.saved_run import load_run_plan

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 8},
    "gemma": {"head_dim": 8},  # norms that add 1
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {},  # other names in files than in the model
    "gpt2": {},  # Conv1D, learned positions
}
CHECKPOINT = "checkpoints/step-00000002"
LORA = {"use": "hf.lora", "rank": 2}
Trained = Callable[..., Path]


def plan(model: Tables, **changes: Any) -> Tables:
    return {**changed(PLAN, **changes), "model": model}


def save_model(folder: Path, family: str, **changes: Any) -> Path:
    return trained_runs.save_model(folder, family, **{**FAMILIES[family], **changes})


@pytest.fixture
def trained(texts: Path, folder: Path) -> Trained:
    """`trained(tables)` trains for two steps and returns the run folder. `trained.logits` has the logits of the run."""

    def train(tables: Tables, name: str = "run", resume: str | None = None) -> Path:
        train.logits = trained_runs.train(tables, texts, folder / name, save, resume)  # type: ignore[attr-defined]
        return folder / name

    def save(run: Run, to: Path) -> None:
        run.save_weights(to / "weights", max_file_bytes=20000)
        run.save_checkpoint(to / "checkpoints" / f"step-{run.num_steps_done:08}")

    return train


def exported(cli: Any, run: Path, out: Path, *options: str) -> str:
    return str(cli("export", run, "--format", "huggingface", "--out", out, *options).expect(0).err)


EXPORTS: dict[str, tuple[str, Tables, list[str]]] = {
    "untied": ("llama", {}, []),
    "tied": ("qwen3", {}, []),
    "bf16, norms that add 1": ("gemma", {"precision__compute": "bf16"}, []),
    "experts": ("qwen3_moe", {}, []),
    "adapters beside experts": ("mixtral", {"adapters": LORA}, ["--merge"]),
    "extended": ("llama", {}, []),
    "other names in files": ("gpt_neox", {}, []),
    "mixtral": ("mixtral", {"precision__compute": "bf16"}, []),
    "olmoe": ("olmoe", {}, []),
    "gpt2": ("gpt2", {}, []),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", EXPORTS)
def test_a_moved_export_computes_the_logits_of_the_run(cli: Any, trained: Trained, folder: Path, case: str) -> None:
    family, changes, options = EXPORTS[case]
    dtype = getattr(torch, {"bf16": "bfloat16"}.get(changes.get("precision__compute", ""), "float32"))
    start = save_model(folder / "start", family, dtype=dtype)
    tables = plan({"use": "hf.decoder", "weights": str(start)}, **changes)
    run = trained(tables)
    if case == "extended":
        run = trained(changed(tables, run__steps=4), resume=str(run / CHECKPOINT))
    shutil.rmtree(start)
    run = Path(shutil.move(run, folder / "moved run"))
    message = exported(cli, run, folder / "hf", *options)
    assert f"the weights of step {4 if case == 'extended' else 2}" in message
    assert "transformers computes the run's logits" in message
    model = transformers_model(Path(shutil.move(folder / "hf", folder / "moved")))
    assert (model.dtype, model.config.model_type, model.generation_config.eos_token_id) == (dtype, family, 255)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    with torch.no_grad():
        logits = model(TOKENS).logits.float()
    torch.testing.assert_close(logits, trained.logits, rtol=tolerance, atol=tolerance * float(logits.abs().max()))  # type: ignore[attr-defined]
    model.save_pretrained(folder / "saved by transformers")
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("moved", "saved by transformers"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    change(values)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


def swap(values: dict[str, Any]) -> None:
    first, second = (f"model.layers.{index}.mlp.down_proj.weight" for index in range(2))
    values[first], values[second] = values[second], values[first]


def drop_head(values: dict[str, Any]) -> None:
    del values["lm_head.weight"]


@pytest.mark.parametrize(
    ("use", "change", "name"),
    [("hf.decoder", swap, "model.layers.0.mlp.down_proj.weight"), ("models.llama", drop_head, "lm_head.weight")],
)
def test_the_error_of_a_wrong_export_names_the_tensor(
    cli: Any, trained: Trained, folder: Path, use: str, change: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(plan({"use": use, "weights": str(save_model(folder / "start", "llama"))}))
    from sley_hf import export as hf_export

    check = hf_export.check_export

    def change_export(plan: Any, model: Any, source: Any, out: Path) -> None:
        change_tensors(out, change)
        check(plan, model, source, out)

    monkeypatch.setattr(hf_export, "check_export", change_export)
    message = f"error[export-differs]: the export in `{folder}/hf` is wrong: the tensor {name!r} differs"
    cli("export", run, "--format", "huggingface", "--out", folder / "hf").expect(1, message)


def test_the_error_of_swapped_names_names_the_layer(trained: Trained, folder: Path) -> None:
    run = trained(plan({"use": "hf.decoder", "weights": str(save_model(folder / "start", "llama"))}))
    with pytest.raises(PlanError, match=r"has the model 'hf.decoder' and not 'models.llama'"):
        plan_from_dict(plan({"use": "models.llama", "weights": str(run)}), folder)
    from sley_hf import export as hf_export

    resolved, source = load_run_plan(run), WeightFiles(run / "weights")
    model = hf_export.build_hugging_face_model(resolved, source)
    names = dict(model.names)
    gate, up = (f"blocks.1.layer.mlp.{name}_proj.weight" for name in ("gate", "up"))
    names[gate], names[up] = names[up], names[gate]
    swapped = hf_export.HuggingFaceModel(model.config, names)
    write_tensors(folder / "hf", source, swapped.names.items(), 10**9, partial(write_config_files, resolved, swapped))
    with pytest.raises(RunError, match=r"the last layer with the same output is 'blocks.0'"):
        hf_export.check_export(resolved, swapped, source, folder / "hf")


SOURCES: dict[str, tuple[str, Tables, str]] = {
    "run": ("hf.decoder", {}, ""),
    "run from random weights": ("models.llama", {"model": {"num_layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1}}, ""),
    "checkpoint of models.llama": ("models.llama", {}, CHECKPOINT),
    "adapters": ("hf.decoder", {"adapters": LORA}, ""),
    "checkpoint of adapters": ("hf.decoder", {"adapters": LORA}, CHECKPOINT),
    "run of models.llama": ("models.llama", {}, ""),
    "checkpoint": ("hf.decoder", {}, CHECKPOINT),
    "adapters of models.llama": ("models.llama", {"adapters": LORA}, ""),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", SOURCES)
def test_a_run_starts_from_the_weights_of_another_and_is_exported(
    cli: Any, trained: Trained, folder: Path, source: str
) -> None:
    use, changes, checkpoint = SOURCES[source]
    start = save_model(folder / "start", "llama")
    tables = plan({"use": use, "weights": str(start)}) | changes
    tables["model"]["use"] = use
    if not checkpoint:
        tables["data"]["files"] = [str(folder / "corpus.txt")]
    first = trained(tables, "first")
    logits = trained.logits  # type: ignore[attr-defined]
    if not checkpoint:
        (folder / "corpus.txt").unlink()
    second = trained(plan({"use": use, "weights": str(first / checkpoint)}, optimizer__lr=1e-9), "second")
    torch.testing.assert_close(trained.logits, logits, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]
    shutil.rmtree(first)
    shutil.rmtree(start)
    exported(cli, second, folder / "hf")
    assert transformers_model(folder / "hf").generation_config.eos_token_id == (None if "model" in changes else 255)
