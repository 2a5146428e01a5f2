"""Converts text to token ids with a Hugging Face tokenizer, using the optional package `tokenizers`, or to UTF-8 bytes."""

import codecs
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sley_core.api.data import TextIds
from sley_core.api.files import deterministic_tokenizer_json
from sley_core.api.plan import Table
from sley_core.errors import PlanError, PluginError, install_hint
from sley_data.plugin import BYTE_VOCAB_SIZE, TextConfig

T = TypeVar("T")

_BATCH_SIZE = 256  # the number of documents in each call of `tokenizers`, which runs one thread per core

_TOKENIZER_NAME = "tokenizer.json"  # the file in the folder of a fast tokenizer


class Tokenizer:
    """Converts text to token ids, and adds the special tokens of the tokenizer's settings, such as `<s>`, to each document.
    path: a `tokenizer.json`, or a folder with this file. end_of_document: a token that is also appended to each document, or
    None. Truncation, padding and random segmentation (dropout) are disabled. Raises PluginError if `tokenizers` is not
    installed, and PlanError if the file is missing, is not a tokenizer, or has no token `end_of_document`.
    """

    def __init__(self, path: Path, end_of_document: str | None) -> None:
        self._tokenizer = _load_tokenizer(path)
        if not self._tokenizer.get_vocab(with_added_tokens=True):
            raise PlanError("tokenizer-invalid", f"`{path}` has no vocabulary", path=("data", "tokenizer"))
        self._prefix_ids, self._suffix_ids = self._find_special_ids()
        if end_of_document is not None:
            token = self._tokenizer.token_to_id(end_of_document)
            if token is None:
                message = f"`{end_of_document}` is not a token of `{path}`"
                hint = "use a token from `added_tokens` or `vocab` of that file"
                raise PlanError("tokenizer-invalid", message, path=("data", "end_of_document"), hint=hint)
            self._suffix_ids += [] if self._suffix_ids[-1:] == [token] else [token]

    @cached_property
    def digest(self) -> str:
        """A hex digest of everything that determines the token ids of a text: the version of the package `tokenizers`, the
        content of the tokenizer, and the special tokens.
        """
        text = f"{version('tokenizers')}{self._tokenizer.to_str()}{self._prefix_ids}{self._suffix_ids}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """The highest token id, including added tokens, plus 1."""
        return int(max(self._tokenizer.get_vocab(with_added_tokens=True).values())) + 1

    def encode(self, documents: Iterable[tuple[str, bytes]]) -> "tuple[array[int], array[int]]":
        """Returns the concatenated ids of all documents, and the number of ids of each document. documents: (name, content)
        pairs. The ids are unsigned integers of 16 bits, or of 32 bits for a vocabulary of more than 65,536 ids; the lengths
        have 64 bits. Raises PlanError "data-encoding" for a document that is not UTF-8.
        """
        typecode = "H" if self.vocab_size <= 1 << 16 else "I"
        prefix, suffix = array(typecode, self._prefix_ids), array(typecode, self._suffix_ids)
        ids, lengths = array(typecode), array("q")
        documents = iter(documents)
        batches = iter(lambda: [_decode_text(name, content) for name, content in islice(documents, _BATCH_SIZE)], [])
        for encodings in read_ahead(self._tokenizer.encode_batch_fast(b, add_special_tokens=False) for b in batches):
            for encoding in encodings:
                start = len(ids)
                ids += prefix
                ids += array(typecode, encoding.ids)  # adding an array is twice as fast as adding a list
                ids += suffix
                lengths.append(len(ids) - start)
        return ids, lengths

    def encode_prompt(self, text: str) -> tuple[list[int], int]:
        """Returns the ids of a document that begins with `text`: first the special tokens that begin each document, then the
        tokens of the text. Also returns the number of these special tokens.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [*self._prefix_ids, *ids], len(self._prefix_ids)

    @property
    def end_of_document_id(self) -> int | None:
        """The last id that `encode` appends to each document, or None if it appends no ids."""
        return self._suffix_ids[-1] if self._suffix_ids else None

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens. An incomplete character becomes U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _find_special_ids(self) -> tuple[list[int], list[int]]:
        """Returns the ids that the post-processor of the tokenizer adds before and after each text, or two empty lists."""
        if self._tokenizer.num_special_tokens_to_add(is_pair=False) == 0:
            return [], []
        for token in range(self.vocab_size):  # the first tokens may be special, or incomplete characters
            encoding = self._tokenizer.encode(self.decode([token]))
            indices = [index for index, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
            if indices:
                return encoding.ids[: indices[0]], encoding.ids[indices[-1] + 1 :]
        return [], []


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields `items`, none of which may be None. A thread reads the next item while the caller processes the current one."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(next, items, None)
        while (item := pending.result()) is not None:
            pending = pool.submit(next, items, None)
            yield item


def _load_tokenizer(path: Path) -> Any:
    """Returns the tokenizer at `path`, a file or a folder. Raises PluginError "tokenizers-missing" if the package is missing,
    PlanError "tokenizer-missing" if the file is missing, and PlanError "tokenizer-invalid" if it is not a tokenizer.
    """
    try:
        from tokenizers import Tokenizer as HFTokenizer
    except ImportError:
        message = "`tokenizer` needs the package `tokenizers`, which is not installed"
        hint = install_hint("data", "tokenizers")
        raise PluginError("tokenizers-missing", message, path=("data", "tokenizer"), hint=hint) from None
    if path.is_dir():
        message, path = f"the folder `{path}` has no `{_TOKENIZER_NAME}`", path / _TOKENIZER_NAME
        hint = "use a folder that `save_pretrained` of a fast tokenizer has written"
    else:
        message = f"the file `{path}` does not exist"
        hint = "use a local path, since Sley downloads no tokenizers; a relative path starts at the plan's folder"
    if not path.is_file():
        raise PlanError("tokenizer-missing", message, path=("data", "tokenizer"), hint=hint)
    try:
        return HFTokenizer.from_str(deterministic_tokenizer_json(path.read_text("utf-8")))
    except Exception as error:  # `tokenizers` raises plain Exception
        message = f"`{path}` is not a Hugging Face tokenizer: {error}"
        raise PlanError("tokenizer-invalid", message, path=("data", "tokenizer")) from None


def _decode_text(name: str, content: bytes) -> str:
    """Returns the text of the document `name`. Raises PlanError "data-encoding" if `content` is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        message = f"document `{name}` is not UTF-8: {error.reason} at byte {error.start}"
        hint = "convert the file to UTF-8, or remove `tokenizer` to train on bytes in any encoding"
        raise PlanError("data-encoding", message, path=("data", "files"), hint=hint) from None


class Utf8Tokenizer(TextIds):
    """Converts text to ids, which are the bytes of the text in UTF-8."""

    size = BYTE_VOCAB_SIZE
    end = None
    num_before = 0
    is_bytes = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields for each byte the character that it completes, or "" if the character is incomplete, and at the end U+FFFD for
        an incomplete last character, or "". Invalid bytes become U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for byte in ids:
            yield decoder.decode(bytes([byte]))
        yield decoder.decode(b"", final=True)


class PromptTokenizer(TextIds):
    """Converts prompts to token ids. end: the id that ends a document; None uses `tokenizer.end_of_document_id`."""

    is_bytes = False

    def __init__(self, tokenizer: Tokenizer, end: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.size, self.end = tokenizer.vocab_size, tokenizer.end_of_document_id if end is None else end
        self.num_before = 0

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the special tokens that begin each document, followed by the ids of `text`. Sets `num_before` to
        the number of these special tokens.
        """
        ids, self.num_before = self._tokenizer.encode_prompt(text)
        return ids

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the text of `ids` in pieces: a piece when all characters so far are complete, and finally the rest, which may
        be "". Decodes new tokens together with the tokens of the previous piece, because some tokenizers omit the space with
        which a token begins if no other token precedes it.
        """
        tokens: list[int] = []
        start = stop = 0  # the range of the tokens of the previous text
        for token in ids:
            tokens.append(token)
            previous_text, text = self._tokenizer.decode(tokens[start:stop]), self._tokenizer.decode(tokens[start:])
            # Later tokens may complete a character, but do not change the text before it.
            if text.startswith(previous_text) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(previous_text) :]
                start, stop = stop, len(tokens)
        yield self._tokenizer.decode(tokens[start:]).removeprefix(self._tokenizer.decode(tokens[start:stop]))


def load_text_ids(config: Table, tokenizer: Path | None) -> TextIds:
    """Returns the `TextIds` of the tokenizer at path `tokenizer`, or of the table `config` if the path is None; implements
    `DatasetRecord.text_ids`. With a path, `config` may be any table, and a document ends with the table's `end_of_document`, or
    else with the `eos_token` in the `tokenizer_config.json` next to the tokenizer.
    """
    end = getattr(config, "end_of_document", None)
    if tokenizer is None:
        assert isinstance(config, TextConfig), config
        return Utf8Tokenizer() if config.tokenizer is None else PromptTokenizer(Tokenizer(config.tokenizer, end))
    end = _read_eos_token(tokenizer) if end is None else end
    end_id = end if isinstance(end, int) else None
    return PromptTokenizer(Tokenizer(tokenizer, end if isinstance(end, str) else None), end_id)


def _read_eos_token(tokenizer: Path) -> str | None:
    """Returns the `eos_token` in the `tokenizer_config.json` next to the path `tokenizer`, or None if there is none."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        token = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
