"""Reads the weights of `models.llama` from safetensors files, and exports a run as a transformers Llama, Qwen2 or Qwen3.

Rotary pairs, heads and matrices have the same layout as in transformers, so only the names of parameters are converted. As in
the files that `save_pretrained` writes, a tied head has no separate tensor. A rank reads only the tensors of its own layers,
one at a time.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sley_core.api.files import FLOATS, IDS, HuggingFaceModel, TensorReader, describe_model, open_weights, run_of, start_folder
from sley_core.api.plan import Plan
from sley_core.api.state import shorten_names
from sley_core.errors import PlanError, RunError, UsageError
from sley_models.hf_config import CONFIG_NAME, read_config, to_hf_config
from sley_models.llama import Block, Embed, Head, build_on_meta
from sley_models.plugin import LlamaConfig

# The names of the embedding and the head, in runs and in Hugging Face files.
EMBEDDING_NAME = "embed.tokens.weight"
HEAD_NAME = "head.output.weight"
HF_HEAD_NAME = "lm_head.weight"
_OUTER_NAMES = {EMBEDDING_NAME: "model.embed_tokens.weight", "head.norm.weight": "model.norm.weight", HEAD_NAME: HF_HEAD_NAME}
_MODULE_NAMES = {  # Hugging Face's name of each module of a block
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def list_param_shapes(config: LlamaConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter of the model, by its name in runs. A tied head is left out."""
    block = build_on_meta(Block, config)
    layers = {"embed": build_on_meta(Embed, vocab_size, config.hidden)}
    layers |= {f"blocks.{index}": block for index in range(config.num_layers)}
    layers["head"] = build_on_meta(Head, config, vocab_size)
    shapes = {f"{layer}.{name}": tuple(p.shape) for layer, module in layers.items() for name, p in module.named_parameters()}
    return {name: shape for name, shape in shapes.items() if not (config.tie_embeddings and name == HEAD_NAME)}


def hf_name(name: str) -> str:
    """Returns the name in Hugging Face files of the parameter that runs call `name`."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    _, block, path = name.split(".", 2)
    module, _, attribute = path.rpartition(".")
    return f"model.layers.{block}.{_MODULE_NAMES[module]}.{attribute}"


_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""The suffix of a buffer in old files, which transformers and this module ignore."""


class FileInitializer:
    """Sets the parameters of modules to the values in the files of `config.weights`, converted to the parameters' dtypes.
    Raises PlanError "model-weights" if the files cannot be read or belong to another model.
    """

    def __init__(self, config: LlamaConfig) -> None:
        assert config.weights is not None, config
        try:
            files = open_weights(config.weights)
        except RunError as error:
            raise _build_weights_error(error.diagnostics[0].message, error.diagnostics[0].hint) from None
        assert config.vocab_size is not None, "`weights` sets the size of the vocabulary"
        shapes = list_param_shapes(config, config.vocab_size)
        self._stored_names = {name: name if run_of(config.weights) else hf_name(name) for name in shapes}
        if problems := _find_problems(files, {self._stored_names[name]: shape for name, shape in shapes.items()}, config):
            raise _build_weights_error(f"the files in `{config.weights}` do not match this model: {shorten_names(problems)}")
        _check_tied_head(files, config)
        self._files, self._folder = files, config.weights

    def __call__(self, module: nn.Module, name: str) -> None:
        """Reads the parameters of `module` in place, without submodules. Raises RunError "weight-files" if that fails."""
        for attribute, parameter in module.named_parameters(recurse=False):
            if (stored_name := self._stored_names.get(f"{name}.{attribute}")) is not None:
                value = self._files.tensor(stored_name)
                if value.shape != parameter.shape:
                    shapes = f"was {list(parameter.shape)}, but is now {list(value.shape)}"
                    raise RunError("weight-files", f"the shape of {stored_name!r} in `{self._folder}` {shapes}")
                parameter.copy_(value)


