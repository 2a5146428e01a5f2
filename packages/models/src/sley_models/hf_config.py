"""Translates Hugging Face's `config.json` of a Llama, Qwen2 or Qwen3 into the keys of `models.llama`, and back. No torch.

Refuses by name what `models.llama` cannot compute, so that no model is trained as a different one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sley_models.config import LlamaConfig

CONFIG = "config.json"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_MOST_BYTES = 1 << 22
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "vocab_size": "vocab_size",
}
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class HFConfig:
    """Holds the content of a `config.json`. keys: those of `models.llama`. names: Hugging Face's name of each. rest: all of
    it, as read.
    """

    keys: Mapping[str, Any]
    names: Mapping[str, str]
    rest: Mapping[str, Any] = field(repr=False)

    def said(self, key: str) -> Any:
        """Returns the file's value that decides `key`."""
        return self.rest.get("model_type") if self.names[key] == "model_type" else self.keys[key]


def read_config(folder: Path) -> HFConfig:
    """Reads the `config.json` in `folder`. Raises ValueError if it cannot be read, or describes what `models.llama` cannot
    compute.
    """
    path = folder / CONFIG
    try:
        state = path.stat()
    except OSError as error:
        why = f"{error.strerror} (nothing is downloaded: `weights` is a folder, and no name on a hub)"
        raise ValueError(f"cannot read `{path}`: {why}") from None
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _read(path: Path, _changed: int, size: int) -> HFConfig:
    """Reads and parses the file; cached by path, time of change (ns) and size (bytes). Raises ValueError."""
    if size > _MOST_BYTES:
        raise ValueError(f"`{path}` has more than {_MOST_BYTES >> 20} MB")
    try:
        given = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read `{path}`: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"`{path}` is no table")
    try:
        return from_hf_config(given)
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from None


def from_hf_config(given: Mapping[str, Any]) -> HFConfig:
    """Returns the keys of `models.llama` for the content of a `config.json`. Raises ValueError for what `models.llama` cannot
    compute.
    """
    kind = given.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type = {kind!r} is not one of {', '.join(ARCHITECTURES)}")
    _check_kept(given, str(kind))
    names = {**_SIZES, "tie_embeddings": "tie_word_embeddings", "norm_eps": "rms_norm_eps"}
    missing = [theirs for theirs in _SIZES.values() if given.get(theirs) is None]
    # transformers' defaults for these differ between models, and are not in the file
    needed = {"llama": (), "qwen2": ("num_key_value_heads",), "qwen3": ("num_key_value_heads", "head_dim")}
    missing += [name for name in needed[str(kind)] if given.get(name) is None]
    if missing:
        raise ValueError(f"it does not say {', '.join(missing)}")
    keys: dict[str, Any] = {ours: given[theirs] for ours, theirs in _SIZES.items()}
    keys["kv_heads"] = given.get("num_key_value_heads") or given["num_attention_heads"]
    keys["head_dim"] = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    keys["tie_embeddings"] = given.get("tie_word_embeddings", False)
    keys["norm_eps"] = given.get("rms_norm_eps", 1e-6)
    keys["qkv_bias"], keys["qk_norm"] = kind == "qwen2", kind == "qwen3"
    keys["rope_theta"], keys["rope_scaling"] = _rope(given)
    names |= {"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "qkv_bias": "model_type"}
    names |= {"qk_norm": "model_type", "rope_theta": "rope_theta", "rope_scaling": "rope_scaling"}
    if 0 < (std := given.get("initializer_range") or 0) <= 1:
        keys["init_std"] = std  # shown only, since nothing is drawn; not in `names`, since the plan need not agree with it
    return HFConfig(keys, names, given)


def _check_kept(given: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError, naming it, for the first thing in `given` that `models.llama` does not compute."""
    layer_types = set(given.get("layer_types") or ["full_attention"])
    refused = {
        "hidden_act": given.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention_dropout": bool(given.get("attention_dropout")),
        "attention_bias": bool(given.get("attention_bias")),
        "mlp_bias": bool(given.get("mlp_bias")),
        "use_sliding_window": bool(given.get("use_sliding_window")),
        "sliding_window": kind == "llama" and given.get("sliding_window") is not None,
        "layer_types": layer_types != {"full_attention"},
        "quantization_config": bool(given.get("quantization_config")),
        "num_experts": bool(given.get("num_experts")),
        "partial_rotary_factor": _rope_table(given).get("partial_rotary_factor", 1) != 1
        or given.get("partial_rotary_factor", 1) != 1,
    }
    for name, is_refused in refused.items():
        if is_refused:
            value = given.get(name, _rope_table(given).get(name))
            raise ValueError(f"`models.llama` cannot keep {name} = {value!r}")


def _rope_table(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the table of rotary positions: `rope_parameters` since transformers 5, `rope_scaling` before."""
    table = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise ValueError(f"rope_scaling = {table!r} is no table")
    if any(isinstance(inner, Mapping) for inner in table.values()):
        raise ValueError(f"`models.llama` cannot keep rotary positions that differ by layer: {', '.join(table)}")
    return table


def _rope(given: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Returns `rope_theta` and `rope_scaling`. Raises ValueError for a scaling other than Llama 3's."""
    table = _rope_table(given)
    theta = table.get("rope_theta", given.get("rope_theta", 10000.0))
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"`models.llama` cannot keep the rotary positions of rope_type = {kind!r}")
    if missing := [name for name in _SCALING if table.get(name) is None]:
        raise ValueError(f"rope_scaling does not say {', '.join(missing)}")
    return theta, {name: table[name] for name in _SCALING}


def model_type(config: LlamaConfig) -> str:
    """Returns "llama", "qwen2" or "qwen3". Raises ValueError for a combination of options that none of them has."""
    if config.qkv_bias and config.qk_norm:
        raise ValueError("no model of transformers has both biases (`qkv_bias`) and norms (`qk_norm`) of queries and keys")
    return "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama"


def to_hf_config(config: LlamaConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the content of a `config.json` for `config`, in a form that transformers 4 and 5 both read. Raises ValueError as
    `model_type`.

    The caller adds what only the run knows: the dtype, the longest sequence, ids of special tokens.
    """
    kind = model_type(config)
    keys = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
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
    if kind == "qwen2":
        return keys
    return keys | {"attention_bias": False, **({"mlp_bias": False} if kind == "llama" else {})}
