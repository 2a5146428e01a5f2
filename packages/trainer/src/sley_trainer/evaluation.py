"""Provides the feeds of evaluations, metrics besides the loss, and the best result (`keep_best` and `patience`).

output, batch ──metrics──> {name: (sum, count)} of a microbatch ──> of this rank ──one exchange──> sum / count
"""

import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch

from sley_core.comm.world import Group
from sley_core.data.batches import add_positions, open_dataset
from sley_core.data.dataset import SOURCE, AnyDataset, Batch, DataContext, DataInfo, Dataset, is_stream
from sley_core.data.feed import Feed
from sley_core.engine.agreement import check_agreement
from sley_core.engine.boundary import tensors_in
from sley_core.engine.parts import Parts
from sley_core.engine.step_batch import BatchSplitter, StepBatch, WholeSequences
from sley_core.errors import PlanError, RunError
from sley_core.model.tensors import version_of
from sley_core.plan.plan import EvaluationSet, Plan
from sley_core.plan.tables import BEST_MODES, KeepBestTable, parse_metric
from sley_core.plugin import CrossEntropyConfig
from sley_core.records import call_factory

Metric: TypeAlias = Callable[[Any, Mapping[str, torch.Tensor]], Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]]]
"""The user's function `(output, fields)` of `[evaluation] metric`, which returns {name: (sum, count)} for one microbatch."""

_METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # the valid names of the user's metrics


@dataclass(frozen=True)
class Metrics:
    """The metrics that an evaluation computes besides the loss. loss_config: the plan's table of the cross-entropy of token
    ids, or None for other losses. custom_metric: the user's function, or None. whole_sequences: gathers full sequences for this
    function; None passes slices.
    """

    loss_config: CrossEntropyConfig | None = None
    custom_metric: Metric | None = None
    whole_sequences: WholeSequences | None = None

    @property
    def has_perplexity(self) -> bool:
        """Whether the evaluation reports the perplexity, which needs the cross-entropy of token ids without label smoothing."""
        return self.loss_config is not None and not self.loss_config.label_smoothing

    @property
    def builtin_names(self) -> list[str]:
        """The names of the metrics that `Tally` computes without the user's function: "accuracy" if `loss_config` is set."""
        return ["accuracy"] if self.loss_config is not None else []

    def count_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the number of labels [...] that have the highest logit [..., classes], and the number of labels that are
        neither negative nor ignored, as int64 scalars.
        """
        assert self.loss_config is not None
        counts = (labels >= 0) & (labels != self.loss_config.ignore_index)
        return ((logits.argmax(-1) == labels) & counts).sum(), counts.sum()


class Tally:
    """Adds up the sums and counts of `metrics` over the microbatches of one evaluation on this rank. names: the sorted names of
    the user's metrics; None before the first result.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.names: list[str] | None = None
        self._batches: list[tuple[torch.Tensor, dict[tuple[str, int], torch.Tensor]]] = []

    def begin(self, loss: torch.Tensor) -> None:
        """Begins a batch with sums of 0. loss: the loss of the batch, float64 [] or [microbatches]; the sums get its shape."""
        self._batches.append((torch.zeros_like(loss), {}))

    def may_read(self, field: str) -> bool:
        """Returns whether the metrics may read a batch field; the user's function may read every field."""
        return self.metrics.custom_metric is not None or (
            self.metrics.loss_config is not None and field == self.metrics.loss_config.labels
        )

    def add(self, micro: int, output: Any, fields: Mapping[str, torch.Tensor], batch: Batch, *, is_counted: bool) -> None:
        """Adds the results of a microbatch, or, if not `is_counted`, only joins the collectives. Raises RunError
        "metric-result" if the user's function writes in place to its arguments, or does not return pairs of numbers.

        output: the model's output, with full logits. fields: this rank's batch fields, on the device. batch: all fields, on the
        host.
        """
        metrics, results = self.metrics, dict[str, Any]()
        versions = [(tensor, version_of(tensor)) for tensor in tensors_in((output, fields))]
        if metrics.custom_metric is not None:
            arguments = (output, fields) if metrics.whole_sequences is None else metrics.whole_sequences(output, fields, batch)
            if metrics.whole_sequences is None or metrics.whole_sequences.is_counted:
                results = self._check_results(metrics.custom_metric(*arguments))
        if any(version_of(tensor) != version for tensor, version in versions):
            raise _metric_error("writes in place to the output or the batch, which the loss also uses")
        if metrics.loss_config is not None:
            results["accuracy"] = metrics.count_correct(output, fields[metrics.loss_config.labels])
        if not is_counted:
            return
        zeros, sums = self._batches[-1]
        for name, pair in results.items():
            for index, value in enumerate(pair):
                total = sums.setdefault((name, index), zeros.clone())
                place = total[micro] if total.dim() else total
                place += value.reshape(()) if isinstance(value, torch.Tensor) else value

    def sums_by_batch(self, name: str, index: int) -> list[torch.Tensor]:
        """Returns this rank's sum (`index` 0) or count (1) of a metric for each batch; zeros for a batch without results."""
        return [sums.get((name, index), zeros) for zeros, sums in self._batches]

    def agree_names(self, control: Group) -> list[str]:
        """Returns the names of all metrics. If the user has a function, all ranks must call this method, and all raise RunError
        "metric-result" if the names differ between ranks, or if no rank has counted a sample.
        """
        if self.metrics.custom_metric is None:
            return self.metrics.builtin_names
        gathered = control.gather_objects(self.names, label="the names of metrics")
        known = [(rank, names) for rank, names in zip(control.ranks, gathered, strict=True) if names is not None]
        if not known:
            raise _metric_error("counted no samples")
        first_rank, first_names = known[0]
        for rank, names in known:
            if names != first_names:
                described = f"{', '.join(names)} on rank {rank}, but {', '.join(first_names)} on rank {first_rank}"
                raise _metric_error(f"returns {described}")
        return [*self.metrics.builtin_names, *first_names]

    def _check_results(self, results: Any) -> dict[str, Any]:
        """Returns a copy of the user's `results`. Raises RunError "metric-result" if names or values are invalid."""
        if not isinstance(results, Mapping) or not results:
            raise _metric_error(f"returns {f'a {type(results).__name__}' if not isinstance(results, Mapping) else 'nothing'}")
        for name, pair in results.items():
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(_is_number, pair)):
                raise _metric_error(f"does not return a pair of numbers for {name!r}")
            if not _METRIC_NAME.fullmatch(str(name)) or name in BEST_MODES:
                raise _metric_error(f"returns the name {name!r}, which is {'taken' if name in BEST_MODES else 'not valid'}")
        names = sorted(results)
        if self.names not in (None, names):
            raise _metric_error(f"returns {', '.join(self.names or [])} for one microbatch, but {', '.join(names)} for another")
        self.names = names
        return dict(results)


