"""Reads the weights of `models.llama` from safetensors files, and exports a run as a Llama, Qwen2 or Qwen3 of transformers.

Only the names of parameters differ, since rotary pairs, heads and matrices have the same layout. As in the files that
`save_pretrained` writes, a tied head has no separate tensor. A rank reads only the tensors of its layers, one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sley_core.api.files import FLOATS, IDS, HuggingFaceModel, TensorReader, describe_model, open_weights, run_of, start_folder
from sley_core.errors import KeyPath, PlanError, RunError, UsageError
from sley_models.hf_config import CONFIG, read_config, to_hf_config
from sley_models.plugin import LlamaConfig

if TYPE_CHECKING:
    from sley_core.api.plan import Plan

_OUTER_NAMES = {
    "embed.tokens.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
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
_BIAS_NAMES = {f"attention.{name}.bias": f"self_attn.{hf_name}.bias" for name, hf_name in _PROJECTIONS.items()}
_NORM_NAMES = {f"attention.{name}_norm.weight": f"self_attn.{name[0]}_norm.weight" for name in ("query", "key")}
EMBEDDING = "embed.tokens.weight"
HEAD = "head.output.weight"
HF_HEAD = _OUTER_NAMES[HEAD]


def name_pairs(config: LlamaConfig) -> Iterator[tuple[str, str]]:
    """Yields the name and the Hugging Face name of each parameter. A tied head has the Hugging Face name of the embedding."""
    for name, hf_name in _OUTER_NAMES.items():
        if name != HEAD:
            yield name, hf_name
    block_names = {**_BLOCK_NAMES, **(_BIAS_NAMES if config.qkv_bias else {}), **(_NORM_NAMES if config.qk_norm else {})}
    for block in range(config.num_layers):
        for name, hf_name in block_names.items():
            yield f"blocks.{block}.{name}", f"model.layers.{block}.{hf_name}"
    yield HEAD, _OUTER_NAMES["embed.tokens.weight" if config.tie_embeddings else HEAD]


def stored_name_pairs(config: LlamaConfig) -> Iterator[tuple[str, str]]:
    """Yields the name of each parameter and its name in the files of `weights`. In the files of a run, both are the same."""
    is_run = config.weights is not None and run_of(config.weights) is not None
    for name, hf_name in name_pairs(config):
        if name != HEAD or not config.tie_embeddings:
            yield name, name if is_run else hf_name


def param_shapes(config: LlamaConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all parameters by their Hugging Face names, without a tied head."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    block_shapes = {
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
    outer_shapes = {"embed.tokens.weight": (vocab_size, hidden), HEAD: (vocab_size, hidden)}
    return {
        hf_name: outer_shapes.get(name) or block_shapes.get(name.split(".", 2)[-1], (hidden,))
        for name, hf_name in name_pairs(config)
        if not (config.tie_embeddings and name == HEAD)
    }


def check_names(names: Collection[str], expected: Collection[str], optional: set[str]) -> None:
    """Raises RunError "weights-mismatch" if `names` lack a name in `expected` that is not `optional`, or if one is unknown."""
    problems = [f"{name!r} is missing" for name in expected if name not in names and name not in optional]
    problems += [f"{name!r} is unknown" for name in names if name not in expected]
    if problems:
        raise RunError(
            "weights-mismatch",
            f"the weights do not match this Llama: {_join_problems(problems)}",
            hint="use the num_layers and tie_embeddings of the model that was saved",
        )


def _join_problems(problems: Sequence[str]) -> str:
    """Returns a text with the first problems and the number of remaining problems."""
    text = ", ".join(problems[:_MAX_PROBLEMS])
    return f"{text}, and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else text


PATH: KeyPath = ("model", "weights")

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""The suffix of a buffer in old files, which transformers ignores too."""

_MAX_PROBLEMS = 4


def check_files(files: TensorReader, config: LlamaConfig) -> list[str]:
    """Returns a message that lists missing tensors, unknown tensors, wrong shapes and wrong dtypes, or an empty list."""
    assert config.vocab_size is not None, "`weights` sets the size of the vocabulary"
    hf_shapes, hf_names = param_shapes(config, config.vocab_size), dict(name_pairs(config))
    expected = {stored_name: hf_shapes[hf_names[name]] for name, stored_name in stored_name_pairs(config)}
    optional = {HF_HEAD} if config.tie_embeddings else set()
    infos = {name: files.kind(name) for name in files.names}
    problems = [f"{name!r} is missing" for name in expected if name not in infos]
    for name, info in infos.items():
        if name in expected and info.shape != expected[name]:
            problems.append(f"{name!r} must have the shape {list(expected[name])}, but has {list(info.shape)}")
        elif name in expected and info.dtype not in FLOATS:
            problems.append(f"{name!r} must be {' or '.join(FLOATS)}, but is {info.dtype}")
        elif name not in expected and name not in optional and not name.endswith(_IGNORED_SUFFIX):
            problems.append(f"{name!r} is unknown")
    if not problems:
        return []
    return [f"the files in `{config.weights}` do not match this model: {_join_problems(problems)}"]


