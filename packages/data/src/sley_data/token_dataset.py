"""The common part of `data.text` and `data.tokens`: turns documents into samples of one length, loaded when first needed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from sley_core.api.data import DataInfo, Sample
from sley_core.errors import PlanError
from sley_data import packing
from sley_data.config import Documents
from sley_data.counts import num_windows
from sley_data.token_array import TokenArray


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


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Returns a digest of dtypes, shapes and values of `tensors`, which are on the host."""
    digest = blake2b(digest_size=16)
    for each in tensors:
        digest.update(f"{each.dtype}{tuple(each.shape)}".encode())
        digest.update(each.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def too_short(num_tokens: int, sequence: int) -> PlanError:
    """Returns the PlanError "data-short" for data of `num_tokens`."""
    message = f"the data has {num_tokens} tokens; one sample needs {sequence} and a label for the last"
    return PlanError("data-short", message, path=("data", "sequence"), hint="give more text or a smaller `sequence`")