def _metric_error(fault: str) -> RunError:
    hint = "return new tensors as `{name: (sum, count)}`, such as `{'exact': (num_right, num_samples)}`, with the same names "
    hint += "for every microbatch, and a count above 0 for at least one microbatch"
    return RunError("metric-result", f"the [evaluation] metric {fault}", path=("evaluation", "metric"), hint=hint)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


@dataclass(frozen=True)
class EvaluationFeed:
    """Yields the samples of one evaluation set, the same in each evaluation.

    feed: yields this rank's rows of each global batch of `batch_size` samples. first_row: the index of the first of these rows.
    num_samples: the number of samples to count over all ranks; the last batch may have more, since the feed restarts at the end
    of the data. fields: the names of the batch fields.
    """

    feed: Feed
    num_samples: int
    batch_size: int
    first_row: int
    fields: Collection[str]

    def batches(self, splitter: BatchSplitter) -> Iterator[StepBatch]:
        """Yields this rank's part of each batch, starting with the first sample of the set."""
        self.feed.restore({"samples": 0})
        splitter = splitter.select_fields(self.fields)
        for start in range(0, self.num_samples, self.batch_size):
            batch = self.feed.next(is_last=start + self.batch_size >= self.num_samples)
            batch = {name: batch[name] for name in splitter.info.fields}
            yield splitter.split_feed(batch, self.num_samples - start - self.first_row)
        self.feed.close()


def local_rows(global_size: int, parts: Parts) -> range:
    """Returns this rank's rows of a global batch of `global_size` samples. Ranks that share sequences have the same rows."""
    size = global_size // parts.topology.dp
    start = parts.groups["dp"].coord * size
    return range(start, start + size)


