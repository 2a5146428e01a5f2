"""Reads a Hugging Face `tokenizer.json`, or the folder that has it, with the optional package `tokenizers`."""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.api.data import TextIds
from sley_core.api.files import RANDOM_SETTINGS
from sley_core.api.plan import Table
from sley_core.errors import PlanError, PluginError
from sley_data.config import NUM_BYTES, TextConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Implementation

_BATCH = 256
"""The number of documents that one call of `tokenizers` encodes, with a thread for each core."""

NAME = "tokenizer.json"

INSTALL = """install sley-data[tokenizers], in a clone of Sley's repository: `pip install -e "packages/data[tokenizers]"`"""


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

    @cached_property
    def digest(self) -> str:
        """Differs if the tokens of some text, or what is put before and after it, may differ."""
        text = f"{version('tokenizers')}{self._implementation.to_str()}{self._begin}{self._end}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """One above the highest token id, added tokens included."""
        return max(self._implementation.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, documents: Iterable[tuple[str, bytes]]) -> tuple[array[int], array[int]]:
        """Returns the ids of all documents, concatenated, as integers of 2 or 4 bytes, and the length of each, 64 bits.

        documents: (name, content) pairs. Raises PlanError "data-encoding" with the name of a document that is not UTF-8.
        """
        code = "H" if self.vocab_size <= 1 << 16 else "I"
        begin, end = array(code, self._begin), array(code, self._end)
        ids, lengths = array(code), array("q")
        documents = iter(documents)
        while texts := [_text(name, content) for name, content in islice(documents, _BATCH)]:
            for encoding in self._implementation.encode_batch_fast(texts, add_special_tokens=False):
                start = len(ids)
                ids += begin
                ids += array(code, encoding.ids)  # adding an array is twice as fast as adding a list
                ids += end
                lengths.append(len(ids) - start)
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
            hint=INSTALL,
        ) from None
    path = _file(path)
    try:
        loaded = Implementation.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain Exception
        message = f"`{path}` is not a Hugging Face tokenizer: {error}"
        raise PlanError("tokenizer-invalid", message, path=("data", "tokenizer")) from None
    loaded.no_truncation()
    loaded.no_padding()
    for name in RANDOM_SETTINGS:
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


class Utf8(TextIds):
    """Takes the bytes of UTF-8 as token ids."""

    size = NUM_BYTES
    end = None
    num_before = 0
    is_bytes = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the text of token ids that are bytes of UTF-8, as far as each completes characters."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for byte in ids:
            yield decoder.decode(bytes([byte]))
        yield decoder.decode(b"", final=True)


class Tokenized(TextIds):
    """Takes the ids of a tokenizer."""

    is_bytes = False

    def __init__(self, tokenizer: Tokenizer, end: int | None = None) -> None:
        """end: the id after which a document ends, in place of the tokenizer's."""
        self._tokenizer = tokenizer
        self.size, self.end = tokenizer.vocab_size, tokenizer.end_of_document if end is None else end
        self.num_before = 0

    def encode(self, text: str) -> list[int]:
        ids, self.num_before = self._tokenizer.encode_prompt(text)
        return ids

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the text that each token id adds, once its characters are complete.

        Each is decoded behind the tokens of the text before it, since a token may begin with a space only behind others.
        """
        known: list[int] = []
        start = stop = 0  # of the tokens of the last text
        for token in ids:
            known.append(token)
            before, text = self._tokenizer.decode(known[start:stop]), self._tokenizer.decode(known[start:])
            # Later tokens may complete a character; the text before it does not change.
            if text.startswith(before) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(before) :]
                start, stop = stop, len(known)
        yield self._tokenizer.decode(known[start:]).removeprefix(self._tokenizer.decode(known[start:stop]))


def text_ids(config: Table, tokenizer: Path | None) -> TextIds:
    """Returns the ids of the text of a `data.text` table, or, for any table, those of `tokenizer`: `DatasetRecord.text_ids`.

    A document ends with the table's `end_of_document`, or else with the `eos_token` of the `tokenizer_config.json` beside a
    given tokenizer.
    """
    end = getattr(config, "end_of_document", None)
    if tokenizer is None:
        assert isinstance(config, TextConfig), config
        return Utf8() if config.tokenizer is None else Tokenized(Tokenizer(config.tokenizer, end))
    end = _end_token(tokenizer) if end is None else end
    return Tokenized(Tokenizer(tokenizer, end if isinstance(end, str) else None), end if isinstance(end, int) else None)


def _end_token(tokenizer: Path) -> str | None:
    """Returns the `eos_token` that transformers knows of a tokenizer, from the file beside it; None if there is none."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        token = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
