"""Core's own writer, losses, data and rates hold the contracts that it gives to others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sley_testing.dataset_contract import DatasetContract
from sley_testing.loss_contract import LossContract
from sley_testing.optimizer_contract import LRScheduleContract
from sley_testing.writer_contract import MetricsWriterContract, Point


class TestJsonl(MetricsWriterContract):
    writer: ClassVar[dict[str, Any]] = {"use": "core.jsonl"}

    def read(self, folder: Path) -> Iterator[Point]:
        for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
            if line.endswith("}"):  # the last line of a full disk does not
                row = json.loads(line)
                yield from ((row["step"], name, value) for name, value in row.items())


class TestCrossEntropy(LossContract):
    loss: ClassVar[dict[str, Any]] = {"use": "core.cross_entropy", "label_smoothing": 0.1}

    def batch(self) -> tuple[Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        labels = torch.randint(7, (4, 5), generator=generator)
        return torch.randn(4, 5, 7, generator=generator, dtype=torch.float64), {
            "labels": labels.masked_fill(labels == 0, -100),
            "tokens": torch.randint(7, (4, 5), generator=generator),
        }

    def nothing(self) -> dict[str, Tensor]:
        return {"labels": torch.full((4, 5), -100), "tokens": torch.ones(4, 5, dtype=torch.int64)}


class TestText(DatasetContract):
    data: ClassVar[dict[str, Any]] = {
        "use": "data.text",
        "files": ["*.txt"],
        "sequence": 8,
        "separator": "\n\n",
        "held_out": 0.3,
    }
    holds_out = True

    def write_files(self, folder: Path) -> None:
        (folder / "a.txt").write_text("\n\n".join(sha256(bytes([at])).hexdigest() for at in range(12)), "utf-8")


class TestCosine(LRScheduleContract):
    learning_rate: ClassVar[dict[str, Any]] = {"use": "core.cosine", "warmup_steps": 10}


class TestWarmupStableDecay(LRScheduleContract):
    learning_rate: ClassVar[dict[str, Any]] = {"use": "core.warmup_stable_decay", "warmup_steps": 10}
