"""Computes cross-entropy as a weight and a sum, so that its scale does not depend on how a batch is cut.

`ignore_index` and negative labels are ignored in every layout; the others are classes or an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sley_core.config import CrossEntropyConfig
from sley_core.errors import PlanError, RunError
from sley_core.model.tensors import alike, device_kind
from sley_core.protocols import Loss, SplitLogits

CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 25}
"""How many logits are taken at a time: on a CPU what its cache holds, on a GPU enough for a launch not to matter."""


class CrossEntropy(Loss):
    """The loss `core.cross_entropy`: over any cut of a batch, weights and losses sum to those of the full batch.

    Labels are classes, int64 of any shape [...]; the model's output is a tensor of logits [..., classes], or a
    `SplitLogits`, of which ranks share the classes.
    """

    def __init__(self, config: CrossEntropyConfig) -> None:
        self.config = config
        self.fields = (config.labels,)
        self._highest = -1
        self._is_first = not config.copying

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """Returns how many labels of these samples are not ignored; reads the labels alone, on the host, and notes the highest
        for `loss`. Raises RunError "labels-not-shifted" if the labels of the first batch are its tokens.
        """
        labels = self._labels(batch)
        lowest, highest = self._bounds_of(labels)
        self._highest = max(self._highest, highest)
        if self._is_first:
            self._is_first = False
            check_shifted(batch, self.config.labels, self.config.ignore_index)
        if lowest >= 0:
            return float(labels.numel())
        return float(torch.count_nonzero((labels >= 0) & (labels != self.config.ignore_index)))

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the sum of the cross-entropies, in nats: an fp32 scalar, or fp64 for fp64 logits.

        If no label counts, it is 0 with zero gradients, not NaN. Raises RunError if the output is not logits that fit
        the labels, and "label-out-of-range" for a label that is not a class. On a CPU that is a label of this
        micro-batch; elsewhere of any batch that was weighed, because reading the labels would synchronise with the
        device.
        """
        labels = self._labels(batch)
        shape: tuple[int, ...] = getattr(output, "shape", ())
        if shape[:-1] == labels.shape and shape[-1:]:
            labels = self._checked(labels, shape[-1])
        if not isinstance(output, Tensor) and isinstance(output, SplitLogits):
            _check_fit(output.shape, labels, output.dtype)
            return output.cross_entropy(labels, self.config.ignore_index, self.config.label_smoothing)
        if not isinstance(output, Tensor):
            message = f"cross-entropy needs a tensor of logits, but the last layer returned `{type(output).__name__}`"
            hint = "let the last layer return its logits alone, or give a loss of your own through `factory`"
            raise RunError("loss-output", message, hint=hint)
        _check_fit(output.shape, labels, output.dtype)
        few = output.numel() <= _chunk_elements(output)
        function = plain_sum if few else SumOfCrossEntropies.apply
        total: Tensor = function(
            output.reshape(-1, output.shape[-1]), labels.reshape(-1), self.config.ignore_index, self.config.label_smoothing
        )
        return total

    def _bounds_of(self, labels: Tensor) -> tuple[int, int]:
        """Returns the lowest and highest label; the lowest is negative if any label is ignored, the highest if all are."""
        ignored = self.config.ignore_index
        if not labels.numel():
            return -1, -1
        lowest, highest = (int(bound) for bound in torch.aminmax(labels))
        if ignored >= 0 and lowest <= ignored <= highest:  # it may be there, and is no class
            lowest, highest = (int(bound) for bound in torch.aminmax(labels.masked_fill(labels == ignored, -1)))
        return lowest, highest

    def _checked(self, labels: Tensor, num_classes: int) -> Tensor:
        """Returns the labels with `ignore_index` for all that are ignored. Raises RunError "label-out-of-range" if a label is
        not below `num_classes`: on a CPU one of these, elsewhere one of any batch that was weighed.
        """
        may_be_ignored = True
        if device_kind(labels) == "cpu":  # elsewhere asking would wait for the device
            lowest, self._highest = self._bounds_of(labels)
            may_be_ignored = lowest < 0
        if self._highest >= num_classes:
            found, self._highest = self._highest, -1
            raise RunError(
                "label-out-of-range",
                f"the field `{self.config.labels}` has the class {found}, but the model's logits have {num_classes}: "
                f"0 to {num_classes - 1}",
                path=("loss", "labels"),
                hint="the model's last layer has too few classes for the data; `[loss] ignore_index`, and negative labels, "
                "are ignored",
            )
        return labels.masked_fill(labels < 0, self.config.ignore_index) if may_be_ignored else labels

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the labels of `batch`; raises PlanError "loss-field" if it lacks that field."""
        name = self.config.labels
        if name not in batch:
            fields = ", ".join(f"`{field}`" for field in sorted(batch))
            message = f"the loss reads the field `{name}`, but a batch holds {fields or 'no field'}"
            hint = "name the field of the labels in `[loss] labels`"
            raise PlanError("loss-field", message, path=("loss", "labels"), hint=hint)
        return batch[name]


def plain_sum(logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    """Returns torch's own sum of cross-entropies of logits [n, classes] and labels int64 [n], the fastest way for few logits,
    and the oracle of `SumOfCrossEntropies`. The softmax is fp32 at least.
    """
    return F.cross_entropy(
        logits.to(wide(logits)), labels, ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum"
    )


class SumOfCrossEntropies(torch.autograd.Function):
    """Computes what `plain_sum` does, but saves only its inputs for the backward.

    Rows are processed in chunks, and the backward computes the softmax again. So beside the logits there are their
    gradient, in their dtype, and one chunk; `plain_sum` holds two fp32 copies more, and on a CPU takes twice the time
    if the logits do not fit its cache (2048 x 32000 in fp32: 500 -> 25 MiB beside the gradient, 430 -> 180 ms).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the sum over all rows; saves logits and labels, no softmax."""
        ctx.save_for_backward(logits, labels)
        ctx.ignore_index, ctx.smoothing = ignore_index, smoothing
        total = torch.zeros((), dtype=wide(logits), device=logits.device)
        for rows in chunks(logits):
            total += plain_sum(logits[rows], labels[rows], ignore_index, smoothing)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns softmax(logits) minus the target's distribution, times the incoming gradient; 0 for an ignored label."""
        logits, labels = ctx.saved_tensors
        result = torch.empty_like(logits)
        # scatter_add_ needs valid indices: an ignored label becomes class 0, and its row's scale 0
        ignored = labels == ctx.ignore_index
        targets = labels.masked_fill(ignored, 0).unsqueeze(-1)
        scale = torch.where(ignored, 0.0, gradient).unsqueeze(-1)
        on_target = gradient.new_full(targets.shape, ctx.smoothing - 1.0)
        for rows in chunks(logits):
            part = torch.softmax(logits[rows], dim=-1, dtype=wide(logits))
            if ctx.smoothing:
                part -= ctx.smoothing / logits.shape[-1]
            # in place, chunk by chunk: no second tensor of the logits' size besides the gradient
            part.scatter_add_(-1, targets[rows], on_target[rows])
            torch.mul(part, scale[rows], out=result[rows])
        return result, None, None, None


