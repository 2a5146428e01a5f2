"""Exports a run of `models.llama` as a Llama, Qwen2 or Qwen3 of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sley_core.api.files import IDS, HuggingFaceModel, describe_model, start_folder
from sley_core.errors import RunError, UsageError
from sley_models import hf
from sley_models.config import LlamaConfig
from sley_models.hf_config import CONFIG, read_config, to_hf_config

if TYPE_CHECKING:
    from sley_core.api.files import TensorReader
    from sley_core.api.plan import Plan


def hugging_face(plan: Plan, source: TensorReader) -> HuggingFaceModel:
    """Returns the transformers model of a plan with the weights in `source`. Implements `ModelRecord.hugging_face`.

    Raises UsageError "export-format" for options that no transformers model has, and RunError "weights-mismatch" if the weights
    do not match the plan.
    """
    config = plan.model.config
    assert isinstance(config, LlamaConfig), config
    hf_names = {name: hf_name for name, hf_name in hf.name_pairs(config) if name != hf.HEAD or not config.tie_embeddings}
    hf.check_names(source.names, hf_names, optional=set())
    vocab_size, _ = source.kind(hf.EMBEDDING).shape
    try:
        content = to_hf_config(config, vocab_size)
    except ValueError as error:
        raise UsageError("export-format", str(error)) from None
    shapes = hf.param_shapes(config, vocab_size)
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