def _find_problems(files: TensorReader, shapes: Mapping[str, tuple[int, ...]], config: LlamaConfig) -> list[str]:
    """Returns a text for each missing or unknown tensor, wrong shape and wrong dtype. shapes: the expected shapes by name."""
    kinds = {name: files.info(name) for name in files.names}
    problems = [f"{name!r} is missing" for name in shapes if name not in kinds]
    for name, kind in kinds.items():
        if name in shapes and kind.shape != shapes[name]:
            problems.append(f"{name!r} must have the shape {list(shapes[name])}, but has {list(kind.shape)}")
        elif name in shapes and kind.dtype not in FLOATS:
            problems.append(f"{name!r} must be {' or '.join(FLOATS)}, but is {kind.dtype}")
        elif name not in shapes and not (config.tie_embeddings and name == HF_HEAD_NAME) and not name.endswith(_IGNORED_SUFFIX):
            problems.append(f"{name!r} is unknown")
    return problems


def _check_tied_head(files: TensorReader, config: LlamaConfig) -> None:
    """Raises PlanError "model-weights" if the files of a tied model have a head that differs from the embedding."""
    if not config.tie_embeddings or HF_HEAD_NAME not in files.names:
        return
    embedding = hf_name(EMBEDDING_NAME)
    if not torch.equal(files.tensor(HF_HEAD_NAME), files.tensor(embedding)):
        message = f"tie_word_embeddings is true, but {HF_HEAD_NAME!r} and {embedding!r} have different values"
        hint = "remove the head from the files, or set `tie_word_embeddings` to false in `config.json`"
        raise _build_weights_error(message, hint)


def _build_weights_error(message: str, hint: str | None = None) -> PlanError:
    return PlanError("model-weights", message, path=("model", "weights"), hint=hint)


def build_hugging_face_model(plan: Plan, source: TensorReader) -> HuggingFaceModel:
    """Returns the transformers model of a plan with the weights in `source`. Implements `ModelRecord.hugging_face`. Raises
    UsageError "export-format" if no transformers model has the options of the plan, and RunError "weights-mismatch" if the
    weights do not match the plan.
    """
    config = plan.model.config
    assert isinstance(config, LlamaConfig), config
    if EMBEDDING_NAME not in source.names:
        raise RunError("weights-mismatch", f"the weights are not those of a Llama: {EMBEDDING_NAME!r} is missing")
    vocab_size, _ = source.info(EMBEDDING_NAME).shape
    shapes = list_param_shapes(config, vocab_size)
    if problems := _find_problems(source, shapes, config):
        message = f"the weights do not match this Llama: {shorten_names(problems)}"
        raise RunError("weights-mismatch", message, hint="use the num_layers and tie_embeddings of the model that was saved")
    try:
        content = to_hf_config(config, vocab_size)
    except ValueError as error:
        raise UsageError("export-format", str(error)) from None
    return describe_model({**content, **_find_token_keys(plan)}, {name: hf_name(name) for name in shapes}, plan, source)


def _find_token_keys(plan: Plan) -> dict[str, Any]:
    """Returns the keys of `config.json` for special token ids and for the maximum sequence length. The ids come from the model
    from which the run starts; without such a model, they are None. The length is the larger of the data's sequence length and
    this model's maximum.
    """
    keys: dict[str, Any] = dict.fromkeys(IDS)
    sequence = getattr(plan.data.config, "sequence", None)
    if sequence is not None:
        keys["max_position_embeddings"] = sequence
    folder = start_folder(plan)
    if folder is not None and (folder / CONFIG_NAME).is_file():
        content = read_config(folder).content
        keys |= {name: content[name] for name in IDS if content.get(name) is not None}
        max_positions = content.get("max_position_embeddings")
        if max_positions is not None:
            keys["max_position_embeddings"] = max(max_positions, sequence or 0)
    return keys
