"""Computes the metrics of an evaluation besides the loss: sums and counts of microbatches, summed over ranks with the loss.

output, batch ──metrics──> {name: (sum, count)} of a microbatch ──> of this rank ──one exchange──> sum / count
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from sley_core.engine.call import tensors_in
from sley_core.errors import RunError
from sley_core.model.tensors import version_of
from sley_core.plan.tables import BEST_MODES

if TYPE_CHECKING:
    from sley_core.config import CrossEntropyConfig
    from sley_core.data.dataset import Batch
    from sley_core.data.feed import Feed
    from sley_core.engine.positions import WholeSequences
    from sley_core.engine.step_batch import BatchSplitter, StepBatch

Metric: TypeAlias = "Callable[[Any, Mapping[str, Tensor]], Mapping[str, tuple[Tensor | float, Tensor | float]]]"

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Metrics:
    """Selects the metrics of an evaluation. labels: the cross-entropy of token ids, for the accuracy of next tokens; None
    for other losses. custom: the user's function, or None. whole: gathers full sequences for it.
    """

    labels: CrossEntropyConfig | None = None
    custom: Metric | None = None
    whole: WholeSequences | None = None

    @property
    def has_perplexity(self) -> bool:
        return self.labels is not None and not self.labels.label_smoothing

    @property
    def names(self) -> list[str]:
        """Returns the names that are known before the user's function is called."""
        return ["accuracy"] if self.labels is not None else []

    def accuracy(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the number of labels [...] with the highest of `logits` [..., classes], and the number of counted labels."""
        assert self.labels is not None
        counts = (labels >= 0) & (labels != self.labels.ignore_index)
        return ((logits.argmax(-1) == labels) & counts).sum(), counts.sum()


class Tally:
    """Sums the counts of `metrics` over the microbatches of one evaluation on this rank. names: the sorted names of the user's
    metrics; None before the first result.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.names: list[str] | None = None
        self._batches: list[tuple[Tensor, dict[tuple[str, int], Tensor]]] = []

    def begin(self, like: Tensor) -> None:
        """Begins a batch. like: the batch's loss, float64, a scalar or one per microbatch."""
        self._batches.append((torch.zeros_like(like), {}))

    def reads(self, field: str) -> bool:
        """Returns whether the metrics may read a batch field; the user's function may read all of them."""
        return self.metrics.custom is not None or (self.metrics.labels is not None and field == self.metrics.labels.labels)

    def add(self, micro: int, output: Any, fields: Mapping[str, Tensor], batch: Batch, *, counts: bool) -> None:
        """Counts a microbatch. Raises RunError "metric-result" if the user's function writes in place or returns no numbers.

        output: the model's output, with full logits. fields: this rank's slices, on the device. batch: the same fields on the
        host. counts: whether the samples count; otherwise only the exchanges are made.
        """
        metrics, results = self.metrics, dict[str, Any]()
        versions = [(tensor, version_of(tensor)) for tensor in tensors_in((output, fields))]
        if metrics.custom is not None:
            arguments = (output, fields) if metrics.whole is None else metrics.whole(output, fields, batch)
            if metrics.whole is None or metrics.whole.counts:
                results = self._check_results(metrics.custom(*arguments))
        if any(version_of(tensor) != version for tensor, version in versions):
            raise _metric_error("writes in place to the output or the batch, which the loss also uses")
        if metrics.labels is not None:
            results["accuracy"] = metrics.accuracy(output, fields[metrics.labels.labels])
        if not counts:
            return
        zeros, sums = self._batches[-1]
        for name, pair in results.items():
            for index, value in enumerate(pair):
                total = sums.setdefault((name, index), zeros.clone())
                place = total[micro] if total.dim() else total
                place += value.reshape(()) if isinstance(value, Tensor) else value

    def column(self, name: str, index: int) -> list[Tensor]:
        """Returns the sum (index 0) or the count (1) of a metric for each batch; zeros where this rank has none."""
        return [sums.get((name, index), zeros) for zeros, sums in self._batches]

    def _check_results(self, results: Any) -> dict[str, Any]:
        """Returns a copy of the user's results for one microbatch. Raises RunError "metric-result" unless they are pairs of
        numbers with the names of the earlier microbatches.
        """
        if not isinstance(results, Mapping) or not results:
            raise _metric_error(f"returns {f'a {type(results).__name__}' if not isinstance(results, Mapping) else 'nothing'}")
        for name, pair in results.items():
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(_is_number, pair)):
                raise _metric_error(f"returns no pair of numbers as {name!r}")
            if not _NAME.fullmatch(str(name)) or name in BEST_MODES:
                raise _metric_error(f"returns the name {name!r}, which is {'taken' if name in BEST_MODES else 'not valid'}")
        names = sorted(results)
        if self.names not in (None, names):
            raise _metric_error(f"returns {', '.join(self.names or [])} for one microbatch, but {', '.join(names)} for another")
        self.names = names
        return dict(results)


def merge_metric_names(names_by_rank: Mapping[int, list[str] | None]) -> list[str]:
    """Returns the names of the user's metrics, which are the same on all ranks that count samples. names_by_rank: None for a
    rank that counts none. Raises RunError "metric-result", the same on all ranks.
    """
    known = [(rank, names) for rank, names in names_by_rank.items() if names is not None]
    if not known:
        raise _metric_error("has counted no sample")
    first_rank, first_names = known[0]
    for rank, names in known:
        if names != first_names:
            raise _metric_error(f"returns {', '.join(names)} on rank {rank}, but {', '.join(first_names)} on rank {first_rank}")
    return first_names


def _metric_error(fault: str) -> RunError:
    hint = "return new tensors, {name: (sum, count)}, with the same names for every microbatch, such as "
    hint += "`{'exact': (num_right, num_samples)}`"
    return RunError("metric-result", f"the [evaluation] metric {fault}", path=("evaluation", "metric"), hint=hint)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


@dataclass(frozen=True)
class EvaluationFeed:
    """Yields the samples of one evaluation set, the same in each evaluation.

    feed: yields this rank's rows, from `first` on, of batches of `batch_size`. num_samples: the number of samples that count,
    over all ranks; the last batch may have more, since the feed restarts at the end of the data. fields: the names of the batch
    fields.
    """

    feed: Feed
    num_samples: int
    batch_size: int
    first: int
    fields: Collection[str]

    def batches(self, splitter: BatchSplitter) -> Iterator[StepBatch]:
        self.feed.restore({"samples": 0})
        splitter = splitter.select_fields(self.fields)
        for done in range(0, self.num_samples, self.batch_size):
            batch = self.feed.next()
            batch = {name: batch[name] for name in splitter.info.fields}
            yield splitter.split_feed(batch, self.num_samples - done - self.first)
        self.feed.close()


def evaluation_batch_size(num_samples: int, global_size: int, unit: int) -> int:
    """Returns the batch size, a multiple of `unit`, that splits `num_samples` into the fewest batches with the least padding.
    global_size: the largest allowed size, a multiple of `unit`.
    """
    num_batches = -(-num_samples // global_size)
    return -(-num_samples // (num_batches * unit)) * unit
