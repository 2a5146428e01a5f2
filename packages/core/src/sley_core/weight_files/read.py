"""Reads weights of runs and of Hugging Face models, and describes the transformers model with a run's weights. Imports torch
only to read values.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open

from sley_core.errors import RunError, SleyError, UsageError, shorten_names
from sley_core.files import CHECKPOINTS_FOLDER, COPIED_FILES, PLAN_FILE, WEIGHTS_FOLDER
from sley_core.plan.plan import Plan
from sley_core.records import AdaptersRecord, DatasetRecord, import_object

if TYPE_CHECKING:
    from torch import Tensor


SINGLE_FILE = "model.safetensors"  # the name that transformers gives to a single weight file
INDEX_FILE = "model.safetensors.index.json"  # the name of the index of several weight files
FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of initial weights, by their names in safetensors."""

_MAX_INDEX_BYTES = 1 << 27  # an index of a million tensors is smaller


class TensorInfo(NamedTuple):
    """The dtype and shape of a tensor. dtype: its name in safetensors (`F32`)."""

    dtype: str
    shape: tuple[int, ...]


class TensorReader(Protocol):
    """Reads whole tensors, one at a time, from a folder of files or a checkpoint."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors."""

    def info(self, name: str) -> TensorInfo:
        """Returns the dtype and shape of the tensor `name`, without reading its values."""

    def tensor(self, name: str) -> "Tensor":
        """Returns a copy of the whole tensor `name`, on the host."""


class WeightFiles:
    """Reads the tensors in `folder` from `model.safetensors`, or else from the files that the index names.

    Raises RunError "weight-files" if there are no such files, if a file is missing, truncated or not a safetensors file, or if
    the index does not match the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = None if (folder / SINGLE_FILE).is_file() else _read_index(folder)
        files = [SINGLE_FILE] if index is None else list(dict.fromkeys(index.values()))
        self._stored: dict[str, tuple[Path, TensorInfo]] = {}
        locations: set[tuple[str, str]] = set()
        for file in files:
            tensors = _read_header(folder / file)
            locations |= {(name, file) for name in tensors}
            self._stored |= {name: (folder / file, kind) for name, kind in tensors.items()}
        if index is not None and (differences := sorted({name for name, _ in locations ^ set(index.items())})):
            names = shorten_names(list(map(repr, differences)))
            raise weight_files_error(f"`{folder / INDEX_FILE}` does not fit the tensors in the files: {names}")

    @property
    def names(self) -> Sequence[str]:
        return list(self._stored)

    def info(self, name: str) -> TensorInfo:
        return self._stored[name][1]

    def tensor(self, name: str) -> "Tensor":
        with open_safetensors(self._stored[name][0], "pt") as content:
            tensor: Tensor = content.get_tensor(name).clone()  # a copy, so the file does not stay mapped
        return tensor


@contextmanager
def open_safetensors(file: Path, framework: str) -> Iterator[Any]:
    """Yields the open safetensors file `file`. framework: "pt" or "numpy", the library whose tensors the file returns. Raises
    RunError "weight-files" if the file cannot be opened, or if the block fails with an OSError or a SafetensorError.
    """
    try:
        with safe_open(file, framework=framework) as content:
            yield content
    except (SafetensorError, OSError) as error:
        is_missing = isinstance(error, FileNotFoundError) or not file.is_file()
        reason = "the file does not exist" if is_missing else f"it is damaged, or not a safetensors file: {error}"
        raise weight_files_error(f"cannot read `{file}`: {reason}") from None


def _read_header(file: Path) -> dict[str, TensorInfo]:
    with open_safetensors(file, "numpy") as content:
        slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # it is not a mapping
        return {name: TensorInfo(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def _read_index(folder: Path) -> dict[str, str]:
    """Returns the file name of each tensor, by name, from the index in `folder`. Raises RunError "weight-files"."""
    path = folder / INDEX_FILE
    if not path.is_file():
        pickle = next((file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(pattern))), None)
        hint = (
            f"save `{pickle}` again with `safe_serialization`, since a pickle file can run code when it is read"
            if pickle
            else None
        )
        raise weight_files_error(f"`{folder}` has neither `{SINGLE_FILE}` nor `{INDEX_FILE}`", hint)
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"it is larger than {_MAX_INDEX_BYTES >> 20} MB")
        files = json.loads(path.read_text("utf-8"))["weight_map"]
        if not files or not all(isinstance(file, str) for file in files.values()):
            raise ValueError("its `weight_map` names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = "it has no `weight_map`" if isinstance(error, KeyError) else str(error)
        raise weight_files_error(f"cannot read `{path}`: {reason}") from None
    if foreign := sorted({file for file in files.values() if Path(file).name != file}):
        raise weight_files_error(f"`{path}` names `{foreign[0]}`, which is not in its folder")
    return dict(files)


def weight_files_error(message: str, hint: str | None = None) -> RunError:
    """Returns RunError "weight-files" with `message` and `hint`."""
    return RunError("weight-files", message, hint=hint)


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""The names of the files that `save_pretrained` of a tokenizer may write."""


