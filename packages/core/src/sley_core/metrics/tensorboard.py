"""Writes curves for TensorBoard: `tensorboard --logdir runs` shows every run side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from sley_core.metrics.config import TensorboardConfig
from sley_core.protocols import MetricsWriter


class TensorboardWriter(MetricsWriter):
    """The writer `core.tensorboard`: each number of a row is a point of the curve of its name, at the row's step."""

    def __init__(self, config: TensorboardConfig, folder: Path) -> None:
        self._folder = str(folder / "tensorboard")
        self._flush_s = config.flush_s
        self._writer = SummaryWriter(self._folder, flush_secs=self._flush_s)

    def write(self, row: Mapping[str, float | int]) -> None:
        """Queues one point per number except `step`; a thread of TensorBoard's writes them."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def rewind(self, step: int) -> None:
        """Begins another file, which tells TensorBoard to show no earlier point of later steps."""
        self._writer.close()
        self._writer = SummaryWriter(self._folder, flush_secs=self._flush_s, purge_step=step + 1)

    def close(self) -> None:
        """Closes the writer; on return every point is in the file."""
        self._writer.close()
