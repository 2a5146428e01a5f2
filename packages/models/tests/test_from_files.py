"""Tests `models.llama` with weight files of transformers: its logits, the tensors that a rank reads, and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sley_core.errors import PlanError, RunError
from sley_core.model.layers import Model
from sley_core.plan.load import plan_from_dict
from sley_core.weight_files.read import INDEX_FILE, TensorInfo, WeightFiles
from sley_models.hf import build_hugging_face_model, list_param_shapes
from sley_models.hf_config import from_hf_config, read_config, to_hf_config
from sley_models.llama import build_llama
from sley_models.plugin import LlamaConfig
from sley_testing.plans import build_meta_model as build
from sley_testing.plans import build_model_with_values as real
from sley_testing.plans import small_plan

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 16, "rope_theta": 500.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rms_norm_eps": 1e-5}),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama3": ("LlamaConfig", {"rope_parameters": SCALED, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 12, "hidden_size": 36}),
    "qwen3_odd": ("Qwen3Config", {"head_dim": 16, "hidden_size": 30}),
}


def make_config(kind: str) -> Any:
    import transformers  # seconds, which every process that collects tests would need

    name, changes = KINDS[kind]
    return getattr(transformers, name)(**{**SIZES, **changes})


def write_config(folder: Path, kind: str) -> None:
    """Writes the `config.json` of a model, without weights."""
    make_config(kind).save_pretrained(folder)


def save_model(folder: Path, kind: str, max_shard_size: str = "40KB") -> Any:
    """Writes a transformers model with random weights to several files, and returns it."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(make_config(kind))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.eval()


def logits(model: Model, tokens: Tensor) -> Tensor:
    output: Any = tokens
    for layer in model.layers:
        output = layer.module(output)
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_logits_from_files_equal_transformers(tmp_path: Path, kind: str) -> None:
    theirs = save_model(tmp_path, kind)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = LlamaConfig(weights=tmp_path)  # type: ignore[call-arg]
    assert from_hf_config(to_hf_config(config, 97)).keys == read_config(tmp_path).keys
    model = real(lambda data: build_llama(config, data))
    tokens = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logits(model, tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_rank_reads_only_the_tensors_of_its_layers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "tied")
    read: list[str] = []

    read_tensor = WeightFiles.tensor

    def counted(files: WeightFiles, name: str) -> Tensor:
        read.append(name)
        return read_tensor(files, name)

    monkeypatch.setattr(WeightFiles, "tensor", counted)
    config = LlamaConfig(weights=tmp_path)  # type: ignore[call-arg]
    real(lambda data: build_llama(config, data), owned={"blocks.1"})
    assert len(read) == 9
    assert all(name.startswith("model.layers.1.") for name in read)
    read.clear()
    real(lambda data: build_llama(config, data), owned={"head"})
    assert sorted(read) == ["model.embed_tokens.weight", "model.norm.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_files_of_another_dtype_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    save_model(tmp_path, "llama", "1GB")
    file = tmp_path / "model.safetensors"
    narrow = {name: value.to(dtype) for name, value in load_file(file).items()}
    save_file(narrow, file)
    config = LlamaConfig(weights=tmp_path)  # type: ignore[call-arg]
    model = real(lambda data: build_llama(config, data))
    weight = model["blocks.0"].module.get_parameter("attention.query.weight")
    assert torch.equal(weight, narrow["model.layers.0.self_attn.q_proj.weight"].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type must be one of llama, qwen2, qwen3, but is 'mixtral'"),
        ({"hidden_act": "gelu"}, "does not support hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "does not support attention_dropout = 0.1"),
        ({"attention_bias": True}, "does not support attention_bias = True"),
        ({"mlp_bias": True}, "does not support mlp_bias = True"),
        ({"use_sliding_window": True}, "does not support use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "does not support layer_types"),
        ({"quantization_config": {"bits": 4}}, "does not support quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "missing keys of rope_scaling: low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {**SCALED, "high_freq_factor": 1.0}}, "it must be greater than low_freq_factor = 1"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "different rotary positions per layer"),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "rope_scaling must be a table, but is 'linear'"),
        ({"hidden_size": None}, "missing keys: hidden_size"),
        ({"model_type": "qwen3", "head_dim": None}, "missing keys: head_dim"),
    ],
)
def test_unsupported_options_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_config(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValidationError, match=message):
        LlamaConfig(weights=tmp_path)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("hidden", 64, 32), ("kv_heads", 4, 2), ("tie_embeddings", True, False), ("rope_scaling", {"factor": 8.0}, None)],
)
def test_sizes_must_equal_those_of_the_weights(tmp_path: Path, key: str, value: Any, expected: Any) -> None:
    write_config(tmp_path, "llama")
    with pytest.raises(ValidationError, match=f"`{key}` = .* does not match the weights, whose .* has {expected}"):
        LlamaConfig(**{"weights": tmp_path, key: value})


