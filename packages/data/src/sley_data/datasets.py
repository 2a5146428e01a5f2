"""The datasets `data.text`, `data.chat` and `data.tokens`: documents as samples of one length, loaded when first needed."""

from __future__ import annotations

import mmap
import sys
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.api.data import DataContext, DataInfo, Sample
from sley_core.errors import PlanError
from sley_data import cache, packing
from sley_data.chat import ChatRows
from sley_data.chat_template import ChatTemplate
from sley_data.config import NUM_BYTES, ChatConfig, Documents, TextConfig, TokensConfig
from sley_data.documents import copied_tokens, num_windows, read_documents
from sley_data.files import File, as_error, deciding_files, text_files, token_files
from sley_data.packing import TokenArray

if TYPE_CHECKING:
    from sley_data.tokenizer import Tokenizer


class TokenDataset:
    """Gives samples of `sequence` tokens with their labels; every label of the data comes exactly once per epoch.

    A subclass defines `vocab_size`, `data_digest`, and `load() -> (tokens, offsets)`, which is called once, by the first `len`
    or sample; `info` does not call it. `offsets` may be None if documents are cut.
    """

    def __init__(self, sequence: int, documents: Documents) -> None:
        self._sequence = sequence
        self._documents = documents

    @cached_property
    def info(self) -> DataInfo:
        """The fields, vocabulary and sequence length; does not load the data."""
        return DataInfo(packing.token_fields(self._documents), self.vocab_size, self._sequence)

    @property
    def vocab_size(self) -> int:
        """The number of token ids; defined by a subclass."""
        raise NotImplementedError

    def load(self) -> tuple[TokenArray, Tensor | None]:
        """Returns the tokens and the offsets of the documents, int64 [num_documents + 1] or None; defined by a subclass."""
        raise NotImplementedError

    @property
    def data_digest(self) -> str:
        """Differs if tokens, documents or their order differ; defined by a subclass. Loads the data."""
        raise NotImplementedError

    @cached_property
    def _data(self) -> tuple[TokenArray, Tensor]:
        tokens, offsets = self.load()
        return tokens, torch.tensor([0, len(tokens)]) if offsets is None else offsets

    @property
    def token_parts(self) -> Sequence[Tensor]:
        """The tokens of all documents, in order, as one or more tensors [n] of uint8, uint16 or uint32; loads the data."""
        return self._data[0].parts

    @cached_property
    def _ends(self) -> Tensor:
        return packing.chunk_ends(self._data[1], self._sequence)

    @cached_property
    def _max_documents(self) -> int:
        return packing.max_documents(self._data[1], self._sequence)

    @cached_property
    def _num_samples(self) -> int:
        """The samples in an epoch; loads the data. Raises PlanError "data-short" if there is none."""
        tokens = self._data[0]
        if self._documents == "pad":
            count = int(self._ends[-1]) if self._ends.numel() else 0
        else:
            count = num_windows(len(tokens), self._sequence)
        if not count:
            raise too_short(len(tokens), self._sequence)
        return count

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index` with the fields of `packing.token_fields`; raises IndexError outside [0, len)."""
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        tokens, offsets = self._data
        if self._documents == "pad":
            return packing.pad_sample(tokens, offsets, self._ends, index, self._sequence)
        if self._documents == "cut":
            return packing.cut_sample(tokens, index, self._sequence)
        return packing.pack_sample(tokens, offsets, index, self._sequence, self._max_documents)


def digest_of(tensors: Iterable[Sequence[Tensor]]) -> str:
    """Returns a digest of dtypes, shapes and values of tensors on the host, each in one or more parts along its only dim."""
    digest = blake2b(digest_size=16)
    for parts in tensors:
        digest.update(f"{parts[0].dtype if parts else None}{(sum(part.numel() for part in parts),)}".encode())
        for part in parts:
            digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def too_short(num_tokens: int, sequence: int) -> PlanError:
    """Returns the PlanError "data-short" for data of `num_tokens`."""
    message = f"the data has {num_tokens} tokens; one sample needs {sequence} and a label for the last"
    return PlanError("data-short", message, path=("data", "sequence"), hint="give more text or a smaller `sequence`")


class TextDataset(TokenDataset):
    """Samples of one split of a corpus; which documents it holds depends on their content alone.

    data_notes: sentences for the user about the documents, once they are read.
    Bytes are taken as they are, in any encoding. A tokenizer needs UTF-8.
    Raises PlanError with every file that is missing or empty, or where the text is shorter than one sample.
    """

    def __init__(self, config: TextConfig, context: DataContext) -> None:
        super().__init__(config.sequence, config.documents)
        self._config = config
        self._split = context.split
        self._kept_digest: str | None = None
        self.data_notes: list[str] = []

    @property
    def vocab_size(self) -> int:
        """256 for bytes, else the tokenizer's size."""
        return NUM_BYTES if self._tokenizer is None else self._tokenizer.vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        path = self._config.tokenizer
        if path is None:
            return None
        from sley_data.tokenizer import Tokenizer  # bytes need none

        return Tokenizer(path, self._config.end_of_document)

    @cached_property
    def data_digest(self) -> str:
        """A digest of every token and of the documents' lengths."""
        tokens, offsets = self._data
        return self._kept_digest or digest_of([tokens.parts, [offsets]])

    def load(self) -> tuple[TokenArray, Tensor]:
        """Reads the split's documents, in order; returns their tokens and the offsets of those that are not empty.

        With a tokenizer, the tokens of much text are kept (see `cache`).
        """
        files, held_out = deciding_files(self._config, self._split, text_files)
        documents = read_documents(files, self._config, self._split, self.data_notes)
        if self._tokenizer is None:
            text, lengths = _join(documents)
            return TokenArray([as_tensor(text)]), _offsets(lengths)
        folder = cache.folder_of(self._config.cache, files, held_out, self._decisive())
        if folder is not None:
            try:
                return self._mapped(folder, documents, sum(file.num_bytes for file in files))
            except OSError as error:
                self.data_notes.append(f"the tokens are not kept in {folder}: {error}")
                documents = read_documents(files, self._config, self._split)
        ids, lengths = self._tokenizer.encode(documents)
        return TokenArray([as_tensor(ids)]), _offsets(lengths)

    def _decisive(self) -> tuple[object, ...]:
        """Returns all that decides the tokens of given files."""
        config = self._config
        assert self._tokenizer is not None
        options = (config.separator, config.field, config.end_of_document, config.held_out, self._split)
        return (2, self._tokenizer.digest, *options)

    def _mapped(self, folder: Path, documents: Iterable[tuple[str, bytes]], num_bytes: int) -> tuple[TokenArray, Tensor]:
        """Returns the tokens that are kept in `folder`, mapped; tokenizes them first if no process has."""
        tokenizer = self._tokenizer
        assert tokenizer is not None

        def parts() -> Iterator[tuple[int, Callable[[], cache.Part]]]:
            batch: list[tuple[str, bytes]] = []
            size = 0
            for document in chain(documents, [None]):
                if size >= cache.PART_BYTES or document is None:
                    yield size, partial(_encoded, tokenizer, batch)
                    batch, size = [], 0
                if document is not None:
                    batch.append(document)
                    size += len(document[1])

        dtype = torch.uint16 if tokenizer.vocab_size <= 1 << 16 else torch.uint32

        def mapped(count: int) -> tuple[list[Tensor], Tensor]:
            files = cache.part_files(folder, count)
            tokens = [map_tokens(path, dtype) for path, _ in files if path.stat().st_size]
            lengths = array("q")
            for _, path in files:
                lengths.frombytes(path.read_bytes())
            return tokens, _offsets(lengths)

        def facts(count: int) -> dict[str, Any]:
            tokens, offsets = mapped(count)
            return {"digest": digest_of([tokens, [offsets]]), "notes": self.data_notes}

        complete = cache.prepare(folder, parts(), num_bytes, facts)
        self._kept_digest, self.data_notes[:] = complete["digest"], complete["notes"]
        tokens, offsets = mapped(complete["parts"])
        return TokenArray(tokens), offsets


def _encoded(tokenizer: Tokenizer, documents: Iterable[tuple[str, bytes]]) -> cache.Part:
    ids, lengths = tokenizer.encode(documents)
    return ids, array("q", lengths)


def _offsets(lengths: Iterable[int]) -> Tensor:
    """Returns the offsets of the documents that are not empty."""
    return torch.tensor([0, *accumulate(length for length in lengths if length)])


def _join(documents: Iterable[tuple[str, bytes]]) -> tuple[bytearray, list[int]]:
    """Returns the bytes of all documents joined, and the length of each."""
    ids = bytearray()
    lengths = []
    for _, text in documents:
        ids += text
        lengths.append(len(text))
    return ids, lengths


def as_tensor(ids: bytearray | array[int]) -> Tensor:
    """Returns a view of `ids`: uint8, uint16 or uint32 by the size of its items."""
    dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[memoryview(ids).itemsize]
    return torch.frombuffer(ids, dtype=dtype) if ids else torch.empty(0, dtype=dtype)


class ChatDataset:
    """Samples of whole conversations, packed with their boundaries (see `chat.ChatRows`); the first `len` or sample reads all.

    data_notes: sentences for the user about conversations that are left out, once they are read.
    """

    def __init__(self, config: ChatConfig, context: DataContext) -> None:
        self._config = config
        self._split = context.split
        self.data_notes: list[str] = []

    @cached_property
    def info(self) -> DataInfo:
        """The fields, vocabulary and sequence length; loads the tokenizer alone."""
        return DataInfo(packing.token_fields("pack"), self._template.vocab_size, self._config.sequence)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._config.tokenizer, self._config.template)

    @cached_property
    def _rows(self) -> ChatRows:
        rows = ChatRows(self._config, self._split, self._template)
        self.data_notes += rows.fates.notes()
        return rows

    @cached_property
    def data_digest(self) -> str:
        """A digest of every token, of what is trained on, and of the conversations' lengths."""
        return self._rows.digest

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index`: tokens, labels and positions, int64 [sequence], and cu_seqlens, int32 [max_documents + 1]."""
        if not 0 <= index < len(self._rows):
            raise IndexError(index)
        dtypes = {"cu_seqlens": torch.int32}
        values = self._rows.row(index).items()
        return {name: torch.tensor(each, dtype=dtypes.get(name, torch.int64)) for name, each in values}


class TokensDataset(TokenDataset):
    """Samples of token files, read as one stream in the order of the plan; the files are mapped, not copied.

    With cut documents, opening costs nothing, whatever the size. To pack or pad documents, files without an index are read once
    for their `end_of_document` tokens, which takes about 2 s per GB on one core. Raises PlanError with every file that is
    missing, empty or not a whole number of tokens long.
    """

    def __init__(self, config: TokensConfig, context: DataContext) -> None:
        super().__init__(config.sequence, config.documents)
        self._config = config
        self._split = context.split

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the plan gives."""
        return self._config.vocab_size

    @cached_property
    def data_digest(self) -> str:
        """A digest of the files' sizes, of blocks of tokens spread over each file, at most 128 KiB of it, and of documents."""
        tokens, offsets = self._data
        pairs = ((torch.tensor([part.numel()]), torch.cat(list(_blocks(part)))) for part in tokens.parts)
        return digest_of([each] for each in (*chain.from_iterable(pairs), offsets))

    def load(self) -> tuple[TokenArray, Tensor | None]:
        """Maps the split's files; returns them as one stream, and the offsets of its documents, or None if they are not
        needed.
        """
        files, problems = token_files(self._config, self._split)
        if self._split == "held_out":
            problems += copied_tokens(token_files(self._config, "train")[0], files)
        if problems:
            raise as_error(problems)
        parts = [map_tokens(file.path, getattr(torch, file.dtype(self._config))) for file in files]
        tokens = TokenArray(parts)
        if self._documents == "cut":
            return tokens, None
        starts, base = [torch.tensor([0])], 0
        for file, part in zip(files, parts, strict=True):
            starts.append(self._starts(file, part) + base)
            base += part.numel()
        offsets = torch.cat([*starts, torch.tensor([base])])
        return tokens, offsets[torch.diff(offsets, prepend=torch.tensor([-1])) > 0]

    def _starts(self, file: File, part: Tensor) -> Tensor:
        """Returns where documents begin and end in a file, int64, ascending."""
        if file.index is not None:
            return torch.tensor(file.index.offsets)
        assert self._config.end_of_document is not None, file
        return TokenArray([part]).find(self._config.end_of_document) + 1


def _blocks(part: Tensor) -> Iterator[Tensor]:
    """Yields a file's first tokens, its last ones, and blocks spread between them; all of it if that is not more."""
    size = 1 << 11 if part.numel() > 1 << 15 else max(1, -(-part.numel() // 16))
    for number in range(16):
        start = max(0, part.numel() - size) * number // 15
        yield part[start : start + size]


def map_tokens(path: Path, dtype: torch.dtype) -> Tensor:
    """Returns the tokens of a file as a read-only view: pages are loaded when they are read, and a write crashes.

    The map is shared and read-only, so that files larger than memory can be mapped: PyTorch's own `from_file` maps
    privately and writable, which Linux counts as memory that must exist.
    """
    assert sys.byteorder == "little", "token files are little-endian"
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        # PyTorch warns that it has no read-only tensors. Nothing writes to these: `TokenArray.read` copies.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=dtype)
