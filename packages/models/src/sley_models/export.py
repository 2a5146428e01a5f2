"""Exports a run of `models.llama` for transformers: weights under its names, `config.json`, and the tokenizer of the data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.api.files import TOKENIZER, appearing, without_settings
from sley_core.api.weights import write_tensors
from sley_core.errors import RunError, UsageError
from sley_models import hf
from sley_models.config import LlamaConfig
from sley_models.hf_config import CONFIG, IDS, read_config, to_hf_config

if TYPE_CHECKING:
    from sley_core.api.files import TensorReader
    from sley_core.api.plan import Plan

GENERATION = "generation_config.json"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def export_hugging_face(plan: Plan, source: TensorReader, out: Path, max_file_bytes: int) -> list[str]:
    """Writes the weights in `source`, under registry names, as a Llama, Qwen2 or Qwen3 of transformers to the new folder `out`.

    Returns the names of the weight files. Raises UsageError "export-format" for options that no such model has, and RunError
    "weights-mismatch" if the weights do not fit the plan.
    """
    config = plan.model.config
    assert isinstance(config, LlamaConfig), config
    hf_names = {name: hf_name for name, hf_name in hf.name_pairs(config) if name != hf.HEAD or not config.tie_embeddings}
    hf.check_names(source.names, hf_names, optional=set())
    dtype, (vocab_size, _) = source.kind(hf.EMBEDDING)
    try:
        content = to_hf_config(config, vocab_size)
    except ValueError as error:
        raise UsageError("export-format", str(error)) from None
    shapes = hf.shapes(config, vocab_size)
    for name, hf_name in hf_names.items():
        shape = source.kind(name).shape
        if shape != shapes[hf_name]:
            message = f"{name!r} must have the shape {list(shapes[hf_name])} by the plan, but has {list(shape)}"
            raise RunError("weights-mismatch", message)
    # transformers 4 reads `torch_dtype`, transformers 5 reads `dtype`
    content |= {"torch_dtype": _DTYPES[dtype], "dtype": _DTYPES[dtype], **_data_keys(plan, config)}
    return write_tensors(out, source, hf_names.items(), max_file_bytes, partial(_write_other_files, plan, content))


def _data_keys(plan: Plan, config: LlamaConfig) -> dict[str, Any]:
    """Returns the maximal sequence length and the ids of special tokens, from the run's first weights or from its data."""
    keys: dict[str, Any] = dict.fromkeys(IDS)
    data = plan.data.config
    sequence = getattr(data, "sequence", None)
    if sequence is not None:
        keys["max_position_embeddings"] = sequence
    tokenizer, end = getattr(data, "tokenizer", None), getattr(data, "end_of_document", None)
    if isinstance(tokenizer, Path) and isinstance(end, str):
        keys["eos_token_id"] = _token_id(tokenizer, end)
    elif isinstance(end, int):
        keys["eos_token_id"] = end
    if config.weights is not None and (config.weights / CONFIG).is_file():
        content = read_config(config.weights).content
        keys |= {name: content[name] for name in IDS if content.get(name) is not None}
        max_positions = content.get("max_position_embeddings")
        if max_positions is not None:
            keys["max_position_embeddings"] = max(max_positions, sequence or 0)
    return keys


def _token_id(path: Path, token: str) -> int | None:
    """Returns the id of `token` in a `tokenizer.json`, or None if the file cannot be read any more."""
    try:
        content = json.loads((path / TOKENIZER[0] if path.is_dir() else path).read_text("utf-8"))
        added_ids = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
        vocabulary = content["model"]["vocab"]
        ids = vocabulary if isinstance(vocabulary, dict) else {entry[0]: index for index, entry in enumerate(vocabulary)}
        return added_ids.get(token, ids.get(token))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_other_files(plan: Plan, content: dict[str, Any], folder: Path) -> None:
    """Writes `config.json` and copies the tokenizer, changed so that it makes the tokens of training."""
    with appearing(folder / CONFIG) as config:
        config.write(json.dumps(content, indent=2).encode() + b"\n")
    for file, name in _tokenizer_files(plan):
        shutil.copyfile(file, folder / name)
    if (file := folder / TOKENIZER[0]).is_file():
        text = file.read_text("utf-8")
        if (changed := without_settings(text)) != text:
            with appearing(file) as tokenizer:
                tokenizer.write(changed.encode())


def _tokenizer_files(plan: Plan) -> Iterator[tuple[Path, str]]:
    """Yields the files of the data's tokenizer with their names, or if the data are tokens, those of the first weights."""
    data, weights = plan.data.config, plan.model.config.weights
    tokenizer = getattr(data, "tokenizer", None)
    if tokenizer is not None and tokenizer.is_file():
        yield tokenizer, TOKENIZER[0]
    folder = tokenizer or (None if hasattr(data, "tokenizer") else weights)
    yield from ((folder / name, name) for name in TOKENIZER if folder is not None and (folder / name).is_file())
    if weights is not None and (weights / GENERATION).is_file():
        yield weights / GENERATION, GENERATION