def wide(logits: Tensor) -> torch.dtype:
    """Returns the dtype of the softmax: fp32, or fp64 for fp64 logits."""
    return torch.promote_types(logits.dtype, torch.float32)


def _chunk_elements(logits: Tensor) -> int:
    return CHUNK_ELEMENTS["cpu" if device_kind(logits) == "cpu" else "cuda"]


def chunks(logits: Tensor) -> Iterator[slice]:
    """Yields slices of rows, as many as make one chunk of logits, at least one row each.

    Each is to be treated like the one before it: an estimate of bytes looks at few (`model/alike.py`).
    """
    num_rows = max(1, _chunk_elements(logits) // logits.shape[-1])
    return alike(slice(first, first + num_rows) for first in range(0, len(logits), num_rows))


def _check_fit(shape: tuple[int, ...], labels: Tensor, dtype: torch.dtype) -> None:
    """Raises RunError "loss-output" unless the logits are floating-point and have the labels' shape plus a class dim."""
    if not dtype.is_floating_point or shape[:-1] != labels.shape:
        message = f"logits of shape {list(shape)} and {dtype} do not fit labels of shape {list(labels.shape)}"
        hint = "logits are floating-point, shaped like the labels with the classes as the last dim"
        raise RunError("loss-output", message, hint=hint)


NOT_TOKENS = frozenset({"positions", "cu_seqlens"})


def check_shifted(batch: Mapping[str, Tensor], labels_name: str, ignored: int) -> None:
    """Raises RunError "labels-not-shifted" if the labels of `batch` are certainly not shifted: all labels that count equal
    another field's integers at their positions, and differ from those one position later. Labels of fewer than 2 dims are not
    checked.

    A loss here compares the output at a position with the label at that position. Some libraries' models shift labels
    themselves, so data made for those has `labels = tokens`.
    """
    labels = batch[labels_name]
    counts = (labels >= 0) & (labels != ignored)
    if labels.ndim < 2 or int(counts.sum()) < 2:
        return
    for name, tokens in batch.items():
        if name == labels_name or name in NOT_TOKENS or tokens.shape != labels.shape or tokens.dtype != labels.dtype:
            continue
        if _equal(labels, tokens, counts) and not any(_is_next(labels, tokens, counts, dim) for dim in range(labels.ndim)):
            raise RunError(
                "labels-not-shifted",
                f"every label is the token at its own place: `{labels_name}` equals `{name}`, so the model would learn to copy",
                path=("loss", "labels"),
                hint="labels are shifted by the data: of a text's ids, tokens are `ids[:-1]` and labels `ids[1:]`; "
                "where copying is meant, `[loss] copying = true`",
            )


def _is_next(labels: Tensor, tokens: Tensor, counts: Tensor, dim: int) -> bool:
    """Returns whether the labels also equal the tokens one position later along `dim`; False for a dim of size 1."""
    length = labels.shape[dim] - 1
    before = [each.narrow(dim, 0, length) for each in (labels, counts)]
    return length > 0 and _equal(before[0], tokens.narrow(dim, 1, length), before[1])


def _equal(labels: Tensor, tokens: Tensor, counts: Tensor) -> bool:
    return bool(torch.where(counts, labels == tokens, True).all())
