"""Maps the weights of `models.llama` to the names of Hugging Face's Llama, Qwen2 and Qwen3, and back.

Only names differ: rotary pairs, head order and matrices are laid out alike. A tied head has no tensor of its own there, as in
the files that `save_pretrained` writes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from sley_core.errors import RunError
from sley_models.config import LlamaConfig

if TYPE_CHECKING:
    from torch import Tensor

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
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
_BIASES = {f"attention.{ours}.bias": f"self_attn.{theirs}.bias" for ours, theirs in _PROJECTIONS.items()}
_NORMS = {f"attention.{ours}_norm.weight": f"self_attn.{ours[0]}_norm.weight" for ours in ("query", "key")}
EMBEDDING = "embed.tokens.weight"
HEAD = "head.output.weight"
THEIR_HEAD = _OUTER[HEAD]


def names(config: LlamaConfig) -> Iterator[tuple[str, str]]:
    """Yields (our name, Hugging Face's) for every parameter of the model; a tied head comes last, with the embedding's."""
    for ours, theirs in _OUTER.items():
        if ours != HEAD:
            yield ours, theirs
    in_block = {**_IN_BLOCK, **(_BIASES if config.qkv_bias else {}), **(_NORMS if config.qk_norm else {})}
    for block in range(config.num_layers):
        for ours, theirs in in_block.items():
            yield f"blocks.{block}.{ours}", f"model.layers.{block}.{theirs}"
    yield HEAD, _OUTER["embed.tokens.weight" if config.tie_embeddings else HEAD]


def to_hugging_face(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Returns our weights by Hugging Face's names; the tensors are the same objects.

    state: full weights by qualified name (`blocks.0.attention.query.weight`); a tied head may be missing. Raises
    RunError "weights-mismatch" if a weight is missing or unknown.
    """
    known = dict(names(config))
    check_names(state, known, optional={HEAD} if config.tie_embeddings else set())
    return {theirs: state[ours] for ours, theirs in known.items() if ours in state and not _is_tied(ours, config)}


def from_hugging_face(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Returns Hugging Face's weights by our names; a tied head has the embedding's tensor under its own name too.

    state: as in safetensors files, or as `LlamaForCausalLM.state_dict()`, which repeats a tied head. Raises RunError
    "weights-mismatch" if a weight is missing or unknown.
    """
    known = dict(names(config))
    repeated = {_OUTER[HEAD]} if config.tie_embeddings else set()
    check_names([name for name in state if name not in repeated], {theirs: ours for ours, theirs in known.items()}, set())
    return {ours: state[theirs] for ours, theirs in known.items()}


def shapes(config: LlamaConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter by Hugging Face's name; a tied head has none of its own."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    in_block = {
        "attention.query.weight": (queries, hidden),
        "attention.key.weight": (keys, hidden),
        "attention.value.weight": (keys, hidden),
        "attention.output.weight": (hidden, queries),
        "attention.query.bias": (queries,),
        "attention.key.bias": (keys,),
        "attention.value.bias": (keys,),
        "attention.query_norm.weight": (config.head_dim,),
        "attention.key_norm.weight": (config.head_dim,),
        "feed_forward.gate.weight": (config.ffn_hidden, hidden),
        "feed_forward.up.weight": (config.ffn_hidden, hidden),
        "feed_forward.down.weight": (hidden, config.ffn_hidden),
    }
    outer = {"embed.tokens.weight": (vocab_size, hidden), HEAD: (vocab_size, hidden)}
    return {
        theirs: outer.get(ours) or in_block.get(ours.split(".", 2)[-1], (hidden,))
        for ours, theirs in names(config)
        if not _is_tied(ours, config)
    }


def _is_tied(name: str, config: LlamaConfig) -> bool:
    return config.tie_embeddings and name == HEAD


def check_names(state: Collection[str], known: Mapping[str, str], optional: set[str]) -> None:
    """Raises RunError "weights-mismatch" if names of `known` are missing from `state`, apart from `optional`, or if it has
    others.
    """
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
