"""Checks core's own tables against each other, and the data with its files; also in a plan that has other mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sley_core.errors import KeyPath
from sley_core.plan.tables import (
    BatchTable,
    ParallelTable,
    PrecisionTable,
    ProfileTable,
    RunTable,
    TimelineTable,
)
from sley_core.records import DatasetRecord, Problem
from sley_core.table import Table

if TYPE_CHECKING:
    from sley_core.plan.plan import Component

ACCUMULATION = {"fp32": ("fp32",), "bf16": ("fp32", "bf16"), "fp16": ("fp32",), "fp64": ("fp64",)}
"""The supported dtypes of `compute`, each with those of `gradients`, the default first; the plan's format allows more."""


def check_tables(tables: Mapping[str, Table | None], dp: int | None = None) -> Iterator[Problem]:
    """Yields what does not fit together in core's `tables`, by name. A table that is None or missing is not in the plan or has
    a mistake of its own; checks that depend on it are skipped.

    dp: how many ranks share the samples, if that is known from elsewhere than [parallel].

    Codes: "precision-unsupported", "loss-scale-unused", "loss-scale-range", "beyond-the-run", "skips-unused", and
    "batch-does-not-divide".
    """
    run, batch, precision, parallel = (tables.get(name) for name in ("run", "batch", "precision", "parallel"))
    if isinstance(precision, PrecisionTable):
        yield from _gradients(precision)
        yield from _loss_scale(precision)
    if isinstance(run, RunTable):
        yield from _skips(run)
        yield from _beyond(run, tables.get("timeline"), tables.get("profile"))
    if dp is None and isinstance(parallel, ParallelTable) and parallel.dp != "auto":
        dp = parallel.dp
    if isinstance(batch, BatchTable) and dp is not None:
        yield from _batch(batch, dp)


def check_data(data: Component, model: Component | None, *, evaluates: bool) -> Iterator[Problem]:
    """Yields what the record of `data` finds wrong with its table and its files; a factory's data is checked when it is built.

    model: None if its table has a mistake. evaluates: whether the plan needs held-out data.
    """
    if isinstance(data.record, DatasetRecord) and data.record.check is not None:
        vocab_size = None if model is None or model.record is None else getattr(model.config, "vocab_size", None)
        yield from data.record.load(data.record.check)(data.config, evaluates=evaluates, vocab_size=vocab_size)


def _gradients(precision: PrecisionTable) -> Iterator[Problem]:
    """Yields a problem for a dtype in which gradients cannot be accumulated."""
    compute, gradients = precision.compute, precision.gradients
    if gradients not in ACCUMULATION[compute]:
        known = " or ".join(ACCUMULATION[compute])
        message = f"gradients of what is computed in {compute} are accumulated in {known}, not {gradients}"
        hint = f'use "{ACCUMULATION[compute][0]}", or leave it out'
        yield Problem(("precision", "gradients"), message, hint, "precision-unsupported")


def _loss_scale(precision: PrecisionTable) -> Iterator[Problem]:
    """Yields a problem for a loss scale without fp16, or with a minimum above its initial value."""
    scale = precision.loss_scale
    path: KeyPath = ("precision", "loss_scale")
    if scale is None:
        return
    if precision.compute != "fp16":
        message = f"only fp16 has a loss scale, and this plan computes in {precision.compute}"
        yield Problem(path, message, "leave `loss_scale` out", "loss-scale-unused")
    elif scale.min_scale > scale.init_scale:
        message = f"the loss scale would begin at {scale.init_scale:g}, below its minimum {scale.min_scale:g}"
        yield Problem((*path, "min_scale"), message, f"use min_scale = {scale.init_scale} or less", "loss-scale-range")


def _skips(run: RunTable) -> Iterator[Problem]:
    """Yields a problem for a limit of skipped steps if no step is skipped."""
    if run.on_nan == "stop" and run.max_skips is not None:
        message = '`max_skips` limits steps that are skipped, but `on_nan = "stop"` skips none'
        yield Problem(("run", "max_skips"), message, 'leave it out, or write on_nan = "skip"', "skips-unused")


def _beyond(run: RunTable, timeline: Table | None, profile: Table | None) -> Iterator[Problem]:
    """Yields a problem for a step to draw or profile that the run does not have.

    An interval of evaluations may be longer than the run, which evaluates at its end in any case.
    """
    if isinstance(timeline, TimelineTable) and timeline.step > run.steps:
        message = f"the run has {run.steps} steps, so step {timeline.step} cannot be drawn"
        yield Problem(("timeline", "step"), message, f"the last step is {run.steps}", "beyond-the-run")
    if not isinstance(profile, ProfileTable):
        return
    first, last = profile.steps
    path: KeyPath = ("profile", "steps")
    if first > last:
        message = f"the first step to record, {first}, comes after the last, {last}"
        yield Problem(path, message, f"write [{last}, {first}]", "beyond-the-run")
    elif last > run.steps:
        message = f"the run has {run.steps} steps, so steps {first} to {last} cannot be recorded"
        yield Problem(path, message, f"the last step is {run.steps}", "beyond-the-run")


def _batch(batch: BatchTable, dp: int) -> Iterator[Problem]:
    """Yields a problem, with sizes that fit, if global_size is not a multiple of dp x micro_size."""
    size, micro = batch.global_size, batch.micro_size
    unit = dp * micro
    if size % unit == 0:
        return
    below = size // unit * unit
    sizes = f"{below} or {below + unit}" if below else f"{unit}"
    micros = [near for near in _divisors(size // dp) if size % dp == 0]
    better = f", or micro_size = {min(micros, key=lambda near: (abs(near - micro), near))}" if micros else ""
    message = f"global_size = dp x micro_size x accumulation fails: {size} is no multiple of {dp} x {micro} = {unit}"
    yield Problem(("batch", "global_size"), message, f"use global_size = {sizes}{better}", "batch-does-not-divide")


def _divisors(number: int) -> list[int]:
    """Returns the divisors up to a thousand; a larger micro-batch is not worth proposing."""
    return [divisor for divisor in range(1, min(number, 1000) + 1) if number % divisor == 0]
