"""Measures a step for its metrics row: samples and tokens per second, FLOP/s, model FLOPs utilisation and memory."""

import math
import re
import sys
import time
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sley_core.data.dataset import IGNORE_INDEX, DataInfo
from sley_core.engine.parts import Parts
from sley_core.engine.step_batch import BatchCounts
from sley_core.model.layers import Layer
from sley_core.plan.plan import Plan

MEMORY_EVERY_S = 0.5
"""The minimum number of seconds between two readings of the peak memory."""

DOCUMENTS = "cu_seqlens"
"""The name of the batch field with the boundaries of packed documents."""


class ModelFlops(NamedTuple):
    """The FLOPs of a model's forward and backward.

    matrices: the FLOPs of matrix products per position. attention: FLOPs per pair of positions in a document. is_flat: whether
    the model consists of linear layers, without convolutions, attention or embeddings. in_documents: whether a layer reads the
    document boundaries.
    """

    matrices: float = 0.0
    attention: float = 0.0
    is_flat: bool = True
    in_documents: bool = False

    def total(self, counts: BatchCounts) -> float:
        """Returns the FLOPs of a batch with these `counts`."""
        return self.matrices * counts.positions + self.attention * counts.pairs


class Meter:
    """Counts the samples and tokens of batches, and measures steps.

    unit: "tokens" if a field has token ids (`ids = "token"`, or an int64 pair of `tokens` or `input_ids` with `labels`), else
    "samples". peak_flops: the total peak FLOP/s of all devices, None if unknown. labels: the field with the labels; a
    token is trained if its label is neither negative nor `ignored`.
    """

    def __init__(
        self,
        device: torch.device,
        info: DataInfo,
        flops: ModelFlops | None = None,
        *,
        num_devices: int = 1,
        peak_flops: float | None = None,
        labels: str = "labels",
        ignored: int = IGNORE_INDEX,
    ) -> None:
        self.device = device
        self.flops = flops or ModelFlops()
        self.num_devices = num_devices
        self.peak_flops = peak_flops
        self.ignored = ignored
        self._info = info
        self._measured_at = -math.inf
        self._memory = 0.0
        fields = info.fields
        integers = {name for name, field in fields.items() if field.dtype == "int64"}
        pairs = [name for name in ("tokens", "input_ids") if {name, "labels"} <= integers]
        self._tokens = next((name for name, field in fields.items() if field.ids == "token" or name in pairs), None)
        self._labels = labels if labels in fields else next((name for name in fields if fields[name].ids == "label"), None)
        self.unit = "samples" if self._tokens is None else "tokens"

    @classmethod
    def for_run(cls, plan: Plan, parts: Parts, layers: Iterable[Layer], info: DataInfo) -> "Meter":
        """Returns the meter of a run, with the FLOPs of the whole model and the total peak FLOP/s of all devices."""
        device, size, loss = parts.world.device.torch_device, parts.world.size, plan.loss.config
        peak = plan.run.peak_tflops
        peak = device_peak_flops(device, parts.precision.compute) if peak is None else peak * 1e12
        return cls(
            device,
            info,
            model_flops(layers, {id(param.parameter): prod(param.shape) for param in parts.registry if param.shard}),
            num_devices=size,
            peak_flops=None if peak is None else peak * size,
            labels=getattr(loss, "labels", "labels"),
            ignored=getattr(loss, "ignore_index", IGNORE_INDEX),
        )

    def count(self, batch: Mapping[str, Tensor]) -> BatchCounts:
        """Counts the samples, tokens and positions of `batch`, which has whole sequences on the host. Tokens with ignored
        labels count as tokens, because the model computes them too.
        """
        name, field = next(iter(self._info.fields.items()))
        samples = batch[name].shape[field.batch_dim]
        tokens = trained = 0
        if self._tokens is not None:
            tokens, labels = batch[self._tokens].numel(), batch.get(self._labels or "")
            if labels is not None and labels.shape == batch[self._tokens].shape:
                trained = int(torch.count_nonzero((labels >= 0) & (labels != self.ignored)))
        length = tokens / samples if tokens else self._positions(batch)
        pairs = samples * length**2
        if self.flops.in_documents and DOCUMENTS in batch:
            pairs = float(batch[DOCUMENTS].diff(dim=-1).double().square().sum())
        return BatchCounts(samples, tokens, trained, samples * length, pairs)

    def _positions(self, batch: Mapping[str, Tensor]) -> int:
        """Returns the number of positions in a sample without tokens; 0 if it is unknown, as for an image."""
        if self._info.sequence is not None:
            return self._info.sequence
        for name, field in self._info.fields.items():
            if field.sequence_dim is not None:
                return batch[name].shape[field.sequence_dim]
        return int(self.flops.is_flat and all(value.ndim <= 2 for value in batch.values()))

    def measure(self, counts: BatchCounts, seconds: float, data_wait_s: float) -> dict[str, float | int]:
        """Returns `tokens`, `trained_tokens`, `seconds`, `tokens_per_s`, `data_wait_s`, `memory_mb`, `tflops` and `mfu`; or
        `samples` and `samples_per_s` for data without tokens.

        counts: the counts of the step over all ranks. seconds: the duration of the step. data_wait_s: the seconds that this
        rank waited for data. `trained_tokens` is left out if it is 0 or unknown. `memory_mb` is this rank's peak in MiB.
        `tflops` is the speed per device in 10^12 FLOP/s, left out if the FLOPs are unknown. `mfu` is the fraction of the
        devices' peak, left out if either is unknown.
        """
        count = int(counts.samples if self._tokens is None else counts.tokens)
        row: dict[str, float | int] = {self.unit: count}
        if counts.trained_tokens:
            row["trained_tokens"] = int(counts.trained_tokens)
        row |= {"seconds": seconds, f"{self.unit}_per_s": count / seconds}
        row |= {"data_wait_s": data_wait_s, "memory_mb": self._memory_mb()}
        if flops_per_s := self.flops.total(counts) / seconds:
            row["tflops"] = flops_per_s / self.num_devices / 1e12
            if self.peak_flops is not None:
                row["mfu"] = flops_per_s / self.peak_flops
        return row

    def _memory_mb(self) -> float:
        """Returns the peak memory in MiB. The value is up to `MEMORY_EVERY_S` old, since reading it takes 0.1 ms."""
        time_s = time.monotonic()
        if time_s - self._measured_at >= MEMORY_EVERY_S:
            self._measured_at = time_s
            self._memory = memory_mb(self.device)
        return self._memory


