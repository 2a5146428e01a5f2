"""The weights of `core.llama` under the names that Hugging Face's LlamaForCausalLM gives them, in and out.

Only names differ: rotary pairs, head order and matrices are laid out alike. A tied head has no tensor of its own there,
as in the files that `save_pretrained` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from sley_core.errors import RunError
from sley_core.model.config import LlamaConfig

_OUTER = {
    "embed.tokens.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
HEAD = "head.output.weight"


def names(config: LlamaConfig) -> Iterator[tuple[str, str]]:
    """Yields (our name, Hugging Face's) for every parameter of the model; a tied head comes last, with the embedding's."""
    for ours, theirs in _OUTER.items():
        if ours != HEAD:
            yield ours, theirs
    for block in range(config.num_layers):
        for ours, theirs in _IN_BLOCK.items():
            yield f"blocks.{block}.{ours}", f"model.layers.{block}.{theirs}"
    yield HEAD, _OUTER["embed.tokens.weight" if config.tie_embeddings else HEAD]


def to_hugging_face(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Returns our weights by Hugging Face's names; the tensors are the same objects.

    state: full weights by qualified name (`blocks.0.attention.query.weight`); a tied head may be missing. Raises
    RunError "weights-mismatch" if a weight is missing or unknown.
    """
    known = dict(names(config))
    _check(state, known, optional={HEAD} if config.tie_embeddings else set())
    return {theirs: state[ours] for ours, theirs in known.items() if ours in state and not _is_tied(ours, config)}


def from_hugging_face(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Returns Hugging Face's weights by our names; a tied head has the embedding's tensor under its own name too.

    state: as in safetensors files, or as `LlamaForCausalLM.state_dict()`, which repeats a tied head. Raises RunError
    "weights-mismatch" if a weight is missing or unknown.
    """
    known = dict(names(config))
    repeated = {_OUTER[HEAD]} if config.tie_embeddings else set()
    _check(
        {name: None for name in state if name not in repeated}, {theirs: ours for ours, theirs in known.items()}, set()
    )
    return {ours: state[theirs] for ours, theirs in known.items()}


def config_to_hugging_face(config: LlamaConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the `config.json` that belongs to `to_hugging_face`; transformers' `LlamaConfig(**it)` takes it as well."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _is_tied(name: str, config: LlamaConfig) -> bool:
    return config.tie_embeddings and name == HEAD


def _check(state: Mapping[str, Any], known: Mapping[str, str], optional: set[str]) -> None:
    """Raises RunError "weights-mismatch" if names of `known` are missing from `state` or it has others."""
    missing = [name for name in known if name not in state and name not in optional]
    unknown = [name for name in state if name not in known]
    if missing or unknown:
        what = [f"{name!r} is missing" for name in missing] + [f"{name!r} is unknown" for name in unknown]
        more = f", and {len(what) - 4} more" if len(what) > 4 else ""
        raise RunError(
            "weights-mismatch",
            f"these are not the weights of this Llama: {', '.join(what[:4])}{more}",
            hint="compare num_layers and tie_embeddings with the model that the weights come from",
        )
