"""Gives each rank of `sp` its slice of every sequence, cut as the batch's fields declare; positions stay global.

    samples of one dp coordinate     [b, s]
                                 ┌─────┼─────┐        cut along each field's `sequence_dim`; a field without one is
    slices of sp = 3           [b, s/3] ... [b, s/3]  full in every slice (`cu_seqlens` refers to the full sequence)

A model that counts positions from the length of its input would count every slice from 0. So with split sequences every batch
has a field `positions`: the data's own, or the indices in the full sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.data.cut import cut
from sley_core.data.dataset import Batch, DataInfo, Field
from sley_core.errors import PlanError, RunError

if TYPE_CHECKING:
    from sley_core.protocols import Loss

POSITIONS = "positions"
_ROUNDING = 1e-5
"""Relative tolerance between the sum of the parts' weights and the weight of the whole: class weights are sums in fp32."""


def adds_up(parts: Sequence[float], whole: float) -> bool:
    """Returns whether the loss weights `parts` sum to `whole`: exactly for integers (counts), else within fp32 rounding."""
    counts = all(float(part).is_integer() for part in (*parts, whole))
    return abs(sum(parts) - whole) <= (1e-9 if counts else _ROUNDING) * abs(whole)


def sliced_info(info: DataInfo, num_slices: int) -> DataInfo:
    """Returns the data's info for a model whose sequences are split over `num_slices` ranks: with a field `positions`.

    Raises PlanError "sequence-field" if no field, or `positions` itself, declares no sequence dim, and
    "sequence-does-not-divide".
    """
    if num_slices == 1:
        return info
    known = info.fields.get(POSITIONS)
    if _sequence_field(info.fields) is None or (known is not None and known.sequence_dim is None):
        what = "no field" if known is None else f"not the field `{POSITIONS}`"
        message = f"`sp = {num_slices}` splits sequences, but {what} of the data declares a sequence dim"
        hint = "declare it: `sequence_dim = 1` in `[data.fields.NAME]`, or `Field(..., sequence_dim=1)` in the data set"
        raise PlanError("sequence-field", message, path=("data",), hint=hint)
    if info.sequence is not None and info.sequence % num_slices:
        message = f"sequence = sp x slice fails: {info.sequence} is no multiple of {num_slices}"
        raise PlanError("sequence-does-not-divide", message, path=("data",), hint="change `sequence` or `sp`")
    fields = info.fields if known is not None else {**info.fields, POSITIONS: Field("int64", 0, 1)}
    return replace(info, fields=fields)


class Slices:
    """Cuts full batches to slice `index` of `num_slices`.

    fields: as the data declares a full batch. loss: given on the rank that computes it; its weight of the first batch
    is checked to add up over slices.
    """

    def __init__(self, fields: Mapping[str, Field], num_slices: int, index: int, loss: Loss | None = None) -> None:
        self.fields = fields
        self.num_slices = num_slices
        self.index = index
        self._sequence = _sequence_field(fields) or ""
        self._unproven = loss

    def __call__(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the slice of `batch`: views, except for `positions` if it has to be added.

        Raises RunError as `cut` does, and "loss-not-additive" if the loss weight of the first batch is not the sum of
        its slices' weights: such a loss counts something once per slice.
        """
        if self.num_slices == 1:
            return batch
        if self._unproven is not None:
            self._prove(self._unproven, batch)
            self._unproven = None
        return self._slice(batch, self.index)

    def _slice(self, batch: Mapping[str, Tensor], index: int) -> Batch:
        """Returns what the `sp` rank `index` has of `batch`: views of its part of each field along the field's `sequence_dim`,
        and fields without one whole. Adds global `positions` [b, s / num_slices] if the data has none.
        """
        part = cut(batch, self.fields, index, self.num_slices, dim="sequence")
        if POSITIONS not in part:
            field, value = self.fields[self._sequence], part[self._sequence]
            assert field.sequence_dim is not None, field
            length = value.shape[field.sequence_dim]
            places = torch.arange(index * length, (index + 1) * length)
            part[POSITIONS] = places.repeat(value.shape[field.batch_dim], 1)
        return part

    def _prove(self, loss: Loss, batch: Mapping[str, Tensor]) -> None:
        """Raises RunError "loss-not-additive" if the loss weights of the slices do not sum to that of `batch`."""
        whole = loss.weight(batch)
        parts = [loss.weight(self._slice(batch, index)) for index in range(self.num_slices)]
        if not adds_up(parts, whole):
            weights = " + ".join(f"{part:g}" for part in parts)
            message = f"the loss weight of a batch is {whole:g}, but its slices weigh {weights} = {sum(parts):g}"
            hint = (
                "a loss under `sp` sums over positions, and the fields that it reads need a `sequence_dim`; one that needs "
                'whole sequences has sequence = "whole" in [loss]'
            )
            raise RunError("loss-not-additive", message, path=("parallel", "sp"), hint=hint)


def _sequence_field(fields: Mapping[str, Field]) -> str | None:
    """Returns the first field that sequence parallelism cuts, or None."""
    return next((name for name, field in fields.items() if field.sequence_dim is not None), None)
