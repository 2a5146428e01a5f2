"""metrics.jsonl: one object per line, there as soon as it is written, never cut off."""

import json
import math
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from sley_core.data.dataset import BOUNDARY_FIELDS, IGNORE_INDEX, DataInfo, Field
from sley_core.engine.step_batch import BatchCounts
from sley_core.errors import RunError
from sley_core.model.build import build_on_meta
from sley_core.model.layers import Layer
from sley_core.plan.load import plan_from_dict
from sley_core.plugin import JsonlConfig, check_metrics
from sley_core.run_folder import JsonlWriter
from sley_core.run_folder import read_rows as rows_of
from sley_testing.plans import small_plan
from sley_trainer.row_metrics import Meter, ModelFlops, device_peak_flops, model_flops, peak_memory_mb

ROW: dict[str, float | int] = {"step": 1, "loss": 5.5, "tokens": 4096, "lr": 3e-4}


def test_a_half_line_spoils_no_other_and_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    writer = JsonlWriter(JsonlConfig(), tmp_path)
    writer.write({"step": 2, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    writer.close()
    first, half, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert (first, half) == ('{"step": 1}', '{"st')
    assert json.loads(last) == {"step": 2, "loss": None, "grad_norm": None, "lr": None}


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
IDS = Field("int64")
TOKENS = DataInfo({"mask": Field("bool"), "ids": Field("int64", 0, 1, "token"), "next": Field("int64", 0, 1, "label")}, 256)
PAIR = DataInfo({"labels": IDS, "tokens": IDS, "mask": Field("float32")})
HF = DataInfo({"input_ids": IDS, "labels": IDS})
FRAMES = DataInfo({"frames": Field("float32", batch_dim=1, sequence_dim=0)})
IMAGES = DataInfo({"image": Field("float32"), "class": IDS})
ROWS = DataInfo({"x": Field("float32"), "y": IDS})

NEXT = torch.tensor([[5, 6, IGNORE_INDEX, 8], [IGNORE_INDEX, 0, IGNORE_INDEX, IGNORE_INDEX]])
ZEROS = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("info", "batch", "counts"),
    [
        (TOKENS, {"mask": torch.zeros(2), "ids": ZEROS, "next": NEXT}, BatchCounts(2, 8, 4, 8, 2 * 16)),
        (PAIR, {"labels": NEXT, "tokens": ZEROS, "mask": torch.zeros(2, 4)}, BatchCounts(2, 8, 4, 8, 2 * 16)),
        (HF, {"input_ids": ZEROS, "labels": NEXT}, BatchCounts(2, 8, 4, 8, 2 * 16)),
        (PAIR, {"labels": ZEROS[:, 0], "tokens": ZEROS, "mask": torch.zeros(2)}, BatchCounts(2, 8, 0, 8, 2 * 16)),
        (FRAMES, {"frames": torch.zeros(5, 2, 80)}, BatchCounts(2, 0, 0, 10, 2 * 25)),
        (IMAGES, {"image": torch.zeros(4, 3, 8, 8), "class": torch.zeros(4)}, BatchCounts(4)),
        (ROWS, {"x": torch.zeros(4, 9), "y": torch.zeros(4)}, BatchCounts(4, 0, 0, 4, 4)),
        (
            replace(IMAGES, sequence=9),
            {"image": torch.zeros(4, 3, 8, 8), "class": torch.zeros(4)},
            BatchCounts(4, 0, 0, 36, 4 * 81),
        ),
    ],
)
def test_tokens_are_counted_only_where_a_field_has_token_ids(
    info: DataInfo, batch: dict[str, torch.Tensor], counts: BatchCounts
) -> None:
    """And trained ones where each token has a label. Positions are unknown of pictures alone."""
    meter = Meter(CPU, info)
    assert meter.count(batch) == counts
    row = meter.measure(counts, 0.5, 0.0)
    unit, other = ("tokens", "samples") if counts.tokens else ("samples", "tokens")
    assert (meter.unit, row[unit], row[f"{unit}_per_s"]) == (unit, getattr(counts, unit), 2 * getattr(counts, unit))
    assert row.get("trained_tokens", 0) == counts.trained_tokens
    assert row.keys().isdisjoint({other, f"{other}_per_s", "tflops", "mfu"}), "nothing is known of a model without matrices"


def test_an_ignored_label_of_ones_own_and_samples_of_flat_pictures() -> None:
    assert (
        Meter(CPU, TOKENS, labels="next", ignore_index=0).count({"mask": NEXT, "ids": ZEROS, "next": NEXT}).trained_tokens == 3
    )
    pictures = {"x": torch.zeros(4, 64), "y": torch.zeros(4)}
    for module in (nn.Conv1d(1, 1, 3), nn.Embedding(2, 3), Attention(2, 4)):
        flops = model_flops(layers(module, nn.Linear(2, 2)))
        assert Meter(CPU, ROWS, flops).count(pictures).positions == 0, "a sample may have several positions"


def test_attention_of_packed_documents_is_within_documents() -> None:
    """Rows of 3 + 5 and of 8 positions, in a model that reads where documents begin; another looks at the whole row."""
    info = DataInfo({"tokens": IDS, "labels": IDS, **BOUNDARY_FIELDS})
    batch = {"tokens": torch.zeros(2, 8), "labels": torch.zeros(2, 8), "cu_seqlens": torch.tensor([[0, 3, 8], [0, 8, 8]])}
    assert Meter(CPU, info, ModelFlops(reads_documents=True)).count(batch).pairs == 9 + 25 + 64
    assert Meter(CPU, info).count(batch).pairs == 64 + 64


def test_what_a_step_measures_and_its_utilisation_where_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = BatchCounts(2, 1000, 900, 1000, 500_000)
    block = torch.ones(64 << 20, dtype=torch.uint8)
    resident_mb = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    del block
    row = Meter(CPU, TOKENS).measure(counts, 0.5, 0.125)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    assert 0.99 * resident_mb <= row.pop("memory_mb") <= 1.01 * peak_mb
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=OSError))  # as without /proc
    assert peak_mb <= peak_memory_mb(CPU) <= 1.01 * peak_mb
    assert row == {"tokens": 1000, "trained_tokens": 900, "seconds": 0.5, "tokens_per_s": 2000.0, "data_wait_s": 0.125}
    row = Meter(CPU, TOKENS, ModelFlops(6e9, 1e6), num_devices=4, peak_flops=4 * 1e14).measure(counts, 0.5, 0.0)
    assert row["tflops"] == pytest.approx((6e12 + 5e11) / 0.5 / 4 / 1e12)
    assert row["mfu"] == pytest.approx(row["tflops"] / 100)


