"""metrics.jsonl: one object per line, there as soon as it is written, never cut off."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sley_core.config import JsonlConfig, check_metrics
from sley_core.data.dataset import DataInfo, Field
from sley_core.errors import RunError
from sley_core.metrics.jsonl import JsonlWriter
from sley_core.metrics.jsonl import rows as rows_of
from sley_core.metrics.throughput import (
    Meter,
    device_peak_flops,
    flops_per_token,
    memory_mb,
    model_flops_per_token,
    peak_flops,
    resident_mb,
)
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan

ROW: dict[str, float | int] = {"step": 1, "loss": 5.5, "tokens": 4096, "lr": 3e-4}


def rows(folder: Path) -> list[object]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    writer = JsonlWriter(JsonlConfig(), tmp_path)
    writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    writer.close()
    assert rows(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": None}]


def test_a_half_line_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    writer = JsonlWriter(JsonlConfig(), tmp_path)
    writer.write({"step": 2})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == ['{"step": 1}', '{"st', '{"step": 2}']


def test_a_killed_process_keeps_its_rows(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from sley_core.config import JsonlConfig\n"
        "from sley_core.metrics.jsonl import JsonlWriter\n"
        "writer = JsonlWriter(JsonlConfig(), pathlib.Path(sys.argv[1]))\n"
        "for step in range(3): writer.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    assert rows(tmp_path) == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none/metrics\.jsonl`: No such file") as error:
        JsonlWriter(JsonlConfig(), tmp_path / "none")
    assert error.value.diagnostics[0].code == "metrics-file"


def test_a_run_that_goes_on_takes_later_rows_back(tmp_path: Path) -> None:
    """And goes on writing where they were; a half line at the end goes with them."""
    writer = JsonlWriter(JsonlConfig(), tmp_path)
    for step in (1, 2, 3):
        writer.write(ROW | {"step": step})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = JsonlWriter(JsonlConfig(), tmp_path)
    again.rewind(1)
    again.write(ROW | {"step": 2, "loss": 4.0})
    assert list(rows_of(tmp_path)) == [ROW, ROW | {"step": 2, "loss": 4.0}]
    again.rewind(0)
    assert list(rows_of(tmp_path)) == []
    again.close()


def test_a_writer_that_is_listed_twice_is_refused() -> None:
    plan = plan_from_dict(small_plan(metrics=[{"use": "core.jsonl"}, {"use": "core.jsonl"}]))
    (problem,) = check_metrics(plan)
    assert (problem.code, problem.path) == ("metrics-twice", ("metrics", 1))


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


def test_what_a_step_measures_and_its_utilisation_where_the_peak_is_known() -> None:
    row = Meter(CPU, TOKENS).measure(1000, 0.5, 0.125)
    assert row.pop("memory_mb") == pytest.approx(resident_mb(), rel=0.1)
    assert row == {"tokens": 1000, "seconds": 0.5, "tokens_per_s": 2000.0, "data_wait_s": 0.125}
    meter = Meter(CPU, TOKENS, flops_per_token=6e9, peak_flops=2 * 989.4e12)
    assert meter.measure(65_536, 1.0, 0.0)["mfu"] == pytest.approx(65_536 * 6e9 / (2 * 989.4e12))


@pytest.mark.gpu
def test_on_cuda_memory_is_what_torch_allocated() -> None:
    device = torch.device("cuda", 0)
    block = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    peak = memory_mb(device)
    del block
    assert 64 <= peak == memory_mb(device)


def test_the_formula_on_numbers_worked_out_by_hand() -> None:
    """GPT-3 175B: 96 layers, 96 heads of 128, sequence 2048; attention adds 1.4 % to 6 N when it is causal."""
    num_parameters = 174_600_000_000
    flops = flops_per_token(num_parameters, 96 * 96 * 128, 2048)
    assert flops == 6 * num_parameters + 6 * 96 * 12288 * 2048
    assert flops / (6 * num_parameters) == pytest.approx(1.0138, abs=1e-4)


class Attention(nn.Module):
    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention_width = heads * head_dim


def test_matrices_count_and_embeddings_norms_and_biases_do_not() -> None:
    embed, head = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
    head.weight = embed.weight
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 24), Attention(2, 4), nn.Conv1d(8, 8, 3))
    assert model_flops_per_token([embed, block, head], 16) == 6 * (8 * 24 + 8 * 8 * 3 + 8 * 100) + 6 * 8 * 16


@pytest.mark.parametrize(
    ("name", "compute", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.5e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA H200", "fp64", 67e12),
        ("NVIDIA H200 NVL", "fp64", 60e12),
        ("NVIDIA GH200 480GB", "bf16", 989.4e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA H100 80GB HBM3", "fp8", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA RTX A1000", "bf16", None),
        ("NVIDIA H20", "bf16", None),
        ("AMD Instinct MI300X", "bf16", None),
    ],
)
def test_peaks_by_name_and_type(name: str, compute: str, peak: float | None) -> None:
    assert peak_flops(name, compute) == peak


@pytest.mark.parametrize(("precision", "peak"), [("ieee", 67e12), ("tf32", 494.5e12)])
def test_fp32_goes_through_tensor_cores_where_torch_may_use_them(
    monkeypatch: pytest.MonkeyPatch, precision: str, peak: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=precision))
    assert device_peak_flops(torch.device("cuda", 0), "fp32") == peak
    assert device_peak_flops(torch.device("cuda", 0), "fp64") == 67e12