Peaks = dict[str, float]
"""Dense TFLOP/s by dtype. `tf32` means fp32 on tensor cores. The fp64 value is also that of tensor cores."""

PEAKS: tuple[tuple[str, Peaks], ...] = (
    (r"\bA100\b", {"fp64": 19.5, "fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}),
    (r"\bH100\b.*\bPCIe\b", {"fp64": 51.0, "fp32": 51.0, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0}),
    (r"\b(H100|H200)\b.*\bNVL\b", {"fp64": 60.0, "fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}),
    (r"\b(H100|H200|GH200)\b", {"fp64": 67.0, "fp32": 67.0, "tf32": 494.5, "bf16": 989.4, "fp16": 989.4}),
    (r"\bGB200\b", {"fp64": 40.0, "fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0}),
    (r"\bB200\b", {"fp64": 37.0, "fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0}),
    (r"\bV100-PCIE\b", {"fp64": 7.0, "fp32": 14.0, "fp16": 112.0}),
    (r"\bV100-SXM2\b", {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0}),
    (r"\bTesla T4$", {"fp32": 8.1, "fp16": 65.0}),
    (r"\bNVIDIA A10$", {"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0}),
    (r"\bA30$", {"fp64": 10.3, "fp32": 10.3, "tf32": 82.0, "bf16": 165.0, "fp16": 165.0}),
    (r"\bNVIDIA A40$", {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7}),
    (r"\bRTX A6000$", {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}),
    (r"\bL4$", {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0}),
    (r"\bL40S$", {"fp32": 91.6, "tf32": 183.0, "bf16": 362.0, "fp16": 362.0}),
    (r"\bRTX 3090$", {"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0}),
    (r"\bRTX 4090$", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}),
)
"""Patterns of device names with their peaks; the first match counts. The values are from NVIDIA's datasheets (A100 80GB 2021,
H100 2023, H200 2024, GH200 2023, HGX B200 and GB200 NVL72 2024; V100 to L40S) and GeForce architecture papers (with fp32 sums),
halved if they include structured sparsity."""


def device_peak_flops(device: torch.device, compute: str) -> float | None:
    """Returns the dense FLOP/s of this device in the plan's `precision.compute`; None for a CPU, a MIG slice and any other
    device that is not in `PEAKS`.
    """
    if device.type != "cuda" or "MIG" in (name := torch.cuda.get_device_name(device)):
        return None
    if compute == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        compute = "tf32"
    peaks = next((peaks for pattern, peaks in PEAKS if re.search(pattern, name)), {})
    return peaks[compute] * 1e12 if compute in peaks else None


def model_flops(layers: Iterable[Layer], full_numels: Mapping[int, int] | None = None) -> ModelFlops:
    """Returns the FLOPs of any model, computed from its modules, which may be on meta: 6 N + 6 W S for each of S tokens.

    A trained matrix with N elements needs 2 N FLOPs per position in the forward, 2 N for the gradient of its input and 2 N for
    its own gradient. A frozen matrix needs 4 N, or 2 N before the first layer with a trained parameter. Causal attention of
    width W = heads x head_dim needs 2 W FLOPs for the scores and 2 W for the context per visible position, S / 2 on average,
    and twice as many in the backward. This is half of the 12 W S of PaLM (Chowdhery et al., 2022, appendix B), which counts the
    whole square. Recomputation is not counted, so that equal tokens per second give an equal utilisation.

    A matrix is a `weight` or `in_proj_weight` with two or more dims that a module other than an embedding owns: in linears,
    convolutions of stride 1, and a tied head. The matrices of a module with `active_share`, the share of its
    experts that a token uses, are multiplied by this share.

    full_numels: the number of elements of the full parameter, keyed by the id of a sharded parameter.
    """
    matrices = attention = 0.0
    is_flat, has_backward, in_documents = True, False, False
    for layer in layers:
        in_documents |= DOCUMENTS in layer.fields
        has_backward |= any(param.requires_grad for param in layer.module.parameters())
        for module in layer.module.modules():
            is_flat &= not isinstance(module, _EMBEDDING_CLASSES)
            share = getattr(module, "active_share", 1.0)
            for name in () if isinstance(module, _EMBEDDING_CLASSES) else _MATRIX_NAMES if share == 1.0 else module._parameters:
                weight = getattr(module, name, None)
                # In peft's wrappers a parameter that is not in `_parameters` belongs to a child.
                is_owned = name in module._parameters or not isinstance(weight, nn.Parameter)
                if isinstance(weight, Tensor) and weight.ndim >= 2 and is_owned:
                    passes = 3 if weight.requires_grad else 1 + has_backward
                    matrices += 2.0 * passes * share * (full_numels or {}).get(id(weight), weight.numel())
                    is_flat &= weight.ndim == 2
            attention += 2.0 * (1 + 2 * has_backward) * attention_width(module)
    return ModelFlops(matrices, attention, is_flat and not attention, in_documents)


_EMBEDDING_CLASSES = (nn.Embedding, nn.EmbeddingBag)
_MATRIX_NAMES = ("weight", "in_proj_weight")


def attention_width(module: Any) -> int:
    """Returns heads x head_dim of an attention module, doubled if it is not causal; 0 for other modules.

    Reads the attribute `attention_width`, or `head_dim` and `num_heads` as in torch and transformers.
    """
    if (width := getattr(module, "attention_width", None)) is not None:
        return int(width)
    heads = getattr(module, "num_heads", None) or getattr(getattr(module, "config", None), "num_attention_heads", None)
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        return 0
    return heads * head_dim * (1 if getattr(module, "is_causal", True) else 2)


def memory_mb(device: torch.device) -> float:
    """Returns the peak memory in MiB: torch's allocations on a CUDA device, or the resident set of this process on a CPU.

    The resident set includes torch's libraries (about 200 MiB), the stacks of threads and mapped files. It is read from /proc
    if that exists, since getrusage may report the peak of the parent process at the fork.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        status = Path("/proc/self/status").read_bytes()
        return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) / 2**10
    except (OSError, IndexError):
        import resource  # does not exist on Windows

        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