RANDOM_SETTINGS = ("dropout", "alpha", "nbest_size")
"""The settings of BPE and Unigram models that make tokenization random."""


def deterministic_tokenizer_json(text: str) -> str:
    """Returns the text of a `tokenizer.json` with truncation, padding and `RANDOM_SETTINGS` turned off, as in training."""
    try:
        content = json.loads(text)
        settings = {key: None for key in ("truncation", "padding") if content.get(key) is not None}
        model_settings = {key: None for key in RANDOM_SETTINGS if content["model"].get(key) is not None}
    except (ValueError, AttributeError, KeyError, TypeError):
        return text  # the tokenizer's loader reports the error
    if not settings and not model_settings:
        return text
    model = {**content["model"], **model_settings}
    return json.dumps({**content, **settings, "model": model}, ensure_ascii=False, indent=2)


CONFIG_FILE = "config.json"  # transformers' name of a model's config
GENERATION_CONFIG_FILE = "generation_config.json"  # transformers' name of the options for sampling
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The keys of `config.json` and `generation_config.json` with the ids of special tokens."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # from safetensors to torch


@dataclass(frozen=True)
class HuggingFaceModel:
    """Describes the transformers model that has a run's weights. config: the content of `config.json`. names: the name of each
    weight in transformers' model, by its name in the run, without tied heads. files: a reader of the tensors for the weight
    files; None if their names and shapes are those of the run.
    """

    config: Mapping[str, Any]
    names: Mapping[str, str]
    files: TensorReader | None = None


def describe_model(config: Mapping[str, Any], names: Mapping[str, str], plan: Plan, source: TensorReader) -> HuggingFaceModel:
    """Returns the model with `names` and `config`; adds the dtype of the weights and, if missing, the id of the end token."""
    dtype = _DTYPES[source.info(next(iter(names))).dtype]
    content = {**config, "torch_dtype": dtype, "dtype": dtype}  # transformers 4 reads `torch_dtype`, transformers 5 `dtype`
    if content.get("eos_token_id") is None:
        content["eos_token_id"] = end_token_id(plan)
    return HuggingFaceModel(content, names)


def start_folder(plan: Plan) -> Path | None:
    """Returns the folder with the `config.json` of the model from which the run started, or None if there is no such folder."""
    config = plan.model.config
    for key in ("weights", "config"):
        path = getattr(config, key, None)
        if isinstance(path, Path) and path.is_dir():
            return config_folder(path)
    return None


def run_of(path: Path) -> Path | None:
    """Returns `path` if it is a run folder, the run folder of a checkpoint `path`, or None for any other path."""
    run = path.absolute().parent.parent if path.parent.name == CHECKPOINTS_FOLDER else path
    return run if (run / PLAN_FILE).is_file() else None


def config_folder(path: Path) -> Path:
    """Returns the folder with the `config.json` of the model in `path`, which may be any argument of `open_weights`."""
    run = run_of(path)
    return path if run is None else run / COPIED_FILES["model", "weights"]


def open_weights(path: Path) -> TensorReader:
    """Returns a reader of the weights in `path`: a folder that `save_pretrained` wrote, a run's folder with its final weights,
    or a checkpoint in a run's folder. Merges the run's adapters into the weights. Imports torch for checkpoints and adapters.

    Raises RunError "weight-files" if the files cannot be read, and the errors of reading checkpoints, loading plans and merging
    adapters.
    """
    run = run_of(path)
    if run is None:
        return WeightFiles(path)
    if run == path and "adapters" not in tomllib.loads((run / PLAN_FILE).read_text("utf-8")):
        return WeightFiles(run / WEIGHTS_FOLDER)
    reader: TensorReader = import_object("sley_core.checkpointing:open_run_weights")(path, run)
    return reader


def merge_adapters(plan: Plan, source: TensorReader) -> TensorReader:
    """Returns a reader of the weights in `source` with the run's adapters merged in. Raises UsageError "export-adapters" if the
    plan has no adapters that can be merged.
    """
    record = None if plan.adapters is None else plan.adapters.record
    if not isinstance(record, AdaptersRecord) or record.merge is None:
        hint = "use `--format safetensors`"
        raise UsageError("export-adapters", "the run has no adapters that could be merged", hint=hint)
    reader: TensorReader = record.load(record.merge)(plan, source)
    return reader


def end_token_id(plan: Plan) -> int | None:
    """Returns the id of the token that ends each text in the plan's data; None if it is not known."""
    record, end = plan.data.record, getattr(plan.data.config, "end_of_document", None)
    if isinstance(record, DatasetRecord) and record.text_ids is not None:
        end = None
        with suppress(SleyError):  # the tokenizer cannot be read any more
            end = record.load(record.text_ids)(plan.data.config, None).end
    return end if isinstance(end, int) else None
