"""Sets of odd sizes and metrics of one's own, for evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Rows:
    """`num_samples` drawn samples of `sequence` tokens, a quarter of whose labels are ignored."""

    def __init__(self, num_samples: int, sequence: int = 24) -> None:
        self.num_samples = num_samples
        self.sequence = sequence

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(256, (self.sequence + 1,), generator=generator)
        ignored = torch.rand(self.sequence, generator=generator) < 0.25
        return {"tokens": ids[:-1], "labels": ids[1:].masked_fill(ignored, -100)}


class Endless:
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (Rows(5)[index] for index in range(5))


def of_sequences(place: str = "") -> Callable[[Tensor, Mapping[str, Tensor]], dict[str, tuple[Any, Any]]]:
    """Counts what only whole sequences tell: the position of the highest logit of all, and how many are far from the middle.

    place: what is wrong with its results: "a name" of rank 1, "a pair", or "in place".
    """

    def count(output: Tensor, batch: Mapping[str, Tensor]) -> dict[str, tuple[Any, Any]]:
        from torch.distributed import get_rank, is_initialized

        assert "tokens" in batch
        highest = output.amax(-1).argmax(-1)
        if place == "in place":
            output.zero_()
        found: dict[str, tuple[Any, Any]] = {
            "highest": (highest.sum(), len(highest)),
            "likelihood": (output.log_softmax(-1).amax(-1).sum(), float(output[..., 0].numel())),
        }
        if place == "a name" and is_initialized() and get_rank() == 1:
            found["more"] = found.pop("highest")
        return {"highest": (highest, 1.0)} if place == "a pair" else found

    return count
