"""Cross-entropy as a weight and a sum, so that its scale does not depend on how a batch is split.

Labels that are negative or equal `ignore_index` are ignored. Other labels must be class indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sley_core.data.dataset import BOUNDARY_FIELDS
from sley_core.errors import PlanError, RunError
from sley_core.model.tensors import device_kind, uniform_items
from sley_core.plugin import CrossEntropyConfig
from sley_core.protocols import Loss, SplitLogits

if TYPE_CHECKING:
    from sley_core.engine.parts import Parts

CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 25}
"""The number of logits per chunk, by device type. A chunk fits in the cache of a CPU, or hides a GPU's launch overhead."""


class CrossEntropy(Loss):
    """The loss `core.cross_entropy`. A batch's weight and loss are sums over its parts.

    Labels are int64 classes of any shape [...]. The output is a tensor of logits [..., classes], or `SplitLogits`,
    which compute the loss themselves.
    """

    def __init__(self, config: CrossEntropyConfig) -> None:
        self.config = config
        self.fields = (config.labels,)
        self._highest_label = -1
        self._checks_shift = not config.copying
        self._compiled_sum: Any = None

    def attach(self, parts: Parts) -> None:
        """Compiles the sum over many logits if the plan compiles the layers, except in a simulated run."""
        if parts.is_compiled and parts.world.simulation is None:
            self._compiled_sum = torch.compile(sum_cross_entropy)

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """Returns the number of labels that are not ignored, computed on the host. Records the highest label for `loss`.

        Raises RunError "labels-not-shifted" if the labels of the first batch are its tokens.
        """
        labels = self._labels(batch)
        has_weight = (labels >= 0) & (labels != self.config.ignore_index)
        if self._checks_shift:
            self._checks_shift = False
            check_shifted(batch, self.config.labels, has_weight)
        num_labels = int(torch.count_nonzero(has_weight))
        if num_labels:
            self._highest_label = max(self._highest_label, int(torch.where(has_weight, labels, -1).max()))
        return float(num_labels)

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the sum of the cross-entropies, in nats, as an fp32 scalar (fp64 for fp64 logits).

        If all labels are ignored, the sum and its gradients are 0. Raises RunError "loss-output" if the output is not logits of
        a fitting shape, and "label-out-of-range" if a label is not a class. The second check uses the highest label that
        `weight` has seen, since reading labels from the device would synchronise it.
        """
        labels = self._labels(batch)
        if not isinstance(output, Tensor | SplitLogits):
            message = f"cross-entropy needs a tensor of logits, but the last layer returned `{type(output).__name__}`"
            hint = "return only the logits from the last layer, or use a loss of your own with `[loss] factory`"
            raise RunError("loss-output", message, hint=hint)
        if not output.dtype.is_floating_point or not output.shape or output.shape[:-1] != labels.shape:
            message = f"logits of shape {list(output.shape)} and {output.dtype} do not fit labels of shape {list(labels.shape)}"
            hint = "return floating-point logits with the shape of the labels and an additional last dim for the classes"
            raise RunError("loss-output", message, hint=hint)
        if self._highest_label >= output.shape[-1]:
            label, self._highest_label = self._highest_label, -1
            raise RunError(
                "label-out-of-range",
                f"labels must be classes from 0 to {output.shape[-1] - 1}, but the field `{self.config.labels}` has {label}",
                path=("loss", "labels"),
                hint="give the last layer more classes; only `[loss] ignore_index` and negative labels are ignored",
            )
        labels = labels.masked_fill(labels < 0, self.config.ignore_index)
        options = self.config.ignore_index, self.config.label_smoothing
        if isinstance(output, Tensor):
            return cross_entropy_of_logits(output, labels, *options, compiled_sum=self._compiled_sum)
        return output.cross_entropy(labels, *options)

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        name = self.config.labels
        if name not in batch:
            fields = ", ".join(f"`{field}`" for field in sorted(batch))
            message = f"the loss needs the field `{name}`, but the batch has {f'only {fields}' if fields else 'no fields'}"
            hint = "set `[loss] labels` to the name of the field that contains the labels"
            raise PlanError("loss-field", message, path=("loss", "labels"), hint=hint)
        return batch[name]


def cross_entropy_of_logits(
    logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float, *, compiled_sum: Any = None
) -> Tensor:
    """Returns the sum of the cross-entropies of logits [..., classes] and labels int64 [...]. compiled_sum: a compiled
    `sum_cross_entropy` for more logits than one chunk has; None processes them in chunks.
    """
    is_one_chunk = logits.numel() <= _chunk_elements(logits)
    compute_sum = sum_cross_entropy if is_one_chunk else compiled_sum or ChunkedCrossEntropy.apply
    total: Tensor = compute_sum(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index, smoothing)
    return total


def sum_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    """Returns torch's sum of the cross-entropies of logits [n, classes] and labels int64 [n], with a softmax in fp32 or wider.

    This is the fastest way for few logits.
    """
    return F.cross_entropy(
        logits.to(softmax_dtype(logits)), labels, ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum"
    )


class ChunkedCrossEntropy(torch.autograd.Function):
    """Computes `sum_cross_entropy` in chunks of rows, and recomputes the softmax in the backward.

    Besides the logits, it needs memory for their gradient and for one chunk. `sum_cross_entropy` needs two more fp32 copies of
    the logits, and takes twice as long on a CPU if they exceed its cache: for 2048 x 32000 fp32 logits, it needs 500 MiB beside
    the gradient and 430 ms, and the chunks need 25 MiB and 180 ms.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the sum over all rows. Saves only the logits and labels."""
        ctx.save_for_backward(logits, labels)
        ctx.ignore_index, ctx.smoothing = ignore_index, smoothing
        total = torch.zeros((), dtype=softmax_dtype(logits), device=logits.device)
        for rows in row_chunks(logits):
            total += sum_cross_entropy(logits[rows], labels[rows], ignore_index, smoothing)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns (softmax(logits) - target distribution) x `gradient`; 0 in rows with an ignored label."""
        logits, labels = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in row_chunks(logits):
            chunk = torch.softmax(logits[rows], dim=-1, dtype=softmax_dtype(logits))
            write_gradient(chunk, labels[rows], ctx.ignore_index, ctx.smoothing, gradient, out=result[rows])
        return result, None, None, None


