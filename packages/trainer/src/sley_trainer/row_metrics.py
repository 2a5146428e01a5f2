"""Measures a step for its metrics row: samples and tokens per second, FLOP/s, model FLOPs utilisation and memory (`Meter`), and
the loss of each source of samples, if the dataset has `sources` (`SourceSums`):

    a microbatch of one source         its loss is the source's loss
    a microbatch of several sources    `loss` is called again for the samples of each source, without gradients

The all-reduce at the end of a step also sums these losses over the ranks. If the plan fixes the order of sums, the results have
the same bits in every layout.
"""

import math
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sley_core.data.dataset import IGNORE_INDEX, SOURCE, Batch, DataInfo, Field
from sley_core.engine.boundary import flatten, unflatten
from sley_core.engine.parts import Parts
from sley_core.engine.step_batch import BatchCounts, BatchSplitter, StepBatch
from sley_core.errors import RunError
from sley_core.model.layers import Layer
from sley_core.plan.plan import Plan
from sley_core.protocols import Loss, SplitLogits

MEMORY_EVERY_S = 0.5
"""The minimum time between two readings of the peak memory, in seconds. A reading takes 0.1 ms."""

DOCUMENTS = "cu_seqlens"
"""The name of the batch field with the boundaries of the documents that are packed into a sequence."""


class ModelFlops(NamedTuple):
    """The FLOPs of a model's forward and backward. matrices: FLOPs of the matrix products per position. attention: FLOPs per
    pair of positions in a document. has_only_linears: whether no module is a convolution, attention or embedding.
    reads_documents: whether a layer reads the boundaries of documents.
    """

    matrices: float = 0.0
    attention: float = 0.0
    has_only_linears: bool = True
    reads_documents: bool = False

    def total(self, counts: BatchCounts) -> float:
        """Returns the FLOPs of the forward and backward of a batch with these `counts`."""
        return self.matrices * counts.positions + self.attention * counts.pairs


