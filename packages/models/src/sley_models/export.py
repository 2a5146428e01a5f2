"""A run of `models.llama` as transformers reads it: its names, its `config.json`, and the tokenizer of the data."""

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
    from sley_core.api.files import Tensors
    from sley_core.api.plan import Plan

GENERATION = "generation_config.json"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def export_hugging_face(plan: Plan, source: Tensors, out: Path, max_file_bytes: int) -> list[str]:
    """Writes the weights in `source`, by names of the registry, as transformers' Llama, Qwen2 or Qwen3 into the new folder
    `out`.

    Returns the names of its files of weights. Raises UsageError "export-format" for another model than `models.llama`, or one
    with options that no such model has; RunError "weights-mismatch" if the weights are not the plan's.
    """
    config = plan.model.config
    assert isinstance(config, LlamaConfig), config
    known = {ours: theirs for ours, theirs in hf.names(config) if ours != hf.HEAD or not config.tie_embeddings}
    hf.check_names(source.names, known, optional=set())
    dtype, (vocab_size, _) = source.kind(hf.EMBEDDING)
    try:
        content = to_hf_config(config, vocab_size)
    except ValueError as error:
        raise UsageError("export-format", str(error)) from None
    wanted = hf.shapes(config, vocab_size)
    if wrong := [name for name in known if source.kind(name).shape != wanted[known[name]]]:
        shapes = f"{list(source.kind(wrong[0]).shape)} and not {list(wanted[known[wrong[0]]])}"
        raise RunError("weights-mismatch", f"{wrong[0]!r} of the run's weights is {shapes}, as its plan says")
    # transformers 4 reads the older of both names
    content |= {"torch_dtype": _DTYPES[dtype], "dtype": _DTYPES[dtype], **_known_of_run(plan, config)}
    return write_tensors(out, source, known.items(), max_file_bytes, partial(_write_more, plan, content))


def _known_of_run(plan: Plan, config: LlamaConfig) -> dict[str, Any]:
    """Returns the longest sequence and the ids of special tokens: of the model that the run started from, else of its data."""
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
        rest = read_config(config.weights).rest
        keys |= {name: rest[name] for name in IDS if rest.get(name) is not None}
        before = rest.get("max_position_embeddings")
        if before is not None:
            keys["max_position_embeddings"] = max(before, sequence or 0)
    return keys


def _token_id(path: Path, token: str) -> int | None:
    """Returns the id of `token` in a `tokenizer.json`; None if that cannot be read any more."""
    try:
        content = json.loads((path / TOKENIZER[0] if path.is_dir() else path).read_text("utf-8"))
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
        vocabulary = content["model"]["vocab"]
        known = vocabulary if isinstance(vocabulary, dict) else {entry[0]: at for at, entry in enumerate(vocabulary)}
        return added.get(token, known.get(token))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_more(plan: Plan, content: dict[str, Any], folder: Path) -> None:
    """Writes `config.json`, and copies the tokenizer, which then makes the tokens that training had."""
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
    """Yields the tokenizer's files with their names: of the data; of the first weights, where the data are tokens already."""
    data, start = plan.data.config, plan.model.config.weights
    tokenizer = getattr(data, "tokenizer", None)
    if tokenizer is not None and tokenizer.is_file():
        yield tokenizer, TOKENIZER[0]
    folder = tokenizer or (None if hasattr(data, "tokenizer") else start)
    yield from ((folder / name, name) for name in TOKENIZER if folder is not None and (folder / name).is_file())
    if start is not None and (start / GENERATION).is_file():
        yield start / GENERATION, GENERATION
