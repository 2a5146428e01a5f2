"""Reads a Hugging Face `tokenizer.json`, or the folder that has it, with the optional package `tokenizers`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.discovery import CORE, to_install
from sley_core.errors import PlanError, PluginError
from sley_core.weight_files.tokenizers import DRAWN

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Implementation

BATCH = 256
"""Documents that are encoded in one call, which distributes them over the threads of `tokenizers`."""

NAME = "tokenizer.json"


class Tokenizer:
    """Converts text to token ids, with what the tokenizer adds to a text by itself (`<s>`), and `end_of_document` at its end.

    Of the file's settings only those that make tokens of a text count: truncation, padding, and random segmentation (dropout)
    are switched off. Raises PluginError if `tokenizers` is not installed, PlanError if the file is not a tokenizer or lacks
    that token.
    """

    def __init__(self, path: Path, end_of_document: str | None) -> None:
        """Loads `path`, a file or folder; end_of_document: the token appended to each document, None for none."""
        self._implementation = _load(path)
        if not self._implementation.get_vocab(with_added_tokens=True):
            raise PlanError("tokenizer-invalid", f"`{path}` has no vocabulary", path=("data", "tokenizer"))
        self._begin, self._end = self._added()
        if end_of_document is not None:
            token = self._implementation.token_to_id(end_of_document)
            if token is None:
                raise PlanError(
                    "tokenizer-invalid",
                    f"`{end_of_document}` is not a token of `{path}`",
                    path=("data", "end_of_document"),
                    hint="give a token as `added_tokens` or `vocab` of that file spell it",
                )
            self._end += [] if self._end[-1:] == [token] else [token]

    @property
    def vocab_size(self) -> int:
        """One above the highest token id, added tokens included."""
        return max(self._implementation.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, documents: Iterable[tuple[str, bytes]]) -> tuple[array[int], list[int]]:
        """Returns the ids of all documents joined, as an array of 2 or 4 byte integers, and the length of each
        document.

        documents: (name, content) pairs. Raises PlanError naming a document that is not UTF-8.
        """
        ids = array("H" if self.vocab_size <= 1 << 16 else "I")
        lengths = []
        pairs = iter(documents)
        while batch := [_text(name, content) for name, content in islice(pairs, BATCH)]:
            for encoding in self._implementation.encode_batch_fast(batch, add_special_tokens=False):
                before = len(ids)
                ids.extend(self._begin)
                ids.extend(encoding.ids)
                ids.extend(self._end)
                lengths.append(len(ids) - before)
        return ids, lengths

    def encode_prompt(self, text: str) -> tuple[list[int], int]:
        """Returns the ids with which a document that begins with `text` begins, and how many of them come before the text."""
        ids = self._implementation.encode(text, add_special_tokens=False).ids
        return [*self._begin, *ids], len(self._begin)

    @property
    def end_of_document(self) -> int | None:
        """The last id that `encode` puts after each document; None for none."""
        return self._end[-1] if self._end else None

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens included; a character of which bytes are missing is U+FFFD."""
        text: str = self._implementation.decode(list(ids), skip_special_tokens=False)
        return text

    def _added(self) -> tuple[list[int], list[int]]:
        """Returns the ids that the tokenizer's post-processor puts before and after each text."""
        if self._implementation.num_special_tokens_to_add(is_pair=False) == 0:
            return [], []
        for token in range(self.vocab_size):  # the first ones may be special, or no text on their own
            encoding = self._implementation.encode(self.decode([token]))
            places = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
            if places:
                return encoding.ids[: places[0]], encoding.ids[places[-1] + 1 :]
        return [], []


def _load(path: Path) -> Implementation:
    """Loads the tokenizer; raises PluginError "tokenizers-missing", or PlanError "tokenizer-missing" or "tokenizer-invalid"."""
    try:
        from tokenizers import Tokenizer as Implementation
    except ImportError:
        raise PluginError(
            "tokenizers-missing",
            "`tokenizer` needs the package `tokenizers`, which is not installed",
            path=("data", "tokenizer"),
            hint=to_install(CORE, "tokenizers"),
        ) from None
    path = _file(path)
    try:
        loaded = Implementation.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain Exception
        message = f"`{path}` is not a Hugging Face tokenizer: {error}"
        raise PlanError("tokenizer-invalid", message, path=("data", "tokenizer")) from None
    loaded.no_truncation()
    loaded.no_padding()
    for name in DRAWN:
        if getattr(loaded.model, name, None) is not None:
            setattr(loaded.model, name, None)
    return loaded


def _file(path: Path) -> Path:
    """Returns the path of the tokenizer file, which may be given as the folder of `save_pretrained`."""
    if path.is_dir():
        message, path = f"there is no `{NAME}` in the folder `{path}`", path / NAME
        hint = "`save_pretrained` of a fast tokenizer writes one"
    else:
        message = f"there is no file `{path}`"
        hint = "a relative path starts at the plan's folder; nothing is downloaded, so give no name on a hub"
    if not path.is_file():
        raise PlanError("tokenizer-missing", message, path=("data", "tokenizer"), hint=hint)
    return path


def _text(name: str, content: bytes) -> str:
    """Returns `content` as text; raises PlanError "data-encoding" with the document's name if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise PlanError(
            "data-encoding",
            f"document `{name}` is not UTF-8: {error.reason} at byte {error.start}",
            path=("data", "files"),
            hint="convert the file, or leave `tokenizer` out and train on bytes, which take any encoding",
        ) from None
