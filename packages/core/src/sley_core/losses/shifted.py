"""Finds labels that are the tokens of their own positions: with them a model learns to copy, at a very low loss.

A loss here compares the output at a position with the label at that position; it shifts nothing. Some libraries' models
shift labels themselves, so data made for those has `labels = tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sley_core.errors import RunError

NOT_TOKENS = frozenset({"positions", "cu_seqlens"})


def check_shifted(batch: Mapping[str, Tensor], labels_name: str, ignored: int) -> None:
    """Raises RunError "labels-not-shifted" if the labels of `batch` are certainly not shifted.

    That is, all labels that count equal another field's integers at their positions, and differ from those one position
    later, which they would equal too if all tokens were alike. Labels of fewer than 2 dims are not checked.
    """
    labels = batch[labels_name]
    counts = (labels >= 0) & (labels != ignored)
    if labels.ndim < 2 or int(counts.sum()) < 2:
        return
    for name, tokens in batch.items():
        if name == labels_name or name in NOT_TOKENS or tokens.shape != labels.shape or tokens.dtype != labels.dtype:
            continue
        if _equal(labels, tokens, counts) and not any(
            _is_next(labels, tokens, counts, dim) for dim in range(labels.ndim)
        ):
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
    """Returns whether labels equal tokens wherever `counts` is True."""
    return bool(torch.where(counts, labels == tokens, True).all())
