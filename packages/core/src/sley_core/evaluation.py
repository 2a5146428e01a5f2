"""Builds the evaluation of a run: the sets of `[evaluation]` and their metrics, the same on all ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, cast

from sley_core.config import CrossEntropyConfig
from sley_core.data.batches import sliced_info
from sley_core.data.dataset import SOURCE, AnyDataset, DataContext, DataInfo, Dataset, is_stream
from sley_core.data.factory import open_dataset
from sley_core.engine.agreement import agree
from sley_core.engine.evaluation import EvaluationFeed, Metric, Metrics, evaluation_batch_size
from sley_core.engine.positions import WholeSequences
from sley_core.errors import PlanError, SleyError
from sley_core.factory import call_factory
from sley_core.plan.tables import number_of

if TYPE_CHECKING:
    from sley_core.data.feed import Feed
    from sley_core.engine.parts import Parts
    from sley_core.plan.plan import EvaluationSet, Plan


def local_rows(global_size: int, parts: Parts) -> range:
    """Returns this rank's rows of a global batch of `global_size`; all ranks of one `sp` group have the same ones."""
    size = global_size // parts.topology.dp
    start = parts.groups["dp"].coord * size
    return range(start, start + size)


class FeedMaker(Protocol):
    """Returns the feed of this rank's rows of batches of `batch_size` samples."""

    def __call__(self, dataset: AnyDataset, batch_size: int, /, *, shuffle: bool) -> Feed: ...


def build_evaluation_feeds(plan: Plan, parts: Parts, info: DataInfo, feed: FeedMaker) -> dict[str, EvaluationFeed]:
    """Returns the samples of `[evaluation]` by the name of their set, those of the held-out split under ""; a collective if
    there are sets. info: of the data to train on. Raises PlanError "evaluation-set" for data that do not fit them.
    """
    size, feeds = plan.batch.global_size, dict[str, EvaluationFeed]()
    if plan.evaluation is not None and plan.evaluation.held_out:
        held_out = feed(open_dataset(plan.data, DataContext(plan.run.seed, "held_out")), size, shuffle=True)
        feeds[""] = EvaluationFeed(held_out, plan.evaluation.steps * size, size, held_out.rows.start, info.fields)
    facts: dict[str, str] = {}
    for name, one in plan.evaluation_sets.items():
        try:
            dataset, num_samples = _open_set(name, one, plan, parts, info)
        except SleyError as error:
            raise plan.located(error) from error.__cause__
        facts[f"samples of the set {name}:"] = str(num_samples)
        if hasattr(dataset, "data_digest"):
            facts[f"data of the set {name}, with the digest"] = str(dataset.data_digest)
        # In a fixed order of sums all micro-batches have the same places, whatever `dp` is.
        is_fixed, unit = parts.store.reduction.fixed_order, parts.topology.dp * plan.batch.micro_size
        batch_size = size if is_fixed else evaluation_batch_size(num_samples, size, unit)
        of_set = feed(dataset, batch_size, shuffle=one.data.config.shuffle)
        feeds[name] = EvaluationFeed(of_set, num_samples, batch_size, of_set.rows.start, dataset.info.fields)
    if facts:
        agree(facts, parts.groups["control"])  # over all ranks; blocks
    return feeds


def _open_set(name: str, one: EvaluationSet, plan: Plan, parts: Parts, info: DataInfo) -> tuple[AnyDataset, int]:
    """Returns the data of a set, and the number of samples to evaluate."""
    dataset = open_dataset(one.data, DataContext(plan.run.seed, "held_out" if one.keys.split == "held_out" else "train"))
    path = one.data.path
    own, wanted = ({key: each for key, each in every.fields.items() if key != SOURCE} for every in (dataset.info, info))
    if own != wanted:
        message = f"the set `{name}` has the fields {sorted(own)}, and [data] {sorted(wanted)}"
        if own.keys() == wanted.keys():
            message = f"the fields of the set `{name}` are declared otherwise than those of [data]"
        raise PlanError("evaluation-set", message, path=path, hint="all samples that a model is given have one form")
    sliced_info(dataset.info, parts.topology.sp)  # may raise
    most = None if one.keys.steps is None else one.keys.steps * plan.batch.global_size
    if is_stream(dataset):
        if most is None:
            message, hint = f"the set `{name}` is a stream, which has no end", "say in `steps` how many batches are enough"
            raise PlanError("evaluation-set", message, path=path, hint=hint)
        return dataset, most
    count = len(cast("Dataset", dataset))
    if problem := one.data.config.changed(count):
        raise PlanError(problem.code, problem.message, path=(*path, problem.path[-1]), hint=problem.hint)
    if not count:
        raise PlanError(
            "evaluation-set", f"the set `{name}` has no samples", path=path, hint="name other data, or leave it out"
        )
    return dataset, min(count, most or sys.maxsize)


def build_metrics(plan: Plan, parts: Parts, info: DataInfo, *, has_tokens: bool) -> Metrics:
    """Returns the metrics of evaluations. has_tokens: whether the data are token ids. Raises PlanError "keep-best" if no metric
    has the name that `keep_best` follows.
    """
    evaluation = plan.evaluation
    if evaluation is None:
        return Metrics()
    own = whole = None
    if evaluation.metric is not None:
        own = _build_custom_metric(plan)
        if parts.topology.sp > 1 and evaluation.metric.sequence == "whole":
            whole = WholeSequences(sliced_info(info, parts.topology.sp).fields, parts.groups["sp"])
    loss = plan.loss.config
    metrics = Metrics(loss if has_tokens and isinstance(loss, CrossEntropyConfig) else None, own, whole)
    known = ["loss", *metrics.names, *(["perplexity"] if metrics.has_perplexity else [])]
    if evaluation.best is not None and own is None and number_of(evaluation.best.metric) not in known:
        message = f"an evaluation of this data and this loss gives no `{evaluation.best.metric}`"
        hint = f"it gives {', '.join(known)}; perplexity and accuracy are those of token ids and plain cross-entropy"
        raise plan.located(PlanError("keep-best", message, path=("evaluation", "keep_best"), hint=hint))
    return metrics


def _build_custom_metric(plan: Plan) -> Metric:
    """Returns the function that the user's factory makes."""
    assert plan.evaluation is not None
    assert plan.evaluation.metric is not None
    table, path = plan.evaluation.metric, ("evaluation", "metric")
    try:
        own = call_factory(table.factory, path, plan.folder, table.options, {})
        if not callable(own):
            message = f"`{table.factory}` gave a {type(own).__name__}, not a function `(output, batch)`"
            raise PlanError("metric-result", message, path=(*path, "factory"))
    except SleyError as error:
        raise plan.located(error) from error.__cause__
    return cast("Metric", own)
