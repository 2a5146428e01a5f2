"""What a run has besides its parts: samples and what measures them, files that it writes, and facts about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sley_core.errors import KeyPath
from sley_core.protocols import Rewinds

if TYPE_CHECKING:
    from sley_core.data.dataset import AnyDataset
    from sley_core.data.feed import Feed
    from sley_core.engine.evaluate import Evaluation, ForwardOnly
    from sley_core.engine.parts import Parts
    from sley_core.engine.step_batch import BatchSplitter
    from sley_core.engine.timeline import StepProfiler, StepTimeline
    from sley_core.metrics.throughput import Meter
    from sley_core.model.buffers import BufferWatch
    from sley_core.protocols import MetricsWriter


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