def build_evaluation_feeds(
    plan: Plan, parts: Parts, info: DataInfo, build_feed: Callable[..., Feed]
) -> dict[str, EvaluationFeed]:
    """Returns the feed of each evaluation set by name; the name of the held-out split is "". All ranks must call it. info: the
    declaration of the training data. build_feed: `build_feed(dataset, batch_size, shuffle=...)` returns the feed of this rank's
    rows. Raises PlanError "evaluation-set" if a set is empty, is a stream without `steps`, or has other fields than `info`.
    """
    size, feeds = plan.batch.global_size, dict[str, EvaluationFeed]()
    if plan.evaluation is not None and plan.evaluation.held_out:
        feed = build_feed(open_dataset(plan.data, DataContext(plan.run.seed, "held_out")), size, shuffle=True)
        feeds[""] = EvaluationFeed(feed, plan.evaluation.steps * size, size, feed.rows.start, info.fields)
    info_by_set: dict[str, str] = {}
    for name, evaluation_set in plan.evaluation_sets.items():
        with plan.document.locate_errors():
            dataset, num_samples = _open_evaluation_set(name, evaluation_set, plan, parts, info)
        info_by_set[f"samples of the set {name}:"] = str(num_samples)
        if hasattr(dataset, "data_digest"):
            info_by_set[f"data of the set {name}, with the digest"] = str(dataset.data_digest)
        # With a fixed order of sums, the position of every microbatch must not depend on `dp`.
        is_fixed, unit = parts.store.reduction.has_fixed_order, parts.topology.dp * plan.batch.micro_size
        batch_size = size
        if not is_fixed:  # the multiple of `unit` that splits the samples into the fewest batches with the least padding
            num_batches = -(-num_samples // size)
            batch_size = -(-num_samples // (num_batches * unit)) * unit
        feed = build_feed(dataset, batch_size, shuffle=evaluation_set.data.config.shuffle)
        feeds[name] = EvaluationFeed(feed, num_samples, batch_size, feed.rows.start, dataset.info.fields)
    if info_by_set:
        check_agreement(info_by_set, parts.groups["control"])  # a blocking collective over all ranks
    return feeds


def _open_evaluation_set(
    name: str, evaluation_set: EvaluationSet, plan: Plan, parts: Parts, info: DataInfo
) -> tuple[AnyDataset, int]:
    """Returns the dataset of the set `name` and the number of samples to evaluate. Raises PlanError "evaluation-set"."""
    component, keys = evaluation_set.data, evaluation_set.settings
    dataset = open_dataset(component, DataContext(plan.run.seed, "held_out" if keys.split == "held_out" else "train"))
    path = component.path
    fields, train_fields = (
        {key: declared for key, declared in declaration.fields.items() if key != SOURCE} for declaration in (dataset.info, info)
    )
    if fields != train_fields:
        message = f"the set `{name}` has the fields {sorted(fields)}, but [data] has {sorted(train_fields)}"
        if fields.keys() == train_fields.keys():
            message = f"the fields of the set `{name}` differ in shape or dtype from those of [data]"
        raise PlanError("evaluation-set", message, path=path, hint="use data with the same fields as [data]")
    add_positions(dataset.info, parts.topology.sp)  # may raise
    max_samples = None if keys.steps is None else keys.steps * plan.batch.global_size
    if is_stream(dataset):
        if max_samples is None:
            message, hint = f"the set `{name}` is a stream, which has no end", "set `steps`, the number of batches"
            raise PlanError("evaluation-set", message, path=path, hint=hint)
        return dataset, max_samples
    count = len(cast("Dataset", dataset))
    component.config.check_num_samples(count, path)
    if not count:
        message, hint = f"the set `{name}` has no samples", "use other data, or remove the set"
        raise PlanError("evaluation-set", message, path=path, hint=hint)
    return dataset, min(count, max_samples or sys.maxsize)


def build_metrics(plan: Plan, parts: Parts, info: DataInfo, *, has_tokens: bool) -> Metrics:
    """Returns the metrics of the plan's evaluations. has_tokens: whether the data are token ids. Raises PlanError "keep-best"
    if `keep_best` names a metric that these evaluations do not have.
    """
    evaluation = plan.evaluation
    if evaluation is None:
        return Metrics()
    custom_metric = whole_sequences = None
    if evaluation.metric is not None:
        custom_metric = _build_custom_metric(plan)
        if parts.topology.sp > 1 and evaluation.metric.sequence == "whole":
            whole_sequences = WholeSequences(add_positions(info, parts.topology.sp).fields, parts.groups["sp"])
    loss = plan.loss.config
    loss_config = loss if has_tokens and isinstance(loss, CrossEntropyConfig) else None
    metrics = Metrics(loss_config, custom_metric, whole_sequences)
    names = ["loss", *metrics.builtin_names, *(["perplexity"] if metrics.has_perplexity else [])]
    if evaluation.best is not None and custom_metric is None and parse_metric(evaluation.best.metric) not in names:
        message = f"an evaluation with this data and this loss has no metric `{evaluation.best.metric}`"
        hint = f"use one of {', '.join(names)}; perplexity and accuracy require token ids and plain cross-entropy"
        raise plan.add_locations(PlanError("keep-best", message, path=("evaluation", "keep_best"), hint=hint))
    return metrics


def _build_custom_metric(plan: Plan) -> Metric:
    """Calls the factory of `[evaluation] metric`, and returns the user's function. Raises PlanError "metric-result"."""
    assert plan.evaluation is not None
    assert plan.evaluation.metric is not None
    table, path = plan.evaluation.metric, ("evaluation", "metric")
    with plan.document.locate_errors():
        metric = call_factory(table.factory, path, plan.folder, table.options, {})
        if not callable(metric):
            message = f"`{table.factory}` must return a function `(output, batch)`, but returns a {type(metric).__name__}"
            raise PlanError("metric-result", message, path=(*path, "factory"))
    return cast("Metric", metric)


class BestEvaluation:
    """Tracks the best value of one evaluation metric. The state is the same on all ranks, and checkpoints save it. patience:
    the number of consecutive evaluations without improvement that ends the run; None for no limit. value, step: the best value
    and its step; None and 0 before the first finite value. num_since_best: the number of evaluations since the best.
    """

    def __init__(self, table: KeepBestTable, patience: int | None) -> None:
        self.table = table
        self.patience = patience
        self.value: float | None = None
        self.step = 0
        self.num_since_best = 0

    def add(self, step: int, row: Mapping[str, float]) -> bool:
        """Records the results of the evaluation after `step`, and returns whether the metric's value is finite and the best so
        far. Raises RunError "keep-best" on all ranks if `row` does not have the metric.
        """
        name = self.table.metric
        if name not in row:
            message = f"`keep_best` is `{name}`, but the evaluation has only {', '.join(row)}"
            raise RunError("keep-best", message, path=("evaluation", "keep_best"), hint="use one of these metrics")
        value = row[name]
        is_better = self.value is None or (value > self.value if self.table.is_max else value < self.value)
        if math.isfinite(value) and is_better:
            self.value, self.step, self.num_since_best = value, step, 0
            return True
        self.num_since_best += 1
        return False

    @property
    def stop_reason(self) -> str:
        """The reason why the run must end, or "" as long as `patience` allows more steps."""
        if self.patience is None or self.num_since_best < self.patience:
            return ""
        best = "" if self.value is None else f"; the best value, {self.value:.6g}, was reached at step {self.step}"
        plural = "s" if self.num_since_best > 1 else ""
        return f"{self.table.metric} has not improved in {self.num_since_best} evaluation{plural}{best}"

    def state(self) -> dict[str, Any]:
        """Returns the state, which `restore` accepts, as a dict that JSON can encode."""
        metric = {"metric": self.table.metric, "is_max": self.table.is_max}
        return {**metric, "value": self.value, "step": self.step, "num_since": self.num_since_best}

    def restore(self, state: Mapping[str, Any]) -> str:
        """Restores a result of `state()` and returns "". If the metric has changed, only returns a note for the user."""
        if (state["metric"], state["is_max"]) != (self.table.metric, self.table.is_max):
            return f"`keep_best` was `{state['metric']}` in the checkpoint, so the best evaluation is not restored"
        self.value, self.step, self.num_since_best = state["value"], int(state["step"]), int(state["num_since"])
        return ""
