"""Describes the model of Hugging Face transformers with a run's weights, and writes its configs and tokenizer."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.errors import SleyError, UsageError
from sley_core.records import AdaptersRecord, DatasetRecord, import_object
from sley_core.run_files import CHECKPOINTS, COPIES, PLAN, WEIGHTS
from sley_core.weight_files.read import TOKENIZER, TensorReader, WeightFiles, disable_settings
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
    """Describes the transformers model that has a run's weights.

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


def run_of(path: Path) -> Path | None:
    """Returns the folder of the run if `path` is this folder, or a checkpoint such as `runs/x/checkpoints/step-00000100`; None
    for any other folder.
    """
    run = path.absolute().parent.parent if path.parent.name == CHECKPOINTS else path
    return run if (run / PLAN).is_file() else None


def config_folder(path: Path) -> Path:
    """Returns the folder with the `config.json` of the model in `path`, as in `open_weights`."""
    run = run_of(path)
    return path if run is None else run / COPIES["model", "weights"]


def open_weights(path: Path) -> TensorReader:
    """Returns the weights in `path`: a folder of `save_pretrained`, a run's folder with its final weights, or a checkpoint in
    such a folder. Adapters of the run are merged into them. Imports torch for checkpoints and adapters.

    Raises RunError "weight-files" if the files cannot be read, and the errors of checkpoints, plans and merges.
    """
    run = run_of(path)
    if run is None:
        return WeightFiles(path)
    if run == path and "adapters" not in tomllib.loads((run / PLAN).read_text("utf-8")):
        return WeightFiles(run / WEIGHTS)
    reader: TensorReader = import_object("sley_core.run_state.state:weights_of_run")(path, run)
    return reader


def merged_weights(plan: Plan, source: TensorReader) -> TensorReader:
    """Returns the weights in `source` with the run's adapters merged in. Raises UsageError "export-adapters" if it has none."""
    record = None if plan.adapters is None else plan.adapters.record
    if not isinstance(record, AdaptersRecord) or record.merge is None:
        hint = "use `--format safetensors`"
        raise UsageError("export-adapters", "the run has no adapters that could be merged", hint=hint)
    reader: TensorReader = record.load(record.merge)(plan, source)
    return reader


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