class Attention(nn.Module):
    def __init__(self, heads: int, head_dim: int, **more: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, head_dim
        self.__dict__.update(more)


class Wrapper(nn.Module):
    """Shows its child's weight, as a linear of peft does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> nn.Parameter:
        return self.base.weight


def layers(*modules: nn.Module, fields: tuple[str, ...] = ()) -> list[Layer]:
    return [Layer(str(number), module, fields=fields) for number, module in enumerate(modules)]


def test_matrices_count_and_embeddings_norms_and_biases_do_not() -> None:
    embed, head = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
    head.weight = embed.weight
    block = nn.Sequential(nn.LayerNorm(8), Wrapper(nn.Linear(8, 24)), Attention(2, 4), nn.Conv1d(8, 8, 3))
    flops = model_flops(layers(embed, block, head))
    assert flops == ModelFlops(6 * (8 * 24 + 8 * 8 * 3 + 8 * 100), 6 * 8, has_only_linears=False)


def test_a_small_llama_by_hand() -> None:
    """2 layers, 16 wide, 4 heads of 4, 2 of keys and values, feed-forward 24, 97 ids, sequences of 24; 10 of them in 2 s on two
    devices of 5 GFLOP/s.

    Each layer has queries 16 x 16, keys and values 8 x 16 each, output 16 x 16, and three of 16 x 24: 768 + 1152 = 1920. With
    the head of 97 x 16 = 1552, N = 5392. A token takes 6 N = 32352, and attention 6 x 2 layers x 16 x 24 = 4608: 36960 FLOPs.
    240 tokens in 2 s are 120 tok/s, so 4,435,200 FLOP/s, 2,217,600 of each device.
    """
    info = DataInfo({"tokens": IDS, "labels": IDS}, vocab_size=97, sequence=24)
    plan = plan_from_dict(small_plan(batch__global_size=10))
    flops = model_flops(build_on_meta(plan.model, info, 0).layers)
    meter = Meter(CPU, info, flops, num_devices=2, peak_flops=2 * 5e9)
    row = meter.measure(meter.count({"tokens": torch.zeros(10, 24), "labels": torch.zeros(10, 24)}), 2.0, 0.0)
    assert (row["tokens"], row["tokens_per_s"]) == (240, 120.0)
    assert row["tflops"] == pytest.approx(2_217_600 / 1e12, rel=1e-12)
    assert row["mfu"] == pytest.approx(2_217_600 / 5e9, rel=1e-12)


def test_an_mlp_by_hand_and_with_frozen_parts() -> None:
    """9 inputs, 32 hidden, 10 classes: N = 9 x 32 + 32 x 10 = 608, 3648 FLOPs a sample; 50 in 0.1 s are 1,824,000 FLOP/s.

    Frozen before all that is trained, the first matrix is only multiplied forward: 2 x 288. Frozen behind, the second one's
    gradients of inputs are still computed: 4 x 320. Within a layer that trains a part, as with adapters, 4 N too.
    """
    first, second = nn.Linear(9, 32), nn.Linear(32, 10)
    meter = Meter(CPU, ROWS, model_flops(layers(first, second)), peak_flops=1e9)
    row = meter.measure(meter.count({"x": torch.zeros(50, 9), "y": torch.zeros(50)}), 0.1, 0.0)
    assert (row["samples"], row["samples_per_s"]) == (50, 500.0)
    assert row["mfu"] == pytest.approx(1_824_000 / 1e9, rel=1e-12)
    first.requires_grad_(False)
    assert model_flops(layers(first, second)).matrices == 2 * 288 + 6 * 320
    assert model_flops(layers(second, first)).matrices == 4 * 288 + 6 * 320
    assert model_flops(layers(nn.Sequential(first, second))).matrices == 4 * 288 + 6 * 320
    assert model_flops(layers(Attention(2, 4), second, Attention(2, 4))).attention == (2 + 6) * 8
    assert model_flops(layers(second, Attention(2, 4, is_causal=False))).attention == 2 * 6 * 8


@pytest.mark.parametrize(
    ("name", "compute", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H200", "fp64", 67e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA H200", "tf32", 494.5e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("Tesla V100-PCIE-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "fp8", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
    ],
)
def test_peaks_by_name_and_type(monkeypatch: pytest.MonkeyPatch, name: str, compute: str, peak: float | None) -> None:
    """fp32 goes through tensor cores where torch may use them, with the peak of tf32."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    precision = SimpleNamespace(fp32_precision="tf32" if compute == "tf32" else "ieee")
    monkeypatch.setattr(torch.backends.cuda, "matmul", precision)
    assert device_peak_flops(torch.device("cuda", 0), compute.replace("tf32", "fp32")) == peak
