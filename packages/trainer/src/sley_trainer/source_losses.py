"""Sums loss and loss weight for each source of samples, if the dataset has `sources`. Other runs do not import it.

    a microbatch of one source     its loss is the source's loss
    a microbatch of several        `loss` is called again for the samples of each source, without gradients

The message of a step's totals sums them over ranks, in the order of the run's other sums: with canonical sums the results have
the same bits in every layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from sley_core.data.dataset import IGNORE_INDEX, SOURCE, Batch, Field
from sley_core.engine.boundary import flatten, unflatten
from sley_core.engine.parts import Parts
from sley_core.engine.step_batch import StepBatch
from sley_core.errors import RunError
from sley_core.protocols import Loss, SplitLogits


def split_by_source(
    batch: Mapping[str, Tensor], fields: Mapping[str, Field], names: Sequence[str]
) -> Iterator[tuple[int, Batch]]:
    """Yields (source, its samples) for each source in `batch`, which is on the host. Raises RunError "data-source" for an
    unknown source.
    """
    sources = batch[SOURCE]
    for source in sorted(set(sources.tolist())):
        if not 0 <= source < len(names):
            raise RunError(
                "data-source", f"a sample has the source {source}, but the data has {len(names)} sources: {', '.join(names)}"
            )
        rows = (sources == source).nonzero().flatten()
        yield source, {name: value.index_select(fields[name].batch_dim, rows) for name, value in batch.items()}


class SourceSums:
    """Sums the losses and loss weights of each source in one step on this rank.

    names: the names of the sources. fields: the declared batch fields. weighs: whether this rank counts loss weights.
    weighs_whole: whether it counts the weights of full sequences.
    """

    def __init__(
        self, names: Sequence[str], parts: Parts, fields: Mapping[str, Field], loss: Loss, *, weighs: bool, weighs_whole: bool
    ) -> None:
        self.names = tuple(names)
        self.weighs = weighs
        self.weighs_whole = weighs_whole
        self._fields = fields
        self._loss = loss
        self._reduction = parts.store.reduction
        self._device = parts.world.device
        self._weights: list[list[float]] = [[] for _ in self.names]
        self._losses = torch.zeros(0)

    def begin(self, batch: StepBatch) -> None:
        """Begins a step, and computes the loss weights of its samples."""
        shape = (batch.num_microbatches,) if self._reduction.fixed_order else ()
        self._weights = [[] for _ in self.names]
        self._losses = torch.zeros((len(self.names), *shape), dtype=torch.float64, device=self._device.torch_device)
        if self.weighs:
            for piece in batch.whole if self.weighs_whole else batch.micros:
                for source, part in split_by_source(piece, self._fields, self.names):
                    self._weights[source].append(self._loss.weight(part))

    @torch.no_grad()
    def add(self, micro: int, output: Any, batch: Mapping[str, Tensor], sources: Tensor, loss: Tensor) -> None:
        """Adds the loss of a microbatch. If `output` is a collective `SplitLogits`, all ranks that share it must call this.

        output: the model's output. batch: the fields that the loss reads, on the device. sources: the sources of the samples,
        on the host. loss: the loss of the whole microbatch.
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
                    loss_inputs = (
                        output,
                        {name: self._mask_labels(name, batch[name], rows) for name in getattr(loss_copy, "fields", batch)},
                    )
                else:
                    loss_inputs = self._select_rows(output, batch, rows)
                self._loss_slot(source, micro).add_(loss_copy.loss(*loss_inputs))

    def _loss_slot(self, source: int, micro_batch: int) -> Tensor:
        return self._losses[source, micro_batch] if self._reduction.fixed_order else self._losses[source]

    def _mask_labels(self, name: str, labels: Tensor, rows: Tensor) -> Tensor:
        """Returns `labels` with the ignored index in all rows except `rows`."""
        shape = [1] * labels.ndim
        shape[self._fields[name].batch_dim] = len(rows)
        return labels.masked_fill(~rows.to(labels.device).view(shape), IGNORE_INDEX)

    def _select_rows(self, output: Any, batch: Mapping[str, Tensor], rows: Tensor) -> tuple[Any, Batch]:
        """Returns output and batch of `rows`. Raises RunError "outputs-apart" for an output without the batch dim."""
        row_numbers = rows.nonzero().flatten()
        dim = self._fields[SOURCE].batch_dim
        tensors, structure = flatten(output)
        for tensor in tensors:
            if tensor.ndim <= dim or tensor.shape[dim] != len(rows):
                message = f"an output of shape {list(tensor.shape)} does not have the {len(rows)} samples of its microbatch"
                hint = (
                    "set `micro_size = 1`, or use sources of one type, so that the loss can be computed for the "
                    "samples of each source"
                )
                raise RunError("outputs-apart", message, path=("batch", "micro_size"), hint=hint)
        indices = row_numbers.to(self._device.torch_device)
        fields = {name: value.index_select(self._fields[name].batch_dim, indices) for name, value in batch.items()}
        return unflatten([tensor.index_select(dim, indices) for tensor in tensors], structure), fields

    def terms(self) -> Tensor:
        """Returns the terms to sum over all ranks, float64 [terms] on the device: those of the weights, then of the losses."""
        terms = [term for weights in self._weights for term in self._reduction.weight_terms(weights)]
        on_device = self._device.move(torch.tensor(terms, dtype=torch.float64))
        return torch.cat([on_device, *(self._reduction.loss_terms([losses]) for losses in self._losses)])

    def row(self, summed: Sequence[float]) -> dict[str, float]:
        """Returns `loss/NAME`, the mean loss of a source, and `share/NAME`, its share of the step's loss weight (for
        cross-entropy, of the labels that count). A source of weight 0 has no `loss/NAME`. summed: the sum of all ranks'
        `terms`.
        """
        count = len(self.names)
        size = len(self._reduction.weight_terms([]))
        weights = [self._reduction.weight_of(summed[index * size : (index + 1) * size]) for index in range(count)]
        losses = torch.tensor(summed[count * size :], dtype=torch.float64).chunk(count)
        row = {}
        for name, weight, terms in zip(self.names, weights, losses, strict=True):
            if weight:
                row[f"loss/{name}"] = self._reduction.loss_of(terms, 1) / weight
            row[f"share/{name}"] = weight / (sum(weights) or 1.0)
        return row
