"""Reads folders of safetensors files, which, unlike pickles, contain no code. Imports torch only to read values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open

from sley_core.errors import RunError, shorten_names

if TYPE_CHECKING:
    from torch import Tensor


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of initial weights, by their names in safetensors."""

_MAX_INDEX_BYTES = 1 << 27


class TensorKind(NamedTuple):
    """The dtype and shape of a tensor. dtype: its name in safetensors (`F32`)."""

    dtype: str
    shape: tuple[int, ...]


class TensorReader(Protocol):
    """Reads whole tensors, one at a time, from a folder of files or a checkpoint."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors."""

    def kind(self, name: str) -> TensorKind:
        """Returns the dtype and shape of the tensor `name`, without reading its values."""

    def tensor(self, name: str) -> Tensor:
        """Returns a copy of the whole tensor `name`, on the host."""


class WeightFiles:
    """Reads the tensors in `folder`: those in `model.safetensors`, or else those in the files that the index names.

    Raises RunError "weight-files" if there are no such files, if a file is missing, truncated or not a safetensors file, or if
    the index does not match the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = None if (folder / SINGLE).is_file() else _read_index(folder)
        files = [SINGLE] if index is None else list(dict.fromkeys(index.values()))
        self._stored: dict[str, tuple[Path, TensorKind]] = {}
        locations: set[tuple[str, str]] = set()
        for file in files:
            tensors = _read_header(folder / file)
            locations |= {(name, file) for name in tensors}
            self._stored |= {name: (folder / file, kind) for name, kind in tensors.items()}
        if index is not None and (differences := sorted({name for name, _ in locations ^ set(index.items())})):
            names = shorten_names(list(map(repr, differences)))
            raise weight_files_error(f"`{folder / INDEX}` does not name the file of each tensor and no other: {names}")

    @property
    def names(self) -> Sequence[str]:
        return list(self._stored)

    def kind(self, name: str) -> TensorKind:
        return self._stored[name][1]

    def tensor(self, name: str) -> Tensor:
        return read_tensor(self._stored[name][0], name)


def read_tensor(file: Path, name: str) -> Tensor:
    """Returns a copy of the tensor `name`, so `file` does not stay mapped. Raises RunError "weight-files" if unreadable."""
    with open_safetensors(file, "pt") as content:
        tensor: Tensor = content.get_tensor(name).clone()
    return tensor


@contextmanager
def open_safetensors(file: Path, framework: str) -> Iterator[Any]:
    """Opens a safetensors file for the block. File and safetensors errors become RunError "weight-files"."""
    try:
        with safe_open(file, framework=framework) as content:
            yield content
    except (SafetensorError, OSError) as error:
        is_missing = isinstance(error, FileNotFoundError) or not file.is_file()
        reason = "the file does not exist" if is_missing else f"it is damaged, or not a safetensors file: {error}"
        raise weight_files_error(f"cannot read `{file}`: {reason}") from None


def _read_header(file: Path) -> dict[str, TensorKind]:
    with open_safetensors(file, "numpy") as content:
        slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # it is not a mapping
        return {name: TensorKind(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.is_file():
        pickle = next((file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(pattern))), None)
        hint = f"save `{pickle}` again with `safe_serialization`, since it may run code when it is read" if pickle else None
        raise weight_files_error(f"`{folder}` has neither `{SINGLE}` nor `{INDEX}`", hint)
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


TOKENIZER = (
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
