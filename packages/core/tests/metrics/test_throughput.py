"""The meter counts what the dataset declares; memory is the process's own high-water mark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sley_core.data.dataset import DataInfo, Field
from sley_core.metrics import throughput
from sley_core.metrics.throughput import Meter, memory_mb, resident_mb
from sley_testing.ranks import Ranks

CPU = torch.device("cpu")
TOKENS = DataInfo({"mask": Field("bool"), "tokens": Field("int64", sequence_dim=1)}, vocab_size=256, sequence=7)
FRAMES = DataInfo({"frames": Field("float32", batch_dim=1, sequence_dim=0)})
IMAGES = DataInfo({"image": Field("float32"), "class": Field("int64")})


@pytest.mark.parametrize(
    ("info", "batch", "unit", "count"),
    [
        (TOKENS, {"mask": torch.zeros(3), "tokens": torch.zeros(3, 7)}, "tokens", 21),
        (FRAMES, {"frames": torch.zeros(5, 2, 80)}, "tokens", 10),
        (IMAGES, {"image": torch.zeros(4, 3, 8, 8), "class": torch.zeros(4)}, "samples", 4),
    ],
)
def test_samples_or_tokens_follow_the_declared_fields(
    info: DataInfo, batch: dict[str, torch.Tensor], unit: str, count: int
) -> None:
    meter = Meter(CPU, info, flops_per_token=6e9, peak_flops=1e15)
    assert (meter.unit, meter.count(batch)) == (unit, count)
    row = meter.measure(count, 0.5, 0.0)
    assert (row[unit], row[f"{unit}_per_s"]) == (count, 2 * count)
    assert ("samples" in row, "mfu" in row) == ((True, False) if unit == "samples" else (False, True))


def test_what_a_step_measures() -> None:
    row = Meter(CPU, TOKENS).measure(1000, 0.5, 0.125)
    assert row.pop("memory_mb") == pytest.approx(resident_mb(), rel=0.1)
    assert row == {"tokens": 1000, "seconds": 0.5, "tokens_per_s": 2000.0, "data_wait_s": 0.125}


def test_utilisation_where_the_peak_is_known() -> None:
    meter = Meter(CPU, TOKENS, flops_per_token=6e9, peak_flops=2 * 989.4e12)
    assert meter.measure(65_536, 1.0, 0.0)["mfu"] == pytest.approx(65_536 * 6e9 / (2 * 989.4e12))


def grow() -> tuple[float, float, float]:
    before = resident_mb()
    block = bytearray(64 << 20)
    grown = resident_mb()
    del block
    return before, grown, resident_mb()


def test_the_high_water_mark_rises_and_stays(ranks: Callable[..., Ranks]) -> None:
    ((before, grown, after),) = ranks(1, init=False, fresh=True)(grow)
    assert 63 <= grown - before < 80
    assert after >= grown - 1  # the kernel counts in batches of pages


def test_without_proc_the_system_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = resident_mb()
    monkeypatch.setattr(throughput, "STATUS", tmp_path / "none")
    assert memory_mb(CPU) >= known * 0.9
    (tmp_path / "none").write_text("Name:\tpython\n")
    assert memory_mb(CPU) >= known * 0.9


@pytest.mark.gpu
def test_on_cuda_memory_is_what_torch_allocated() -> None:
    device = torch.device("cuda", 0)
    block = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    peak = memory_mb(device)
    del block
    assert 64 <= peak == memory_mb(device)
