"""The metrics of an evaluation besides the loss: sums and counts of microbatches, summed over ranks together with the loss.

output, batch ──metrics──> {name: (sum, count)} of a microbatch ──> of this rank ──one exchange──> sum / count
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    """The metrics of the model's output in an evaluation. labels: of the loss, a cross-entropy of token ids, whose next tokens
    are counted; None for other losses and data. own: the user's function, or None. whole: gathers whole sequences for it.
    """

    labels: CrossEntropyConfig | None = None
    own: Metric | None = None
    whole: WholeSequences | None = None

    @property
    def has_perplexity(self) -> bool:
        return self.labels is not None and not self.labels.label_smoothing

    @property
    def names(self) -> list[str]:
        """The names that are known before the user's function is called."""
        return ["accuracy"] if self.labels is not None else []

    def accuracy(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the number of labels [...] with the highest of `logits` [..., classes], and the number of counted labels."""
        assert self.labels is not None
        counts = (labels >= 0) & (labels != self.labels.ignore_index)
        return ((logits.argmax(-1) == labels) & counts).sum(), counts.sum()


class Tally:
    """Sums the counts of `metrics` over the microbatches of one evaluation on this rank. problem: the fault of the results of
    the user's function, "" without one; all ranks raise it after the exchange.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.problem = ""
        self.names: list[str] | None = None
        self._batches: list[tuple[Tensor, dict[tuple[str, int], Tensor]]] = []

    def begin(self, like: Tensor) -> None:
        """Begins a batch. like: the batch's loss, float64, a scalar or one per microbatch."""
        self._batches.append((torch.zeros_like(like), {}))

    def reads(self, field: str) -> bool:
        """Returns whether a field of the batch is needed: all may be, by the user's function."""
        return self.metrics.own is not None or (self.metrics.labels is not None and field == self.metrics.labels.labels)

    def add(self, micro: int, output: Any, fields: Mapping[str, Tensor], batch: Batch, *, counts: bool) -> None:
        """Counts a microbatch. output: of the model, whole logits. fields: on the device, the slices that this rank has.
        batch: the same on the host. counts: whether its samples count; if not, only exchanges are made.
        """
        metrics, results = self.metrics, dict[str, Any]()
        before = [(tensor, version_of(tensor)) for tensor in tensors_in((output, fields))]
        if metrics.own is not None:
            arguments = (output, fields) if metrics.whole is None else metrics.whole(output, fields, batch)
            if metrics.whole is None or metrics.whole.counts:
                results = self._validate_results(metrics.own(*arguments))
        if any(version_of(tensor) != version for tensor, version in before):
            message = "the [evaluation] metric writes in place to the output or the batch, which the loss also uses"
            raise RunError("metric-result", message, path=("evaluation", "metric"), hint="let it make new tensors")
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

    def column(self, name: str, at: int) -> list[Tensor]:
        """Returns of each batch the sum (0) or the count (1) of a metric: zeros where this rank has none."""
        return [sums.get((name, at), zeros) for zeros, sums in self._batches]

    def _validate_results(self, results: Any) -> dict[str, Any]:
        """Returns what the user's function gave for one microbatch; {} with a `problem` if that is no numbers by name."""
        problem = ""
        if not isinstance(results, Mapping) or not results:
            problem = f"gives {f'a {type(results).__name__}' if not isinstance(results, Mapping) else 'nothing'}"
        elif wrong := next((name for name, pair in results.items() if not _is_pair(pair)), None):
            problem = f"gives no pair of numbers as {wrong!r}"
        elif wrong := next((name for name in results if not _NAME.fullmatch(str(name)) or name in BEST_MODES), None):
            problem = f"gives the name {wrong!r}, which is {'taken' if wrong in BEST_MODES else 'no name'}"
        else:
            names = sorted(results)
            if self.names not in (None, names):
                problem = f"gives {', '.join(self.names or [])} for one microbatch, and {', '.join(names)} for another"
            self.names = names
        self.problem = self.problem or problem
        return {} if problem else dict(results)


def merge_metric_names(everyone: Iterable[tuple[str, list[str] | None]], ranks: Sequence[int]) -> list[str]:
    """Returns the names of the user's numbers, which each rank with the model's output gives alike. everyone: by rank, a
    problem, and the names, None on ranks without an output. Raises RunError "metric-result", the same on all ranks.
    """
    names: tuple[int, list[str]] | None = None
    problem = ""
    for rank, (wrong, names_of_rank) in zip(ranks, everyone, strict=True):
        if not wrong and names_of_rank is not None and names is not None and names_of_rank != names[1]:
            wrong = f"gives {', '.join(names_of_rank)}, and on rank {names[0]} {', '.join(names[1])}"
        if wrong:
            problem = problem or f"on rank {rank} the [evaluation] metric {wrong}"
        if names_of_rank is not None:
            names = names or (rank, names_of_rank)
    if problem or names is None:
        hint = "it returns {name: (sum, count)}, the same names for every microbatch: `{'exact': (num_right, num_samples)}`"
        raise RunError("metric-result", problem or "no sample was counted", path=("evaluation", "metric"), hint=hint)
    return names[1]


def _is_pair(pair: Any) -> bool:
    is_number = [
        isinstance(number, int | float) or (isinstance(number, Tensor) and number.numel() == 1) for number in _items(pair)
    ]
    return len(is_number) == 2 and all(is_number)


def _items(pair: Any) -> Sequence[Any]:
    return pair if isinstance(pair, list | tuple) else ()


@dataclass(frozen=True)
class EvaluationFeed:
    """Yields the samples of one evaluation set, the same in each evaluation.

    feed: gives this rank's rows, from `first` on, of batches of `batch_size`. num_samples: how many count, over all ranks. A
    batch may have more: the feed begins again where the data end. fields: the names of the fields of a batch.
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