class Meter:
    """Counts the samples and tokens of batches, and measures the speed and memory of steps for the metrics row.

    unit: "tokens" if a field has token ids (`ids = "token"`, or int64 `tokens` or `input_ids` beside int64 `labels`), else
    "samples". peak_flops: the total peak FLOP/s of the `num_devices` devices; None if unknown. labels: the field with the
    labels; a token is trained if its label is neither negative nor `ignore_index`.
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
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        self.device = device
        self.flops = flops or ModelFlops()
        self.num_devices = num_devices
        self.peak_flops = peak_flops
        self.ignore_index = ignore_index
        self._info = info
        self._measured_s, self._memory_mb = -math.inf, 0.0
        fields = info.fields
        integers = {name for name, field in fields.items() if field.dtype == "int64"}
        pairs = [name for name in ("tokens", "input_ids") if {name, "labels"} <= integers]
        self._tokens = next((name for name, field in fields.items() if field.ids == "token" or name in pairs), None)
        self._labels = labels if labels in fields else next((name for name in fields if fields[name].ids == "label"), None)
        self.unit = "samples" if self._tokens is None else "tokens"

    @classmethod
    def for_run(cls, plan: Plan, parts: Parts, layers: Iterable[Layer], info: DataInfo) -> "Meter":
        """Returns the meter of a run. layers: all layers of the model. info: the declaration of the training data."""
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
            ignore_index=getattr(loss, "ignore_index", IGNORE_INDEX),
        )

    def count(self, batch: Mapping[str, Tensor]) -> BatchCounts:
        """Returns the number of samples, tokens and positions in `batch`, which has whole sequences on the host. A token with
        an ignored label counts too, because the model computes it.
        """
        name, field = next(iter(self._info.fields.items()))
        samples = batch[name].shape[field.batch_dim]
        tokens = trained = 0
        if self._tokens is not None:
            tokens, labels = batch[self._tokens].numel(), batch.get(self._labels or "")
            if labels is not None and labels.shape == batch[self._tokens].shape:
                trained = int(torch.count_nonzero((labels >= 0) & (labels != self.ignore_index)))
        length = tokens / samples if tokens else self._positions(batch)
        pairs = samples * length**2
        if self.flops.reads_documents and DOCUMENTS in batch:
            pairs = float(batch[DOCUMENTS].diff(dim=-1).double().square().sum())
        return BatchCounts(samples, tokens, trained, samples * length, pairs)

    def _positions(self, batch: Mapping[str, Tensor]) -> int:
        """Returns the number of positions in a sample without tokens: 1 for vectors in a model of linear layers, or 0."""
        if self._info.sequence is not None:
            return self._info.sequence
        for name, field in self._info.fields.items():
            if field.sequence_dim is not None:
                return batch[name].shape[field.sequence_dim]
        return int(self.flops.has_only_linears and all(value.ndim <= 2 for value in batch.values()))

    def measure(self, counts: BatchCounts, seconds: float, data_wait_s: float) -> dict[str, float | int]:
        """Returns `tokens`, `trained_tokens`, `seconds`, `tokens_per_s`, `data_wait_s`, `memory_mb`, `tflops` and `mfu`; or
        `samples` and `samples_per_s` for data without tokens. Leaves out unknown values, and `trained_tokens` if it is 0.

        counts: the counts of the step over all ranks. seconds: the duration of the step. data_wait_s: how long this rank waited
        for data, in seconds. `memory_mb` is this rank's peak in MiB, `tflops` the speed per device in 10^12 FLOP/s, and `mfu`
        this speed as a fraction of the device's peak.
        """
        count = int(counts.samples if self._tokens is None else counts.tokens)
        row: dict[str, float | int] = {self.unit: count}
        if counts.trained_tokens:
            row["trained_tokens"] = int(counts.trained_tokens)
        row |= {"seconds": seconds, f"{self.unit}_per_s": count / seconds}
        if (time_s := time.monotonic()) - self._measured_s >= MEMORY_EVERY_S:
            self._measured_s, self._memory_mb = time_s, peak_memory_mb(self.device)
        row |= {"data_wait_s": data_wait_s, "memory_mb": self._memory_mb}
        if flops_per_s := self.flops.total(counts) / seconds:
            row["tflops"] = flops_per_s / self.num_devices / 1e12
            if self.peak_flops is not None:
                row["mfu"] = flops_per_s / self.peak_flops
        return row


PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
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
"""Patterns of CUDA device names with their dense TFLOP/s by dtype; the first matching pattern is used. `tf32` means fp32 on
tensor cores, and fp64 values also use tensor cores if the device has them for fp64. The values are from NVIDIA's datasheets
(A100 80GB 2021, H100 2023, H200 2024, GH200 2023, HGX B200 and GB200 NVL72 2024; V100 to L40S) and GeForce architecture papers
(with fp32 sums). Values that include structured sparsity are halved."""


def device_peak_flops(device: torch.device, compute: str) -> float | None:
    """Returns the peak dense FLOP/s of `device` in the dtype `compute` (`precision.compute` of the plan); None for a CPU, a MIG
    slice and any other device or dtype that is not in `PEAK_TFLOPS`.
    """
    if device.type != "cuda" or "MIG" in (name := torch.cuda.get_device_name(device)):
        return None
    if compute == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        compute = "tf32"
    peaks = next((peaks for pattern, peaks in PEAK_TFLOPS if re.search(pattern, name)), {})
    return peaks[compute] * 1e12 if compute in peaks else None


def model_flops(layers: Iterable[Layer], full_numels: Mapping[int, int] | None = None) -> ModelFlops:
    """Returns the FLOPs of a model's forward and backward, computed from its modules, which may be on meta: 6 N + 6 W S for
    each token of a sequence of S tokens, with N elements in trained matrices and attention of width W.

    A trained matrix with N elements needs 2 N FLOPs per position in the forward, 2 N for the gradient of its input and 2 N for
    its own gradient. A frozen matrix needs 4 N, or 2 N before the first layer with a trained parameter. Causal attention of
    width W = heads x head_dim needs 2 W FLOPs for the scores and 2 W for the context per visible position, S / 2 on average,
    and twice as many in the backward. This is half of the 12 W S of PaLM (Chowdhery et al., 2022, appendix B), which counts the
    whole square. Recomputation is not counted, so that equal tokens per second give an equal utilisation.

    A matrix is a `weight` or `in_proj_weight` with two or more dims that belongs to a module other than an embedding, such as
    a linear, a convolution of stride 1 or a tied head. If a module has `active_share`, the share of its experts that a token
    uses, the FLOPs of all its parameters are multiplied by this share.

    full_numels: the number of elements of the full parameter, keyed by the id of a sharded parameter.
    """
    matrices = attention = 0.0
    has_only_linears, has_backward, reads_documents = True, False, False
    for layer in layers:
        reads_documents |= DOCUMENTS in layer.fields
        has_backward |= any(param.requires_grad for param in layer.module.parameters())
        for module in layer.module.modules():
            has_only_linears &= not isinstance(module, _EMBEDDING_CLASSES)
            share = getattr(module, "active_share", 1.0)
            for name in () if isinstance(module, _EMBEDDING_CLASSES) else _MATRIX_NAMES if share == 1.0 else module._parameters:
                weight = getattr(module, name, None)
                # In peft's wrappers a parameter that is not in `_parameters` belongs to a child.
                is_owned = name in module._parameters or not isinstance(weight, nn.Parameter)
                if isinstance(weight, Tensor) and weight.ndim >= 2 and is_owned:
                    passes = 3 if weight.requires_grad else 1 + has_backward
                    matrices += 2.0 * passes * share * (full_numels or {}).get(id(weight), weight.numel())
                    has_only_linears &= weight.ndim == 2
            attention += 2.0 * (1 + 2 * has_backward) * attention_width(module)
    return ModelFlops(matrices, attention, has_only_linears and not attention, reads_documents)


_EMBEDDING_CLASSES = (nn.Embedding, nn.EmbeddingBag)  # modules that look up rows, without a matrix product
_MATRIX_NAMES = ("weight", "in_proj_weight")  # the parameters of linears, convolutions and nn.MultiheadAttention


def attention_width(module: Any) -> int:
    """Returns the number of heads times their width for a torch or transformers attention module, doubled if the attention is
    not causal; 0 for other modules. The `attention_width` attribute of a module, if it exists, replaces this value.
    """
    if (width := getattr(module, "attention_width", None)) is not None:
        return int(width)
    heads = getattr(module, "num_heads", None) or getattr(getattr(module, "config", None), "num_attention_heads", None)
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        return 0
    return heads * head_dim * (1 if getattr(module, "is_causal", True) else 2)


def peak_memory_mb(device: torch.device) -> float:
    """Returns this process's peak memory in MiB: torch's allocations on a CUDA device, or the resident set on a CPU. The
    resident set includes torch's libraries (about 200 MiB), the stacks of threads and mapped files. It is read from /proc if
    that exists, since getrusage may report the peak of the parent process at the fork.
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


