"""One rank's part of a run, complete and immutable, as plugins get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sley_core.engine.step_events import StepEvents

if TYPE_CHECKING:
    from sley_core.comm.groups import Groups
    from sley_core.comm.world import World
    from sley_core.engine.book import ParameterBook
    from sley_core.engine.boundary import Description
    from sley_core.engine.direct import WeightQueue
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.pools import Pools
    from sley_core.engine.step_numbers import StepNumbers
    from sley_core.engine.waits import Waits
    from sley_core.engine.weights import WeightStore
    from sley_core.model.layers import Layer
    from sley_core.plan.tables import BatchTable, LimitsTable, PrecisionTable, RunTable
    from sley_core.topology import Topology


@dataclass(frozen=True)
class Parts:
    """Holds what gradient handlers, scheduler hooks, stage links and weight communicators are attached to.

    run, batch, precision, limits: the plan's own tables. world: this process and its device. topology: the ranks along each
    axis. groups: this rank's, by axis. layers: this rank's. book: their parameters. store: the accumulated gradients. weights:
    the store of the working weights. waits: what must be complete before a layer's weights are used. queue: weight gradients
    that a split backward defers. numbers: takes what plugins add to each step's row. pool: `pool(name)` is the run's memory
    pool of that name. events: moments of a step, for plugins that are no gradient handlers. foretold: in a fake world that
    takes steps, what a chunk of another stage (stage, chunk) would announce to this one; None elsewhere.
    """

    run: RunTable
    batch: BatchTable
    precision: PrecisionTable
    limits: LimitsTable
    world: World
    topology: Topology
    groups: Groups
    layers: Sequence[Layer]
    book: ParameterBook
    store: GradientStore
    weights: WeightStore
    waits: Waits
    queue: WeightQueue
    numbers: StepNumbers
    pool: Pools
    events: StepEvents = field(default_factory=StepEvents)
    foretold: Callable[[int, int], Description] | None = None
