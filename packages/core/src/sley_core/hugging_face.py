"""Describes the model of Hugging Face transformers with a run's weights, and writes its configs and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.errors import SleyError
from sley_core.records import DatasetRecord
from sley_core.run_files import COPIES, PLAN, WEIGHTS
from sley_core.weight_files.read import TOKENIZER, TensorReader, disable_settings
from sley_core.whole_files import replace_atomically

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

CONFIG = "config.json"
GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The keys of both configs that name special tokens."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class HuggingFaceModel:
    """Describes the model of transformers that has a run's weights.

    config: the content of `config.json`. names: the name of each weight in transformers' model, by its name in the run, without
    tied heads. files: reads the tensors of the weight files, if these have other names or layouts.
    """

    config: Mapping[str, Any]
    names: Mapping[str, str]
    files: TensorReader | None = None


def describe_model(config: Mapping[str, Any], names: Mapping[str, str], plan: Plan, source: TensorReader) -> HuggingFaceModel:
    """Returns the description with the keys that the weights and the plan's data determine: dtype and ids of special tokens."""
    dtype = _DTYPES[source.kind(next(iter(names))).dtype]
    content = {**config, "torch_dtype": dtype, "dtype": dtype}  # transformers 4 reads `torch_dtype`, transformers 5 `dtype`
    if content.get("eos_token_id") is None:
        content["eos_token_id"] = _end_token(plan)
    return HuggingFaceModel(content, names)


def generation_config(plan: Plan, model: HuggingFaceModel) -> dict[str, Any]:
    """Returns the content of `generation_config.json`: that of the first weights, which also ends a text as the data do."""
    content: dict[str, Any] = {}
    folder = start_folder(plan)
    if folder is not None and (folder / GENERATION).is_file():
        content = json.loads((folder / GENERATION).read_text("utf-8"))
    content = {key: model.config[key] for key in IDS if model.config.get(key) is not None} | content
    ends: list[int] = []
    for value in (content.get("eos_token_id"), model.config.get("eos_token_id"), _end_token(plan)):
        values = value if isinstance(value, list) else [value]
        ends += [token for token in values if token is not None and token not in ends]
    if ends:
        content["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return content


def start_folder(plan: Plan) -> Path | None:
    """Returns the folder with the small files of the model from which the run started; None if it has no such folder."""
    config = plan.model.config
    for key in ("weights", "config"):
        path = getattr(config, key, None)
        if isinstance(path, Path) and path.is_dir():
            return config_folder(path)
    return None


def config_folder(path: Path) -> Path:
    """Returns the folder with the `config.json` of the model in `path`, a folder of `save_pretrained` or of a run."""
    return path / COPIES["model", "weights"] if (path / PLAN).is_file() else path


def weights_folder(path: Path) -> Path:
    """Returns the folder with the weight files of the model in `path`, which for a run folder are its final weights."""
    return path / WEIGHTS if (path / PLAN).is_file() else path


def _end_token(plan: Plan) -> int | None:
    """Returns the id of the token with which a text of the plan's data ends; None if it is not known."""
    record, end = plan.data.record, getattr(plan.data.config, "end_of_document", None)
    if isinstance(record, DatasetRecord) and record.text_ids is not None:
        try:
            token: int | None = record.load(record.text_ids)(plan.data.config, None).end
        except SleyError:  # the tokenizer cannot be read any more
            return None
        return token
    return end if isinstance(end, int) else None


def tokenizer_files(plan: Plan) -> Iterator[tuple[Path, str]]:
    """Yields the files of the data's tokenizer with their names; those of the first weights if the data have no tokenizer."""
    data = plan.data.config
    tokenizer, template = getattr(data, "tokenizer", None), getattr(data, "template", None)
    if tokenizer is not None and tokenizer.is_file():
        yield tokenizer, TOKENIZER[0]
    folder = tokenizer or (None if hasattr(data, "tokenizer") else start_folder(plan))
    names = [name for name in TOKENIZER if template is None or not name.startswith("chat_template")]
    yield from ((folder / name, name) for name in names if folder is not None and (folder / name).is_file())
    if template is not None:
        yield template, "chat_template.jinja"


def write_other_files(plan: Plan, model: HuggingFaceModel, folder: Path) -> None:
    """Writes both configs, and copies the tokenizer, changed so that it makes the tokens of training."""
    contents = {CONFIG: dict(model.config), GENERATION: generation_config(plan, model)}
    for name, content in contents.items():
        if content:
            with replace_atomically(folder / name) as file:
                file.write(json.dumps(content, indent=2).encode() + b"\n")
    for source, name in tokenizer_files(plan):
        shutil.copyfile(source, folder / name)
    if (path := folder / TOKENIZER[0]).is_file():
        text = path.read_text("utf-8")
        if (changed := disable_settings(text)) != text:
            with replace_atomically(path) as file:
                file.write(changed.encode())
