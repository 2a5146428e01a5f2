"""Reads a folder of safetensors files: lists its tensors without reading them, and reads each on request.

Only safetensors, never pickle: such a file holds numbers and no code. Imports torch only where values are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open

from sley_core.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of numbers that a run can start from, as safetensors calls them."""

_MOST_INDEX_BYTES = 1 << 27
_SHOWN = 4


class TensorKind(NamedTuple):
    """Shape and dtype of a tensor. dtype: as safetensors calls it (`F32`)."""

    dtype: str
    shape: tuple[int, ...]


class TensorReader(Protocol):
    """Gives whole tensors, one at a time: from a folder of files, or a checkpoint."""

    @property
    def names(self) -> Sequence[str]:
        """Returns the names of all tensors."""

    def kind(self, name: str) -> TensorKind:
        """Returns shape and dtype of the tensor `name`, without reading it."""

    def tensor(self, name: str) -> Tensor:
        """Returns the whole tensor `name`, on the host, in memory of its own."""


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class WeightFiles:
    """The tensors of the safetensors files in `folder`: of `model.safetensors`, or of those that its index names.

    Raises RunError "weight-files" if there are none, for a file that is missing, cut short or no safetensors file, and for
    an index that does not name exactly the tensors that there are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = None if (folder / SINGLE).is_file() else _index(folder)
        files = [SINGLE] if index is None else list(dict.fromkeys(index.values()))
        self.stored: dict[str, Stored] = {}
        for file in files:
            in_file = _header(folder / file)
            if twice := sorted(self.stored.keys() & in_file):
                raise refused(f"{_listed(twice)} in `{folder / file}` and in another file too")
            self.stored |= in_file
        if index is not None:
            stored = self.stored
            problems = {
                "names tensors that no file has": [name for name in index if name not in stored],
                "does not name tensors of its files": [name for name in stored if name not in index],
                "names another file for": [
                    name for name in stored if index.get(name, stored[name].file.name) != stored[name].file.name
                ],
            }
            for what, names in problems.items():
                if names:
                    raise refused(f"`{folder / INDEX}` {what}: {_listed(names)}")

    @property
    def names(self) -> Sequence[str]:
        return list(self.stored)

    def kind(self, name: str) -> TensorKind:
        return TensorKind(*self.stored[name][1:])

    def tensor(self, name: str) -> Tensor:
        return read_tensor(self.stored[name].file, name)


def read_tensor(file: Path, name: str) -> Tensor:
    """Returns a copy of the tensor `name` in memory; no page of `file` stays mapped. Raises RunError "weight-files"."""
    with opened(file, "pt") as content:
        tensor: Tensor = content.get_tensor(name).clone()
    return tensor


@contextmanager
def opened(file: Path, framework: str) -> Iterator[Any]:
    """Yields the opened safetensors file. Raises RunError "weight-files", with its name, for any error within the block."""
    try:
        with safe_open(file, framework=framework) as content:
            yield content
    except (SafetensorError, OSError) as error:
        missing = isinstance(error, FileNotFoundError) or not file.is_file()
        why = "there is no such file" if missing else f"it is damaged, or no safetensors file: {error}"
        raise refused(f"cannot read `{file}`: {why}") from None


def _header(file: Path) -> dict[str, Stored]:
    with opened(file, "numpy") as content:
        slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # it is no mapping
        return {name: Stored(file, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.is_file():
        pickled = next((file.name for kind in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(kind))), None)
        hint = f"`{pickled}` may run code when it is read: save it again with `safe_serialization`" if pickled else None
        raise refused(f"`{folder}` has neither `{SINGLE}` nor `{INDEX}`", hint)
    try:
        if path.stat().st_size > _MOST_INDEX_BYTES:
            raise ValueError(f"it has more than {_MOST_INDEX_BYTES >> 20} MB")
        files = json.loads(path.read_text("utf-8"))["weight_map"]
        if not files or not all(isinstance(file, str) for file in files.values()):
            raise ValueError("its `weight_map` names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = "it has no `weight_map`" if isinstance(error, KeyError) else str(error)
        raise refused(f"cannot read `{path}`: {said}") from None
    if outside := sorted({file for file in files.values() if Path(file).name != file}):
        raise refused(f"`{path}` names `{outside[0]}`, which is not in its folder")
    return dict(files)


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more


def refused(message: str, hint: str | None = None) -> RunError:
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
"""What `save_pretrained` of a tokenizer writes, by the kind of tokenizer."""


RANDOM_SETTINGS = ("dropout", "alpha", "nbest_size")
"""Settings of BPE and Unigram with which a text becomes other tokens each time."""


def without_settings(text: str) -> str:
    """Returns the text of a `tokenizer.json` with the settings switched off that are off in training; else as it is."""
    try:
        content = json.loads(text)
        off = {key: None for key in ("truncation", "padding") if content.get(key) is not None}
        drawn = {key: None for key in RANDOM_SETTINGS if content["model"].get(key) is not None}
    except (ValueError, AttributeError, KeyError, TypeError):
        return text  # another version's, or no tokenizer: whoever loads it says so
    if not off and not drawn:
        return text
    return json.dumps({**content, **off, "model": {**content["model"], **drawn}}, ensure_ascii=False, indent=2)
