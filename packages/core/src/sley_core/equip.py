"""Makes what a run needs besides its parts: samples and their meter, files that it writes, counts of its
parts, and the state for checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.attempt import CHECKPOINTS, RunAttempt
from sley_core.data.batches import Slices, check_tokens
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.data.feed import Feed
from sley_core.engine.evaluate import Evaluation, ForwardOnly
from sley_core.engine.step_batch import BatchSplitter
from sley_core.errors import KeyPath, dotted
from sley_core.memory.run_memory import CountsOf
from sley_core.metrics.throughput import Meter
from sley_core.model.buffers import BufferWatch
from sley_core.protocols import Counts, Keeps, MetricsWriter, Rewinds
from sley_core.run_state.state import TrainingState
from sley_core.run_state.tensors import RunTensors

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.data.dataset import AnyDataset
    from sley_core.engine.parts import Parts, Pools
    from sley_core.engine.stepper import Stepper
    from sley_core.engine.timeline import StepProfiler, StepTimeline
    from sley_core.memory.run_memory import RunMemory
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Component, Plan
    from sley_core.topology import Topology


def counts_of(plan: Plan, stepper: Stepper, pools: Pools, memory: RunMemory) -> dict[str, dict[str, float]]:
    """Returns the counts of the run's parts that implement `protocols.Counts`, and of its offload managers, by their names
    in the plan.

    A name that the plan lists twice is followed by its number.
    """
    parts = [*parts_of(plan, stepper), *zip(plan.offload, map(CountsOf, memory.managers), strict=True)]
    found: dict[str, dict[str, float]] = {}
    for component, part in parts:
        if component is not None and isinstance(part, Counts):
            same = sum(name.split(" ")[0] == component.name for name in found)
            found[f"{component.name} {same + 1}" if same else component.name] = dict(part.counts())
    return found | {name: dict(pool.counts()) for name, pool in pools.labels().items() if isinstance(pool, Counts)}


def parts_of(plan: Plan, stepper: Stepper) -> list[tuple[Component | None, object]]:
    """Returns pairs of the plan's component that made a live part of a run (None if the plan has no such
    table) and that part.
    """
    return [
        (plan.weights, stepper.executor.weights),
        (plan.link, stepper.executor.crossing.link),
        *zip(plan.gradient_handlers, stepper.handlers, strict=True),
        *zip(plan.scheduler_hooks, stepper.executor.hooks, strict=False),
        (plan.activations, stepper.executor.caller.policy),
    ]


def keepers_of(plan: Plan, stepper: Stepper) -> dict[str, Keeps]:
    """Returns those parts that keep something for a checkpoint, by their place: `gradient_handlers.0 dp.powersgd`."""
    found: dict[str, Keeps] = {}
    for component, part in parts_of(plan, stepper):
        if component is not None and isinstance(part, Keeps):
            found[f"{dotted(component.path)} {component.name}"] = part
    return found


@dataclass(frozen=True)
class Samples:
    """Holds what a run is trained on and measured with.

    splitter: makes micro-batches of samples. forward: runs the model forward only. reads: names of the fields that layers read.
    feed: gives the next samples, None in a fake world. watch: the buffers that the first step must not write. evaluation: on
    held-out samples, if the plan has one.
    """

    dataset: AnyDataset
    splitter: BatchSplitter
    meter: Meter
    forward: ForwardOnly
    reads: frozenset[str]
    feed: Feed | None = None
    watch: BufferWatch | None = None
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class Outputs:
    """Holds what writes into the run's folder; empty if it has none. writers: on rank 0 only."""

    writers: Sequence[MetricsWriter] = ()
    timeline: StepTimeline | None = None
    profiler: StepProfiler | None = None

    def rewind(self, step: int) -> None:
        """Drops what was written about steps after `step`, which are taken again."""
        for writer in self.writers:
            if isinstance(writer, Rewinds):
                writer.rewind(step)


@dataclass(frozen=True)
class AssemblyFacts:
    """Holds what the assembly found out.

    num_parameters, num_trained: elements of the whole model's parameters, and of those that are not frozen. notes: what a user
    should know. found: values of the plan that only the run could determine.
    """

    num_parameters: int
    num_trained: int
    notes: list[str] = field(default_factory=list)
    found: Mapping[KeyPath, Any] = field(default_factory=dict)


