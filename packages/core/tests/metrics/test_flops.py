"""FLOPs of a token by the formula and from modules, and the peaks of devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sley_core.metrics.throughput import device_peak_flops, flops_per_token, model_flops_per_token, peak_flops


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


def test_a_model_on_meta_is_counted_without_memory() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(1 << 20, 1 << 20, bias=False)] * 2
    assert model_flops_per_token(layers, 1) == 2 * 6 * 2.0**40


def test_the_formula_is_what_torch_counts_for_a_linear() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layer, tokens = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False)), 64
    x = torch.randn(tokens, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == tokens * model_flops_per_token([layer], 1)


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


def test_a_cpu_has_no_peak() -> None:
    assert device_peak_flops(torch.device("cpu"), "fp32") is None


@pytest.mark.parametrize(("precision", "peak"), [("ieee", 67e12), ("tf32", 494.5e12)])
def test_fp32_goes_through_tensor_cores_where_torch_may_use_them(
    monkeypatch: pytest.MonkeyPatch, precision: str, peak: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=precision))
    assert device_peak_flops(torch.device("cuda", 0), "fp32") == peak
    assert device_peak_flops(torch.device("cuda", 0), "fp64") == 67e12