def write_gradient(
    probabilities: Tensor, labels: Tensor, ignore_index: int, smoothing: float, scale: Tensor, *, out: Tensor
) -> None:
    """Writes the gradient of the sum of losses with respect to the logits, times the scalar `scale`, into `out` [n, classes].

    The gradient is the softmax minus the target distribution, and 0 in rows with an ignored label. probabilities: the softmax
    of the logits, which is overwritten.
    """
    # scatter_add_ needs valid indices, so an ignored label is replaced by class 0, and its row is multiplied by 0.
    is_ignored = labels == ignore_index
    targets = labels.masked_fill(is_ignored, 0).unsqueeze(-1)
    if smoothing:
        probabilities -= smoothing / probabilities.shape[-1]
    probabilities.scatter_add_(-1, targets, probabilities.new_full(targets.shape, smoothing - 1.0))
    torch.mul(probabilities, torch.where(is_ignored, 0.0, scale).unsqueeze(-1), out=out)


def softmax_dtype(logits: Tensor) -> torch.dtype:
    """Returns the dtype in which to compute the softmax of `logits`: fp32, or fp64 for fp64 logits."""
    return torch.promote_types(logits.dtype, torch.float32)


def _chunk_elements(logits: Tensor) -> int:
    return CHUNK_ELEMENTS["cpu" if device_kind(logits) == "cpu" else "cuda"]


def row_chunks(logits: Tensor) -> Iterator[slice]:
    """Yields slices of the rows of `logits` [n, classes] with at most `CHUNK_ELEMENTS` logits, but at least one row. The caller
    must treat all chunks alike, because a memory estimate processes only a few of them (`model.tensors.uniform_items`).
    """
    num_rows = max(1, _chunk_elements(logits) // logits.shape[-1])
    return uniform_items(slice(first, first + num_rows) for first in range(0, len(logits), num_rows))


def check_shifted(batch: Mapping[str, Tensor], labels_name: str, has_weight: Tensor) -> None:
    """Raises RunError "labels-not-shifted" if the labels of `batch` are certainly not shifted.

    That is the case if the labels that count equal the integers of another field at their own positions, but not at the next
    positions. Labels with fewer than 2 dims, and fewer than 2 labels that count, are not checked. The loss compares an output
    with the label at the same position, but models from other libraries shift the labels themselves, so labels equal tokens in
    their data. labels_name: the field with the labels. has_weight: whether each label counts, bool of the labels' shape.
    """
    labels = batch[labels_name]
    if labels.ndim < 2 or int(has_weight.sum()) < 2:
        return
    for name, tokens in batch.items():
        if name == labels_name or name in BOUNDARY_FIELDS or tokens.shape != labels.shape or tokens.dtype != labels.dtype:
            continue
        if _is_equal(labels, tokens, has_weight) and not any(
            _is_shifted(labels, tokens, has_weight, dim) for dim in range(labels.ndim)
        ):
            raise RunError(
                "labels-not-shifted",
                f"every label equals the token at its own position (`{labels_name}` equals `{name}`), so the model "
                "would only learn to copy",
                path=("loss", "labels"),
                hint="shift the labels in the dataset: use `ids[:-1]` as tokens and `ids[1:]` as labels; or, if copying is "
                "the task, set `[loss] copying = true`",
            )


def _is_shifted(labels: Tensor, tokens: Tensor, has_weight: Tensor, dim: int) -> bool:
    """Returns whether the labels equal the tokens one position later along `dim`; False for a dim of size 1."""
    length = labels.shape[dim] - 1
    return length > 0 and _is_equal(
        labels.narrow(dim, 0, length), tokens.narrow(dim, 1, length), has_weight.narrow(dim, 0, length)
    )


def _is_equal(labels: Tensor, tokens: Tensor, has_weight: Tensor) -> bool:
    return bool(torch.where(has_weight, labels == tokens, True).all())
