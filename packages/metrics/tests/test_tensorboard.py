"""Curves for TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from tensorboard.summary.writer import event_file_writer  # type: ignore[import-untyped]

from sley_core.protocols import MetricsWriter
from sley_metrics.config import TensorboardConfig
from sley_metrics.writers import TensorboardWriter
from sley_testing.writer_contract import MetricsWriterContract, Point


def test_every_number_is_a_point_of_its_curve(tmp_path: Path) -> None:
    writer = TensorboardWriter(TensorboardConfig(), tmp_path)
    assert isinstance(writer, MetricsWriter)
    for step in (1, 2):
        writer.write({"step": step, "loss": 6.0 - step, "tokens": 4096})
    writer.close()
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert curves.Tags()["scalars"] == ["loss", "tokens"]
    assert [(point.step, point.value) for point in curves.Scalars("loss")] == [(1, 5.0), (2, 4.0)]
    assert [point.value for point in curves.Scalars("tokens")] == [4096.0, 4096.0]


class TestTensorboard(MetricsWriterContract):
    """A thread of TensorBoard's writes its points, which also is where a full disk is an error."""

    writer: ClassVar[dict[str, Any]] = {"use": "metrics.tensorboard"}
    writes_at_once = False
    on_disk = False

    @pytest.fixture(autouse=True)
    def tensorboard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Files of one second are read in the order of their numbers in a process, as text, in which 10 is before 9: each test
        counts from 0, as each run does.
        """
        monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    def read(self, folder: Path) -> Iterator[Point]:
        events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
        events.Reload()
        for name in events.Tags()["scalars"]:
            yield from ((event.step, name, event.value) for event in events.Scalars(name))