def test_equal_sizes_are_allowed_and_sufficient_without_the_folder(tmp_path: Path) -> None:
    write_config(tmp_path, "llama3")
    config = LlamaConfig(weights=tmp_path, hidden=32, heads=4)  # type: ignore[call-arg]
    assert config.rope_scaling is not None
    whole = config.model_dump(exclude_none=True)
    assert LlamaConfig(**whole) == config
    for file in tmp_path.iterdir():
        file.unlink()
    assert LlamaConfig(**whole) == config


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"cannot read .*config\.json.*must be a local folder"),
        ({"config.json": "{"}, r"cannot read .*config\.json.*Expecting"),
        ({"config.json": "[]"}, r"config\.json` must contain a JSON object"),
        ({"plan.toml": "model = 1"}, r"cannot read .*plan\.toml"),
        ({"plan.toml": '[model]\nuse = "models.llama"'}, "has no weights"),
    ],
)
def test_a_folder_that_describes_no_model_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValidationError, match=message):
        LlamaConfig(weights=tmp_path)  # type: ignore[call-arg]


def _remove_tensor(folder: Path, name: str) -> None:
    """Removes the tensor `name` from its file and from the index."""
    index = json.loads((folder / INDEX_FILE).read_text())
    file = folder / index["weight_map"].pop(name)
    (folder / INDEX_FILE).write_text(json.dumps(index))
    save_file({key: value for key, value in load_file(file).items() if key != name}, file)


def _add_tensor(folder: Path, name: str, value: Tensor) -> None:
    """Adds a tensor in a separate file to the index."""
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"][name] = "more.safetensors"
    (folder / INDEX_FILE).write_text(json.dumps(index))
    save_file({name: value}, folder / "more.safetensors")


def _replace_tensor(folder: Path, name: str, value: Tensor) -> None:
    _remove_tensor(folder, name)
    _add_tensor(folder, name, value)


KEY = "model.layers.1.self_attn.k_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: _remove_tensor(folder, KEY), f"'{KEY}' is missing"),
    "ghost": (lambda folder: _add_tensor(folder, "model.rope", torch.ones(2)), "'model.rope' is unknown"),
    "old buffers": (lambda folder: _add_tensor(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)), ""),
    "tied head": (lambda folder: _add_tensor(folder, "lm_head.weight", torch.ones(97, 32)), "have different values"),
    "shape": (lambda folder: _replace_tensor(folder, KEY, torch.ones(3, 3)), r"the shape \[32, 32\], but has \[3, 3\]"),
    "no tensors": (lambda folder: (folder / INDEX_FILE).unlink(), "has neither"),
    "type": (lambda folder: _replace_tensor(folder, KEY, torch.ones(32, 32, dtype=torch.uint8)), "must be F64 .*, but is U8"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_of_another_model_are_refused_by_name(tmp_path: Path, fault: str) -> None:
    save_model(tmp_path, "tied")
    change_files, message = FAULTS[fault]
    change_files(tmp_path)
    config = LlamaConfig(weights=tmp_path)  # type: ignore[call-arg]
    if not message:
        build(lambda data: build_llama(config, data))
        return
    with pytest.raises(PlanError, match=message) as raised:
        build(lambda data: build_llama(config, data))
    assert raised.value.diagnostics[0].code == "model-weights"


def test_weights_of_another_model_are_refused() -> None:
    plan = plan_from_dict(small_plan())
    shapes = {**list_param_shapes(plan.model.config, 256), "rope": (1,)}
    source: Any = SimpleNamespace(names=shapes, info=lambda name: TensorInfo("F32", shapes[name]))
    for name, more in (("blocks.0.attention.key.weight", ", 'rope' is unknown"), ("embed.tokens.weight", "")):
        del shapes[name]
        with pytest.raises(RunError, match=f"weights-mismatch.*'{name}' is missing{more}"):
            build_hugging_face_model(plan, source)


def test_the_config_of_transformers_has_the_theta() -> None:
    import transformers

    config = LlamaConfig(num_layers=1, hidden=32, heads=4, rope_theta=500.0)
    rotary = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf_config(config, 97))).model.rotary_emb
    assert rotary.inv_freq.tolist() == pytest.approx([500.0 ** -(index / 4) for index in range(4)])