def rows_of(global_size: int, parts: Parts) -> range:
    """Returns this rank's rows of a global batch of `global_size`; all ranks of one `sp` group have the same ones."""
    size = global_size // parts.topology.dp
    start = parts.groups["dp"].coord * size
    return range(start, start + size)


def samples_of(plan: Plan, parts: Parts, model: Model, dataset: AnyDataset, stepper: Stepper, *, has_feed: bool) -> Samples:
    """Returns the training samples, their meter and the evaluation. has_feed: whether samples are read; else steps are given
    theirs.
    """
    executor, topology, groups = stepper.executor, parts.topology, parts.groups
    whole = executor.whole
    loss = executor.loss if executor.has_loss and whole is None else None
    slices = Slices(dataset.info.fields, topology.sp, groups["sp"].coord, loss)
    splitter = BatchSplitter(
        dataset.info,
        plan.batch.micro_size,
        slices,
        executor.loss,
        weighs=executor.has_loss and (whole is None or whole.counts),
        weighs_whole=whole is not None,
        weighs_micros=parts.store.canonical is not None,
    )
    modules = [layer.module for layer in parts.layers]
    forward = ForwardOnly(executor, stepper.lists, modules, groups, parts.world.device, stepper.agreement)
    reads = frozenset(name for layer in model.layers for name in layer.fields)
    samples = Samples(dataset, splitter, Meter.of(parts, model.layers, dataset.info), forward, reads)
    if not has_feed:
        return samples
    rows = rows_of(plan.batch.global_size, parts)
    config: Any = plan.data.config
    feed = _feed(plan, dataset, rows, shuffle=config.shuffle, will_save=plan.checkpoint is not None)
    watch = BufferWatch(parts.layers, model.per_rank_buffers)
    return replace(samples, feed=feed, watch=watch, evaluation=_evaluation(plan, forward, splitter, rows))


def _feed(plan: Plan, dataset: AnyDataset, rows: range, *, shuffle: bool = True, will_save: bool = False) -> Feed:
    """Returns the feed of this rank's `rows`, which checks token ids as it reads."""
    return Feed(
        dataset,
        seed=plan.run.seed,
        batch_size=plan.batch.global_size,
        rows=rows,
        shuffle=shuffle,
        timeout_s=plan.limits.data_timeout_s,
        check=lambda batch, samples: check_tokens(batch, dataset.info, samples),
        will_save=will_save,
    )


def _evaluation(plan: Plan, forward: ForwardOnly, splitter: BatchSplitter, rows: range) -> Evaluation | None:
    """Returns the evaluation on held-out data; None if the plan has none."""
    if plan.evaluation is None:
        return None
    held_out = open_dataset(plan.data, DataContext(plan.run.seed, "held_out"))
    return Evaluation(forward, _feed(plan, held_out, rows), splitter, plan.evaluation.steps)


def outputs_of(plan: Plan, world: World, stepper: Stepper, topology: Topology, folder: Path | None) -> Outputs:
    """Returns what writes into `folder`, the run's; empty outputs if it is None. Metrics writers are on rank 0 only."""
    if folder is None:
        return Outputs()
    writers = [component.build(folder) for component in plan.metrics] if world.rank == 0 else []
    timeline = profiler = None
    if plan.timeline is not None or plan.profile is not None:
        from sley_core.engine.timeline import StepProfiler, StepTimeline  # few runs draw a step
    if plan.timeline is not None:
        timeline = StepTimeline(plan.timeline.step, folder, stepper, topology, stepper.groups)
    if plan.profile is not None:
        first, last = plan.profile.steps
        profiler = StepProfiler(first, last, folder, world.rank, world.device)
    return Outputs(writers, timeline, profiler)


def state_of(
    plan: Plan,
    parts: Parts,
    stepper: Stepper,
    samples: Samples,
    memory: RunMemory,
    model: Model,
    folder: Path | None,
    facts: AssemblyFacts,
) -> TrainingState:
    """Returns what a checkpointer is built with. folder: the run's."""
    tensors = RunTensors(parts, stepper.update, memory, model.per_rank_buffers, keepers_of(plan, stepper))
    own = plan.checkpoint.config.folder if plan.checkpoint else None
    where = own or (None if folder is None else str(folder.absolute() / CHECKPOINTS))
    attempt = RunAttempt(folder, parts.world.rank)
    return TrainingState(plan, tensors, samples.feed, attempt, where, facts.found, facts.notes)
