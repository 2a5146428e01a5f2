"""Loads a Hugging Face `tokenizer.json`, or a folder with one, using the optional package `tokenizers`."""

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

FILE_NAME = "tokenizer.json"

INSTALL = """install sley-data[tokenizers]; in a clone of Sley's repository, run `pip install -e "packages/data[tokenizers]"`"""


class Tokenizer:
    """Converts text to token ids, with the special tokens that the tokenizer adds, such as `<s>`, and `end_of_document`.

    Truncation, padding and random segmentation (dropout) are disabled. Raises PluginError if `tokenizers` is not installed, and
    PlanError if the file is not a tokenizer or does not have the token `end_of_document`.
    """

    def __init__(self, path: Path, end_of_document: str | None) -> None:
        """path: a file or folder. end_of_document: the token to append to each document, or None."""
        self._implementation = _load(path)
        if not self._implementation.get_vocab(with_added_tokens=True):
            raise PlanError("tokenizer-invalid", f"`{path}` has no vocabulary", path=("data", "tokenizer"))
        self._begin, self._end = self._added_ids()
        if end_of_document is not None:
            token = self._implementation.token_to_id(end_of_document)
            if token is None:
                raise PlanError(
                    "tokenizer-invalid",
                    f"`{end_of_document}` is not a token of `{path}`",
                    path=("data", "end_of_document"),
                    hint="use a token from `added_tokens` or `vocab` of that file",
                )
            self._end += [] if self._end[-1:] == [token] else [token]

    @cached_property
    def digest(self) -> str:
        """A digest that differs if the tokens of a text may differ."""
        text = f"{version('tokenizers')}{self._implementation.to_str()}{self._begin}{self._end}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """The highest token id, including added tokens, plus 1."""
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
        """Returns the first ids of a document that begins with `text`, and the number of those ids before the text."""
        ids = self._implementation.encode(text, add_special_tokens=False).ids
        return [*self._begin, *ids], len(self._begin)

    @property
    def end_of_document(self) -> int | None:
        """The last id that `encode` adds after each document, or None."""
        return self._end[-1] if self._end else None

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens. An incomplete character is U+FFFD."""
        text: str = self._implementation.decode(list(ids), skip_special_tokens=False)
        return text

    def _added_ids(self) -> tuple[list[int], list[int]]:
        """Returns the ids that the post-processor of the tokenizer adds before and after each text."""
        if self._implementation.num_special_tokens_to_add(is_pair=False) == 0:
            return [], []
        for token in range(self.vocab_size):  # the first tokens may be special, or incomplete characters
            encoding = self._implementation.encode(self.decode([token]))
            indices = [index for index, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
            if indices:
                return encoding.ids[: indices[0]], encoding.ids[indices[-1] + 1 :]
        return [], []


def _load(path: Path) -> Implementation:
    """Loads a tokenizer. Raises PluginError "tokenizers-missing", or PlanError "tokenizer-missing" or "tokenizer-invalid"."""
    try:
        from tokenizers import Tokenizer as Implementation
    except ImportError:
        raise PluginError(
            "tokenizers-missing",
            "`tokenizer` needs the package `tokenizers`, which is not installed",
            path=("data", "tokenizer"),
            hint=INSTALL,
        ) from None
    path = _tokenizer_file(path)
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


def _tokenizer_file(path: Path) -> Path:
    """Returns the tokenizer file of `path`, which may be a folder written by `save_pretrained`."""
    if path.is_dir():
        message, path = f"the folder `{path}` has no `{FILE_NAME}`", path / FILE_NAME
        hint = "use a folder that `save_pretrained` of a fast tokenizer has written"
    else:
        message = f"the file `{path}` does not exist"
        hint = "use a local path, since nothing is downloaded; a relative path starts at the plan's folder"
    if not path.is_file():
        raise PlanError("tokenizer-missing", message, path=("data", "tokenizer"), hint=hint)
    return path


def _text(name: str, content: bytes) -> str:
    """Returns `content` as text. Raises PlanError "data-encoding" with the name of the document if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise PlanError(
            "data-encoding",
            f"document `{name}` is not UTF-8: {error.reason} at byte {error.start}",
            path=("data", "files"),
            hint="convert the file to UTF-8, or remove `tokenizer` to train on bytes in any encoding",
        ) from None


class Utf8(TextIds):
    """Converts text to its bytes in UTF-8."""

    size = NUM_BYTES
    end = None
    num_before = 0
    is_bytes = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the characters that each byte completes."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for byte in ids:
            yield decoder.decode(bytes([byte]))
        yield decoder.decode(b"", final=True)


class Tokenized(TextIds):
    """Converts text to the ids of a tokenizer."""

    is_bytes = False

    def __init__(self, tokenizer: Tokenizer, end: int | None = None) -> None:
        """end: the id that ends a document, instead of that of the tokenizer."""
        self._tokenizer = tokenizer
        self.size, self.end = tokenizer.vocab_size, tokenizer.end_of_document if end is None else end
        self.num_before = 0

    def encode(self, text: str) -> list[int]:
        ids, self.num_before = self._tokenizer.encode_prompt(text)
        return ids

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the text that each token id adds, when its characters are complete.

        Tokens are decoded after the tokens of the previous text, since some tokens begin with a space only after others.
        """
        previous: list[int] = []
        start = stop = 0  # the range of the tokens of the previous text
        for token in ids:
            previous.append(token)
            before, text = self._tokenizer.decode(previous[start:stop]), self._tokenizer.decode(previous[start:])
            # Later tokens may complete a character, but do not change the text before it.
            if text.startswith(before) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(before) :]
                start, stop = stop, len(previous)
        yield self._tokenizer.decode(previous[start:]).removeprefix(self._tokenizer.decode(previous[start:stop]))


def text_ids(config: Table, tokenizer: Path | None) -> TextIds:
    """Returns the token ids of a `data.text` table, or those of `tokenizer` for any table (see `DatasetRecord.text_ids`).

    A document ends with the `end_of_document` of the table, or else with the `eos_token` in the `tokenizer_config.json` next to
    `tokenizer`.
    """
    end = getattr(config, "end_of_document", None)
    if tokenizer is None:
        assert isinstance(config, TextConfig), config
        return Utf8() if config.tokenizer is None else Tokenized(Tokenizer(config.tokenizer, end))
    end = _end_token(tokenizer) if end is None else end
    return Tokenized(Tokenizer(tokenizer, end if isinstance(end, str) else None), end if isinstance(end, int) else None)


def _end_token(tokenizer: Path) -> str | None:
    """Returns the `eos_token` in the `tokenizer_config.json` next to a tokenizer, or None."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        token = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
