"""Samples that a test can predict: sample i starts with token i, and every number follows from the index alone."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sley_core.data.dataset import IGNORE_INDEX, DataContext, DataInfo, Field

VOCABULARY = 16
SEQUENCE = 12
GENERATOR = torch.Generator()


def draw_numbers(size: int) -> Tensor:
    """Draws uniform numbers [size] from a generator that only this module names."""
    return torch.rand(size, generator=GENERATOR)


class Rows:
    """`num_samples` rows of tokens int64 [s] with their labels; every third sample has four labels that do not count."""

    info = DataInfo(
        {"tokens": Field("int64", sequence_dim=1, ids="token"), "labels": Field("int64", sequence_dim=1, ids="label")},
        vocab_size=VOCABULARY,
        sequence=SEQUENCE,
    )

    def __init__(self, context: DataContext, num_samples: int = 48) -> None:
        self.num_samples = num_samples
        self.first = 0 if context.split == "train" else num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(SEQUENCE + 1) * (1 + index % 5) + self.first + index) % VOCABULARY
        labels = row[1:].clone()
        if index % 3 == 0:
            labels[:4] = IGNORE_INDEX
        return {"tokens": row[:-1], "labels": labels}


class Padded(Rows):
    """Samples of 4, 8 and 12 tokens in turn, padded to the longest of a rank's batch."""

    info = DataInfo(Rows.info.fields, vocab_size=VOCABULARY)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[: 4 + 4 * (index % 3)] for name, value in super().__getitem__(index).items()}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        fill = {"tokens": 0, "labels": IGNORE_INDEX}
        return {
            name: pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)
            for name, value in fill.items()
        }


class Stream:
    """The same samples in their order, without a length."""

    info = Rows.info

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = Rows(DataContext())
        yield from (rows[index] for index in range(len(rows)))


def batch(first: int, num_samples: int) -> dict[str, Tensor]:
    """Samples `first`, `first` + 1, ... as one batch."""
    rows = [Rows(DataContext())[first + at] for at in range(num_samples)]
    return {name: torch.stack([row[name] for row in rows]) for name in Rows.info.fields}
