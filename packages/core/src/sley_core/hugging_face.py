"""Describes the Hugging Face transformers model that has a run's weights, and opens the weights of such models and of runs."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sley_core.errors import SleyError, UsageError
from sley_core.files import CHECKPOINTS, COPIES, PLAN, WEIGHTS
from sley_core.plan.plan import Plan
from sley_core.records import AdaptersRecord, DatasetRecord, import_object
from sley_core.weight_files.read import TensorReader, WeightFiles

CONFIG = "config.json"
GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The keys of `config.json` and `generation_config.json` that name special tokens."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class HuggingFaceModel:
    """Describes the transformers model that has a run's weights.

    config: the content of `config.json`. names: the name of each weight in transformers' model, by its name in the run; tied
    heads are left out. files: reads the tensors to write into the weight files, if they differ from the run's in names or
    layout; else None.
    """

    config: Mapping[str, Any]
    names: Mapping[str, str]
    files: TensorReader | None = None


def describe_model(config: Mapping[str, Any], names: Mapping[str, str], plan: Plan, source: TensorReader) -> HuggingFaceModel:
    """Returns the description with `names` and `config`, to which it adds the weights' dtype and, if missing, the end token."""
    dtype = _DTYPES[source.kind(next(iter(names))).dtype]
    content = {**config, "torch_dtype": dtype, "dtype": dtype}  # transformers 4 reads `torch_dtype`, transformers 5 `dtype`
    if content.get("eos_token_id") is None:
        content["eos_token_id"] = end_token(plan)
    return HuggingFaceModel(content, names)


def start_folder(plan: Plan) -> Path | None:
    """Returns the folder with the small files of the model from which the run started, or None if there is none."""
    config = plan.model.config
    for key in ("weights", "config"):
        path = getattr(config, key, None)
        if isinstance(path, Path) and path.is_dir():
            return config_folder(path)
    return None


def run_of(path: Path) -> Path | None:
    """Returns the run's folder if `path` is one, or a checkpoint in one (`runs/x/checkpoints/step-00000100`); else None."""
    run = path.absolute().parent.parent if path.parent.name == CHECKPOINTS else path
    return run if (run / PLAN).is_file() else None


def config_folder(path: Path) -> Path:
    """Returns the folder with the `config.json` of the model in `path`, which may be any path that `open_weights` accepts."""
    run = run_of(path)
    return path if run is None else run / COPIES["model", "weights"]


def open_weights(path: Path) -> TensorReader:
    """Returns a reader of the weights in `path`: a folder of `save_pretrained`, a run's folder with its final weights, or a
    checkpoint in a run's folder. The run's adapters, if any, are merged into the weights. Imports torch for checkpoints and
    adapters.

    Raises RunError "weight-files" if the files cannot be read, and the errors of reading checkpoints, loading plans and merging
    adapters.
    """
    run = run_of(path)
    if run is None:
        return WeightFiles(path)
    if run == path and "adapters" not in tomllib.loads((run / PLAN).read_text("utf-8")):
        return WeightFiles(run / WEIGHTS)
    reader: TensorReader = import_object("sley_core.saved_weights:open_run_weights")(path, run)
    return reader


def merge_adapters(plan: Plan, source: TensorReader) -> TensorReader:
    """Returns a reader of the weights in `source` with the run's adapters merged in.

    Raises UsageError "export-adapters" if the plan has no adapters that can be merged.
    """
    record = None if plan.adapters is None else plan.adapters.record
    if not isinstance(record, AdaptersRecord) or record.merge is None:
        hint = "use `--format safetensors`"
        raise UsageError("export-adapters", "the run has no adapters that could be merged", hint=hint)
    reader: TensorReader = record.load(record.merge)(plan, source)
    return reader


def end_token(plan: Plan) -> int | None:
    """Returns the id of the token that ends each text in the plan's data; None if it is not known."""
    record, end = plan.data.record, getattr(plan.data.config, "end_of_document", None)
    if isinstance(record, DatasetRecord) and record.text_ids is not None:
        try:
            token: int | None = record.load(record.text_ids)(plan.data.config, None).end
        except SleyError:  # the tokenizer cannot be read any more
            return None
        return token
    return end if isinstance(end, int) else None
