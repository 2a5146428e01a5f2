"""Converts Hugging Face's `config.json` of a Llama, Qwen2 or Qwen3 to the keys of `models.llama`, and back. Imports no torch.

Refuses options that `models.llama` does not support, since training would otherwise silently use a different model.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sley_core.api.files import open_weights, run_of
from sley_core.errors import RunError
from sley_models.plugin import LlamaConfig

CONFIG_NAME = "config.json"  # the name of a model's config in a Hugging Face folder
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The class in transformers for each supported `model_type`."""

_SIZE_KEYS = {  # Hugging Face's name of each key of `models.llama` for a size
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "vocab_size": "vocab_size",
}
_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of "llama3"


@dataclass(frozen=True)
class HFConfig:
    """The config of a model. keys: the values of the keys of `models.llama`. content: the content of its `config.json`, or an
    empty mapping for the model of a run.
    """

    keys: Mapping[str, Any]
    content: Mapping[str, Any]


def read_config(folder: Path) -> HFConfig:
    """Returns the config from `config.json` in `folder`, or from the plan if `folder` belongs to a run. Raises ValueError if a
    file cannot be read, or if `models.llama` does not support the model.
    """
    path = find_config_path(folder)
    if path.name != CONFIG_NAME:
        return _read_run(folder, path)
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        message = f"{error.strerror} (`weights` must be a local folder, since no model is downloaded from a hub)"
        raise ValueError(f"cannot read `{path}`: {message}") from None
    except ValueError as error:
        raise ValueError(f"cannot read `{path}`: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` must contain a JSON object")
    try:
        return from_hf_config(content)
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from None


def find_config_path(folder: Path) -> Path:
    """Returns the file that describes the model in `folder`: `plan.toml` in a folder of a run, else `config.json`."""
    run = run_of(folder)
    return folder / CONFIG_NAME if run is None else run / "plan.toml"


def _read_run(folder: Path, plan: Path) -> HFConfig:
    """Returns the config of a run's model, from the file `plan` of the run. Raises ValueError unless the model is
    `models.llama`. folder: the folder of the run or of one of its checkpoints.
    """
    try:
        table = tomllib.loads(plan.read_text("utf-8"))["model"]
        use = table.pop("use", None)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"cannot read `{plan}`: {error}") from None
    if use != "models.llama":
        raise ValueError(f"the run in `{plan.parent}` has the model {use!r} and not 'models.llama'")
    keys = {key: value for key, value in table.items() if key not in ("weights", "compile", "attention")}
    if "vocab_size" not in keys:
        try:
            keys["vocab_size"] = open_weights(folder).info("embed.tokens.weight").shape[0]
        except (RunError, KeyError) as error:
            raise ValueError(f"the run in `{folder}` has no weights: {error}") from None
    return HFConfig(keys, {})


def from_hf_config(content: Mapping[str, Any]) -> HFConfig:
    """Returns the config for the content of a `config.json`. Raises ValueError if `models.llama` does not support the model."""
    model_type = content.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ValueError(f"model_type must be one of {', '.join(ARCHITECTURES)}, but is {model_type!r}")
    _check_supported(content, str(model_type))
    # The required keys have defaults that depend on the model type, and transformers may not write them to the file.
    required = {"llama": (), "qwen2": ("num_key_value_heads",), "qwen3": ("num_key_value_heads", "head_dim")}
    missing_keys = [name for name in (*_SIZE_KEYS.values(), *required[str(model_type)]) if content.get(name) is None]
    if missing_keys:
        raise ValueError(f"missing keys: {', '.join(missing_keys)}")
    keys: dict[str, Any] = {key: content[name] for key, name in _SIZE_KEYS.items()}
    keys["kv_heads"] = content.get("num_key_value_heads") or content["num_attention_heads"]
    keys["head_dim"] = content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]
    keys["tie_embeddings"] = content.get("tie_word_embeddings", False)
    keys["norm_eps"] = content.get("rms_norm_eps", 1e-6)
    keys["qkv_bias"], keys["qk_norm"] = model_type == "qwen2", model_type == "qwen3"
    keys["rope_theta"], keys["rope_scaling"] = _convert_rope_keys(content)
    if 0 < (std := content.get("initializer_range") or 0) <= 1:
        keys["init_std"] = std  # a default, which the plan may replace
    return HFConfig(keys, content)


def _check_supported(content: Mapping[str, Any], model_type: str) -> None:
    """Raises ValueError for the first option in `content` that `models.llama` does not support."""
    layer_types = set(content.get("layer_types") or ["full_attention"])
    unsupported = {
        "hidden_act": content.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention_dropout": bool(content.get("attention_dropout")),
        "attention_bias": bool(content.get("attention_bias")),
        "mlp_bias": bool(content.get("mlp_bias")),
        "use_sliding_window": bool(content.get("use_sliding_window")),
        "sliding_window": model_type == "llama" and content.get("sliding_window") is not None,
        "layer_types": layer_types != {"full_attention"},
        "quantization_config": bool(content.get("quantization_config")),
        "num_experts": bool(content.get("num_experts")),
        "partial_rotary_factor": _find_rope_table(content).get("partial_rotary_factor", 1) != 1
        or content.get("partial_rotary_factor", 1) != 1,
    }
    for name, is_unsupported in unsupported.items():
        if is_unsupported:
            value = content.get(name, _find_rope_table(content).get(name))
            raise ValueError(f"`models.llama` does not support {name} = {value!r}")


def _find_rope_table(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the table of rotary positions: `rope_parameters` in transformers 5, `rope_scaling` in earlier versions, or {}.
    Raises ValueError if it is not a table, or if it differs by layer.
    """
    table = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise ValueError(f"rope_scaling must be a table, but is {table!r}")
    if any(isinstance(value, Mapping) for value in table.values()):
        raise ValueError(f"`models.llama` does not support different rotary positions per layer: {', '.join(table)}")
    return table


def _convert_rope_keys(content: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Returns `rope_theta`, and `rope_scaling` or None. Raises ValueError for any scaling except the scaling of Llama 3."""
    table = _find_rope_table(content)
    theta = table.get("rope_theta", content.get("rope_theta", 10000.0))
    rope_type = table.get("rope_type", table.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise ValueError(f"`models.llama` does not support the rotary positions of rope_type = {rope_type!r}")
    if missing_keys := [name for name in _SCALING_KEYS if table.get(name) is None]:
        raise ValueError(f"missing keys of rope_scaling: {', '.join(missing_keys)}")
    return theta, {name: table[name] for name in _SCALING_KEYS}


def to_hf_config(config: LlamaConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the content of a `config.json` that both transformers 4 and 5 can read. The caller adds the dtype, the maximum
    sequence length and the ids of special tokens. Raises ValueError if no transformers model has the options of `config`.
    """
    if config.qkv_bias and config.qk_norm:
        raise ValueError("transformers has no model with both `qkv_bias` and `qk_norm`")
    model_type = "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama"
    keys = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
    }
    if config.rope_scaling is not None:
        keys["rope_scaling"] = {"rope_type": "llama3", **config.rope_scaling.model_dump()}
    if model_type == "qwen2":
        return keys
    return keys | {"attention_bias": False, **({"mlp_bias": False} if model_type == "llama" else {})}
