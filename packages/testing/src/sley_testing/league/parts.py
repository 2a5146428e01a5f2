"""The data and the model of the league's plans: tokens of which some have labels, and a frozen model with low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import IGNORED, DataContext, DataInfo, Field
from sley_testing.habits import Embed

VOCAB = 40

_TRAINED, _HELD_OUT = 1 << 10, 16
"""How many samples there are: two batches that are held out, so that it does not matter in which order they come."""


class DrawnSamples:
    """Draws each sample from its number.

    sequence: tokens in each. labels: how many labels count, from the first on: of sample 0, 1, ..., then from the beginning
    again. documents: the lengths of the documents that a sample is packed of, in turn in the same way; empty: it has no bounds.
    The last label of a document does not count. Fields: `tokens`, `labels` [b, sequence] int64, packed also `positions` of the
    same shape and `cu_seqlens` [b, n + 1] int32. context: says which split; held-out samples are others.
    """

    def __init__(
        self,
        context: DataContext | None = None,
        sequence: int = 16,
        labels: Sequence[int] = (16,),
        documents: Sequence[Sequence[int]] = (),
    ) -> None:
        is_held_out = context is not None and context.split == "held_out"
        self._first, self._count = (_TRAINED, _HELD_OUT) if is_held_out else (0, _TRAINED)
        self._sequence, self._labels, self._documents = sequence, labels, documents
        fields = {"tokens": Field("int64", 0, 1, ids="token"), "labels": Field("int64", 0, 1, ids="label")}
        if documents:
            fields |= {"positions": Field("int64", 0, 1), "cu_seqlens": Field("int32", 0, None)}
        self.info = DataInfo(fields, VOCAB, sequence)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.randint(VOCAB, (self._sequence + 1,), generator=torch.Generator().manual_seed(self._first + index))
        sample = {"tokens": drawn[:-1].clone(), "labels": drawn[1:].clone()}
        sample["labels"][self._labels[index % len(self._labels)] :] = IGNORED
        if self._documents:
            lengths = self.lengths(index)
            ends = torch.tensor(lengths).cumsum(0)
            sample["labels"][ends - 1] = IGNORED
            sample["positions"] = torch.cat([torch.arange(length) for length in lengths])
            most = max(len(one) for one in self._documents)
            # Documents of no tokens fill it up, so that all samples have one shape.
            sample["cu_seqlens"] = torch.full((most + 1,), self._sequence, dtype=torch.int32)
            sample["cu_seqlens"][0] = 0
            sample["cu_seqlens"][1 : len(lengths) + 1] = ends
        return sample

    def lengths(self, index: int) -> Sequence[int]:
        """Returns the lengths of the documents in sample `index`; the whole sample is one document if nothing is packed."""
        return self._documents[index % len(self._documents)] if self._documents else (self._sequence,)

    def apart(self, index: int) -> Iterator[dict[str, Tensor]]:
        """Yields each document of sample `index` as a batch of its own, without the fields that say where it was packed."""
        sample = self[index]
        start = 0
        for length in self.lengths(index):
            yield {name: sample[name][None, start : start + length] for name in ("tokens", "labels")}
            start += length


_WIDTH, _RANK = 16, 3


class Adapted(nn.Module):
    """Adds to a frozen linear the product of two small ones that are trained; the second begins as zeros."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(inputs, _RANK, bias=False)
        self.up = nn.Linear(_RANK, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Any:
        return self.base(hidden) + self.up(self.down(self.drop(hidden)))


class AdaptedBlock(nn.Module):
    """Adds to its input two adapted linears with an activation between them: [b, s, width] -> [b, s, width]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH).requires_grad_(False)
        self.wide = Adapted(_WIDTH, 2 * _WIDTH, dropout)
        self.narrow = Adapted(2 * _WIDTH, _WIDTH, dropout)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.narrow(F.silu(self.wide(self.norm(hidden))))


def layers(data: DataInfo, dropout: float = 0.0, trained: Sequence[int] = (0, 1, 2, 3)) -> list[tuple[str, nn.Module]]:
    """Returns an embedding, four blocks and a head, of which the adapters alone are trained, in the blocks `trained`."""
    assert data.vocab_size is not None, data
    embed = Embed(data.vocab_size, _WIDTH).requires_grad_(False)
    head = nn.Linear(_WIDTH, data.vocab_size, bias=False).requires_grad_(False)
    blocks = [AdaptedBlock(dropout) for _ in range(4)]
    for at, block in enumerate(blocks):
        if at not in trained:
            block.requires_grad_(False)
    return [("embed", embed), *((f"blocks.{at}", block) for at, block in enumerate(blocks)), ("head", head)]