class FileInitializer:
    """Sets the parameters of modules to the values in the files of `config.weights`, converted to the parameters' dtypes.

    Raises PlanError "model-weights" if the files cannot be read or belong to another model.
    """

    def __init__(self, config: LlamaConfig) -> None:
        assert config.weights is not None, config
        try:
            files = open_weights(config.weights)
        except RunError as error:
            raise _weights_error(error.diagnostics[0].message, error.diagnostics[0].hint) from None
        if problems := check_files(files, config):
            raise _weights_error(problems[0])
        _check_tied_head(files, config)
        self._files, self._stored_names = files, dict(stored_name_pairs(config))
        self._folder = config.weights

    def __call__(self, module: nn.Module, name: str) -> None:
        """Reads the parameters of `module` without submodules. Raises RunError "weight-files" if a shape has changed."""
        for attribute, parameter in module.named_parameters(recurse=False):
            if (stored_name := self._stored_names.get(f"{name}.{attribute}")) is not None:
                value = self._files.tensor(stored_name)
                if value.shape != parameter.shape:
                    shapes = f"was {list(parameter.shape)}, but is now {list(value.shape)}"
                    raise RunError("weight-files", f"the shape of {stored_name!r} in `{self._folder}` {shapes}")
                parameter.copy_(value)


def _check_tied_head(files: TensorReader, config: LlamaConfig) -> None:
    """Raises PlanError "model-weights" if the files of a tied model have a head that differs from the embedding."""
    if not config.tie_embeddings or HF_HEAD not in files.names:
        return
    embedding = dict(name_pairs(config))[EMBEDDING]
    if not torch.equal(files.tensor(HF_HEAD), files.tensor(embedding)):
        message = f"tie_word_embeddings is true, but {HF_HEAD!r} and {embedding!r} have different values"
        raise _weights_error(message, "remove the head from the files, or set `tie_word_embeddings` to false in `config.json`")


def _weights_error(message: str, hint: str | None = None) -> PlanError:
    return PlanError("model-weights", message, path=PATH, hint=hint)


def hugging_face(plan: Plan, source: TensorReader) -> HuggingFaceModel:
    """Returns the transformers model of a plan with the weights in `source`. Implements `ModelRecord.hugging_face`.

    Raises UsageError "export-format" for options that no transformers model has, and RunError "weights-mismatch" if the weights
    do not match the plan.
    """
    config = plan.model.config
    assert isinstance(config, LlamaConfig), config
    hf_names = {name: hf_name for name, hf_name in name_pairs(config) if name != HEAD or not config.tie_embeddings}
    check_names(source.names, hf_names, optional=set())
    vocab_size, _ = source.kind(EMBEDDING).shape
    try:
        content = to_hf_config(config, vocab_size)
    except ValueError as error:
        raise UsageError("export-format", str(error)) from None
    shapes = param_shapes(config, vocab_size)
    for name, hf_name in hf_names.items():
        shape = source.kind(name).shape
        if shape != shapes[hf_name]:
            message = f"{name!r} must have the shape {list(shapes[hf_name])} of the plan, but has {list(shape)}"
            raise RunError("weights-mismatch", message)
    return describe_model({**content, **_token_keys(plan)}, hf_names, plan, source)


def _token_keys(plan: Plan) -> dict[str, Any]:
    """Returns special token ids and the maximum sequence length, from the run's initial weights or from the data."""
    keys: dict[str, Any] = dict.fromkeys(IDS)
    sequence = getattr(plan.data.config, "sequence", None)
    if sequence is not None:
        keys["max_position_embeddings"] = sequence
    folder = start_folder(plan)
    if folder is not None and (folder / CONFIG).is_file():
        content = read_config(folder).content
        keys |= {name: content[name] for name in IDS if content.get(name) is not None}
        max_positions = content.get("max_position_embeddings")
        if max_positions is not None:
            keys["max_position_embeddings"] = max(max_positions, sequence or 0)
    return keys
