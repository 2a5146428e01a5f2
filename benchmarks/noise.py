"""The data of the benchmarks. Apart from `contestants`, whose imports (FSDP, DTensor) would be part of each measured start."""

import torch
from torch import Tensor

from sley_core.data.dataset import BOUNDARY_FIELDS, IGNORE_INDEX, DataInfo, Field


class Noise:
    """Random ids as tokens, bytes if not told: a dataset that weighs nothing, so that memory is the contestants' own."""

    def __init__(self, sequence: int, vocabulary: int = 256) -> None:
        integers = Field("int64", sequence_dim=1)
        self.info = DataInfo({"tokens": integers, "labels": integers}, vocab_size=vocabulary, sequence=sequence)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sequence, vocabulary = self.info.sequence, self.info.vocab_size
        assert sequence is not None
        assert vocabulary is not None
        tokens = torch.randint(vocabulary, (sequence + 1,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class PackedNoise(Noise):
    """Rows of four documents of random ids, with boundaries. The first half of each document, its prompt, has no labels."""

    def __init__(self, sequence: int, vocabulary: int = 256) -> None:
        super().__init__(sequence, vocabulary)
        self.info = DataInfo({**self.info.fields, **BOUNDARY_FIELDS}, vocab_size=vocabulary, sequence=sequence)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sequence = len(sample["tokens"])
        positions = torch.arange(sequence) % (sequence // 4)
        labels = torch.where(positions < sequence // 8, IGNORE_INDEX, sample["labels"])
        bounds = torch.arange(5, dtype=torch.int32) * (sequence // 4)
        return {**sample, "labels": labels, "positions": positions, "cu_seqlens": bounds}
