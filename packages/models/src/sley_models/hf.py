"""Maps the weights of `models.llama` to the names of Hugging Face's Llama, Qwen2 and Qwen3, and back.

Only names differ: rotary pairs, head order and matrices are laid out alike. A tied head has no tensor of its own there, as in
the files that `save_pretrained` writes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from sley_core.errors import KeyPath, RunError
from sley_core.records import Problem
from sley_models.config import LlamaConfig

if TYPE_CHECKING:
    from sley_core.api.files import WeightFiles
    from sley_core.api.plan import Plan

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
        if not (config.tie_embeddings and ours == HEAD)
    }


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


PATH: KeyPath = ("model", "weights")

_IGNORED = ".rotary_emb.inv_freq"
"""Suffix of a buffer that old files have for each block; transformers computes it instead, too."""

_SHOWN = 4


def check_model(plan: Plan) -> Iterable[Problem]:
    """Yields a problem if `[model] weights` has no files, or files of another model. Reads headers, no values."""
    config = plan.model.config
    if not isinstance(config, LlamaConfig) or config.weights is None:
        return
    from sley_core.api.files import WeightFiles  # no other plan needs the library
    from sley_models.hf_config import read_config

    try:
        read_config(config.weights)
        files = WeightFiles(config.weights)
    except ValueError as error:
        yield Problem(PATH, str(error), "the folder of `save_pretrained` has it", "model-weights")
    except RunError as error:
        yield Problem(PATH, error.diagnostics[0].message, error.diagnostics[0].hint, "model-weights")
    else:
        for message in check_files(files, config):
            yield Problem(PATH, message, "`config.json` and the files belong to different models", "model-weights")


def check_files(files: WeightFiles, config: LlamaConfig) -> list[str]:
    """Returns at most one message: which tensors are missing, unknown, of another shape, or of a dtype from which no run can
    start.
    """
    from sley_core.api.files import FLOATS

    assert config.vocab_size is not None, "`weights` says the size of the vocabulary"
    expected = shapes(config, config.vocab_size)
    spare = {THEIR_HEAD} if config.tie_embeddings else set()
    wrong = [f"{name!r} is missing" for name in expected if name not in files.stored]
    for name, kind in files.stored.items():
        if name in expected and kind.shape != expected[name]:
            wrong.append(f"{name!r} is {list(kind.shape)} and not {list(expected[name])}")
        elif name in expected and kind.dtype not in FLOATS:
            wrong.append(f"{name!r} is {kind.dtype}, none of {', '.join(FLOATS)}")
        elif name not in expected and name not in spare and not name.endswith(_IGNORED):
            wrong.append(f"{name!r} is unknown")
    if not wrong:
        return []
    more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return [f"the files in `{config.weights}` are not the weights of this model: {', '.join(wrong[:_SHOWN])}{more}"]
