"""The data and the model of the league's plans: tokens of which some have labels, and a frozen model with adapters."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import IGNORE_INDEX, DataContext, DataInfo, Field
from sley_testing.habits import Embed

VOCAB_SIZE = 40

_NUM_TRAINING, _NUM_HELD_OUT = 1 << 10, 16
"""The number of samples. All held-out samples fit into two batches, so that their order does not matter."""


class RandomSamples:
    """Generates each sample from a random seed, its index.

    sequence: the number of tokens per sample. num_labels: the number of leading labels that count, for samples 0, 1, ... in
    turn. document_lengths: the lengths of the documents that are packed into a sample, in turn; empty for unpacked samples. The
    last label of a document does not count. Fields: `tokens` and `labels` [b, sequence] int64; if packed, also `positions` of
    the same shape and `cu_seqlens` [b, n + 1] int32. context: selects training or held-out samples.
    """

    def __init__(
        self,
        context: DataContext | None = None,
        sequence: int = 16,
        num_labels: Sequence[int] = (16,),
        document_lengths: Sequence[Sequence[int]] = (),
    ) -> None:
        is_held_out = context is not None and context.split == "held_out"
        self._first_seed, self._count = (_NUM_TRAINING, _NUM_HELD_OUT) if is_held_out else (0, _NUM_TRAINING)
        self._sequence, self._num_labels, self._document_lengths = sequence, num_labels, document_lengths
        fields = {"tokens": Field("int64", 0, 1, ids="token"), "labels": Field("int64", 0, 1, ids="label")}
        if document_lengths:
            fields |= {"positions": Field("int64", 0, 1), "cu_seqlens": Field("int32", 0, None)}
        self.info = DataInfo(fields, VOCAB_SIZE, sequence)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._first_seed + index)
        ids = torch.randint(VOCAB_SIZE, (self._sequence + 1,), generator=generator)
        sample = {"tokens": ids[:-1].clone(), "labels": ids[1:].clone()}
        sample["labels"][self._num_labels[index % len(self._num_labels)] :] = IGNORE_INDEX
        if self._document_lengths:
            lengths = self._lengths(index)
            ends = torch.tensor(lengths).cumsum(0)
            sample["labels"][ends - 1] = IGNORE_INDEX
            sample["positions"] = torch.cat([torch.arange(length) for length in lengths])
            # Padded with empty documents, so that all samples have the same shape.
            max_documents = max(map(len, self._document_lengths))
            sample["cu_seqlens"] = torch.full((max_documents + 1,), self._sequence, dtype=torch.int32)
            sample["cu_seqlens"][0] = 0
            sample["cu_seqlens"][1 : len(lengths) + 1] = ends
        return sample

    def _lengths(self, index: int) -> Sequence[int]:
        """Returns the document lengths of sample `index`. An unpacked sample is one document."""
        return self._document_lengths[index % len(self._document_lengths)] if self._document_lengths else (self._sequence,)

    def split_documents(self, index: int) -> Iterator[dict[str, Tensor]]:
        """Yields each document of sample `index` as a batch of one row, without positions and document bounds."""
        sample = self[index]
        start = 0
        for length in self._lengths(index):
            yield {name: sample[name][None, start : start + length] for name in ("tokens", "labels")}
            start += length


_WIDTH, _RANK = 16, 3


class LowRankLinear(nn.Module):
    """Adds the product of two small trained linears to a frozen linear. The second small linear is initialized with zeros."""

    def __init__(self, in_features: int, out_features: int, dropout: float) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features).requires_grad_(False)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(in_features, _RANK, bias=False)
        self.up = nn.Linear(_RANK, out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Any:
        return self.base(hidden) + self.up(self.down(self.drop(hidden)))


class LowRankBlock(nn.Module):
    """Adds two adapted linears with an activation between them to its input: [b, s, width] -> [b, s, width]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH).requires_grad_(False)
        self.wide = LowRankLinear(_WIDTH, 2 * _WIDTH, dropout)
        self.narrow = LowRankLinear(2 * _WIDTH, _WIDTH, dropout)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.narrow(F.silu(self.wide(self.norm(hidden))))


def layers(data: DataInfo, dropout: float = 0.0, trained: Sequence[int] = (0, 1, 2, 3)) -> list[tuple[str, nn.Module]]:
    """Returns a frozen embedding, four blocks and a frozen head. trained: the indices of the blocks whose adapters train."""
    assert data.vocab_size is not None, data
    embed = Embed(data.vocab_size, _WIDTH).requires_grad_(False)
    head = nn.Linear(_WIDTH, data.vocab_size, bias=False).requires_grad_(False)
    blocks = [LowRankBlock(dropout) for _ in range(4)]
    for index, block in enumerate(blocks):
        if index not in trained:
            block.requires_grad_(False)
    return [("embed", embed), *((f"blocks.{index}", block) for index, block in enumerate(blocks)), ("head", head)]