class SourceSums:
    """Sums the losses and loss weights of each source of samples in one step on this rank. names: the names of the sources.
    fields: the declared batch fields. splitter: says whether to call `loss.weight`, and with slices or full sequences.
    """

    def __init__(
        self, names: Sequence[str], parts: Parts, fields: Mapping[str, Field], loss: Loss, splitter: BatchSplitter
    ) -> None:
        self.names = tuple(names)
        self.splitter = splitter
        self._fields = fields
        self._loss = loss
        self._reduction = parts.store.reduction
        self._device = parts.world.device
        self._weights: list[list[float]] = [[] for _ in self.names]
        self._losses = torch.zeros(0)

    def begin(self, batch: StepBatch) -> None:
        """Begins a step, and sums each source's loss weights in `batch`. Raises RunError "data-source" for a wrong source."""
        shape = (batch.num_microbatches,) if self._reduction.has_fixed_order else ()
        self._weights = [[] for _ in self.names]
        self._losses = torch.zeros((len(self.names), *shape), dtype=torch.float64, device=self._device.torch_device)
        if self.splitter.computes_weight:
            for piece in batch.whole if self.splitter.weight_of_full_sequences else batch.micros:
                for source in sorted(set(piece[SOURCE].tolist())):
                    if not 0 <= source < len(self.names):
                        names = ", ".join(self.names)
                        message = f"a sample has the source {source}, but the data has {len(self.names)} sources: {names}"
                        raise RunError("data-source", message)
                    rows = (piece[SOURCE] == source).nonzero().flatten()
                    self._weights[source].append(self._loss.weight(self._select_fields(piece, rows)))

    @torch.no_grad()
    def add(self, micro: int, output: Any, batch: Mapping[str, Tensor], sources: Tensor, loss: Tensor) -> None:
        """Adds the loss of a microbatch. If `output` is a collective `SplitLogits`, all ranks that share it must call `add`.
        output: the model's output. batch: the fields that the loss reads, on the device. sources: the source of each sample, on
        the host. loss: the loss of the whole microbatch.
        """
        is_split = not isinstance(output, Tensor) and isinstance(output, SplitLogits)
        is_collective = is_split and getattr(output, "is_collective", True)
        sources_of_batch = sorted(set(sources.tolist()))
        if len(sources_of_batch) == 1 and not is_collective:
            self._loss_slot(sources_of_batch[0], micro).add_(loss.detach())
            return
        loss_copy = copy(self._loss)  # a copy, since a loss may count its calls
        devices = [self._device.torch_device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            for source in range(len(self.names)) if is_collective else sources_of_batch:
                rows = sources == source
                if is_split:  # in a collective, all ranks must make the same calls, whatever sources they have
                    names = getattr(loss_copy, "fields", batch)
                    loss_inputs = output, {name: self._mask_labels(name, batch[name], rows) for name in names}
                else:
                    loss_inputs = self._select_rows(output, batch, rows)
                self._loss_slot(source, micro).add_(loss_copy.loss(*loss_inputs))

    def _loss_slot(self, source: int, micro: int) -> Tensor:
        """Returns a view of the sum to which the loss of `source` in the microbatch `micro` is added."""
        return self._losses[source, micro] if self._reduction.has_fixed_order else self._losses[source]

    def _mask_labels(self, name: str, labels: Tensor, rows: Tensor) -> Tensor:
        """Returns `labels`, the field `name`, with `IGNORE_INDEX` in all samples for which `rows` (bool [samples]) is False."""
        shape = [1] * labels.ndim
        shape[self._fields[name].batch_dim] = len(rows)
        return labels.masked_fill(~rows.to(labels.device).view(shape), IGNORE_INDEX)

    def _select_rows(self, output: Any, batch: Mapping[str, Tensor], rows: Tensor) -> tuple[Any, Batch]:
        """Returns output and batch of the samples in `rows` (bool). Raises RunError "outputs-apart" if batch sizes differ."""
        dim = self._fields[SOURCE].batch_dim
        tensors, structure = flatten(output)
        for tensor in tensors:
            if tensor.ndim <= dim or tensor.shape[dim] != len(rows):
                message = f"an output of shape {list(tensor.shape)} does not have the {len(rows)} samples of its microbatch"
                hint = "set `micro_size = 1`, or use sources of one type, so that each source's samples have a loss"
                raise RunError("outputs-apart", message, path=("batch", "micro_size"), hint=hint)
        indices = rows.nonzero().flatten().to(self._device.torch_device)
        output = unflatten([tensor.index_select(dim, indices) for tensor in tensors], structure)
        return output, self._select_fields(batch, indices)

    def _select_fields(self, batch: Mapping[str, Tensor], indices: Tensor) -> Batch:
        return {name: value.index_select(self._fields[name].batch_dim, indices) for name, value in batch.items()}

    def terms(self) -> Tensor:
        """Returns the terms to sum over all ranks, float64 [terms] on the device: first all weights, then all losses."""
        terms = [term for weights in self._weights for term in self._reduction.weight_terms(weights)]
        on_device = self._device.move(torch.tensor(terms, dtype=torch.float64))
        return torch.cat([on_device, *(self._reduction.loss_terms([losses]) for losses in self._losses)])

    def row(self, summed: Sequence[float]) -> dict[str, float]:
        """Returns `loss/NAME`, the mean loss of each source, and `share/NAME`, its share of the step's loss weight (for
        cross-entropy, of the labels that count). A source of weight 0 has no `loss/NAME`. summed: `terms()`, summed over ranks.
        """
        count = len(self.names)
        size = len(self._reduction.weight_terms([]))
        weights = [self._reduction.weight_from_terms(summed[index * size : (index + 1) * size]) for index in range(count)]
        losses = torch.tensor(summed[count * size :], dtype=torch.float64).chunk(count)
        row = {}
        for name, weight, terms in zip(self.names, weights, losses, strict=True):
            if weight:
                row[f"loss/{name}"] = self._reduction.loss_from_terms(terms, 1) / weight
            row[f"share/{name}"] = weight / (sum(weights) or 1.0)
        return row
