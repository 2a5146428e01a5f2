"""The parts of a run on one rank that plugins receive, and their callbacks and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.comm.group import Groups
    from sley_core.comm.world import World
    from sley_core.engine.boundary import Description
    from sley_core.engine.direct import WeightQueue
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.registry import Param, ParameterRegistry
    from sley_core.engine.weights import Stepped, WeightStore
    from sley_core.losses.chunked_head import HeadChunks
    from sley_core.memory.pool import DevicePool
    from sley_core.model.layers import Layer
    from sley_core.plan.tables import BatchTable, LimitsTable, PrecisionTable, RunTable
    from sley_core.topology import Topology


class Waits:
    """Holds the callbacks that run before the weights of a layer are used, by layer name, in the order of registration."""

    def __init__(self) -> None:
        self._waits: dict[str, list[tuple[Callable[[], None], Callable[[], bool] | None]]] = {}

    def before_layer(self, name: str, wait: Callable[[], None], is_due: Callable[[], bool] | None = None) -> None:
        """Registers `wait`, which is called before every use of the weights of layer `name`.

        is_due: returns whether weights are missing; `wait` is only called then. It must be cheap, change nothing, and return
        the same on all ranks that hold shards of the layer, which read each other's shards in a step only while nothing is due.
        """
        self._waits.setdefault(name, []).append((wait, is_due))

    def wait_for(self, name: str) -> bool:
        """Calls the due callbacks of layer `name`. Returns whether there were any."""
        has_waited = False
        for wait, is_due in self._waits.get(name, ()):
            if is_due is None or is_due():
                wait()
                has_waited = True
        return has_waited

    def is_due(self, name: str) -> bool:
        """Returns whether layer `name` has a due callback."""
        return any(is_due is None or is_due() for _, is_due in self._waits.get(name, ()))


Buckets: TypeAlias = Callable[[Sequence["Stepped"]], Iterator[Sequence["Stepped"]]]
"""Yields everything to update in buckets. Each bucket is updated after it is yielded and before the next one is
requested; the iterator is closed if that fails.
"""


@dataclass
class StepEvents:
    """Holds the callbacks of a step, in the order of registration. They are local to a rank and must not communicate.

    began: called before the first forward. gradients_done: called when all gradients are reduced and nothing is updated yet.
    after_update: called after the update of any step that did not raise, also if no weight changed. step_in_buckets: yields the
    buckets that the optimizer steps one at a time; None steps everything at once.
    """

    began: list[Callable[[], None]] = field(default_factory=list)
    gradients_done: list[Callable[[], None]] = field(default_factory=list)
    after_update: list[Callable[[], None]] = field(default_factory=list)
    step_in_buckets: Buckets | None = None


Share = Callable[[], "Tensor | float"]
Combination = Literal["sum", "root"]


class StepNumbers:
    """Holds the numbers that plugins add to the rows. names: the sorted names of all ranks, valid after `agree`."""

    def __init__(self, groups: Groups) -> None:
        self.names: tuple[str, ...] = ()
        self._groups = groups
        self._shares: dict[str, Share] = {}
        self._combinations: dict[str, Combination] = {}
        self._is_agreed = False

    def add(self, name: str, share: Share, of: Combination = "sum") -> None:
        """Adds a number to every row from the first step on; called while plugins are attached, on any of the ranks. Raises
        RunError `number-name` for a name that is taken or has no slash, and `number-late` once ranks have agreed.

        name: `plugin/number`. share: returns this rank's part of the number, a float or a scalar on the device; called once per
        step, when gradients are reduced, unscaled and not yet clipped. Ranks that have not added the name contribute 0. of:
        whether the row gets the sum over all ranks or the square root of it.
        """
        if self._is_agreed:
            raise RunError(
                "number-late", f"the number {name!r} is added after the plugins are attached", hint="add it in `attach`"
            )
        if "/" not in name or name in self._shares:
            reason = "is there already" if name in self._shares else "has no slash"
            raise RunError("number-name", f"the number {name!r} {reason}", hint="use a name of the form `plugin/number`")
        self._shares[name] = share
        self._combinations[name] = of

    def fraction(self, param: Param) -> float:
        """Returns the factor for a share summed over `param`'s elements, so that the sum over all ranks counts each element
        once: ranks of its reduce group hold the same gradient, and so do the stages of a tie.
        """
        return 1.0 / (self._groups[param.reduce_group].size * len(param.stages))

    def agree(self) -> None:
        """Merges the numbers of all ranks into one list, the same on all ranks. A blocking collective over all ranks. Raises
        RunError `number-name` on all ranks if a name is a sum on one rank and a root on another.
        """
        self._is_agreed = True
        merged: dict[str, Combination] = {}
        for combinations_of_rank in self._groups["control"].gather_objects(
            self._combinations, label="the numbers that plugins add to rows"
        ):
            for name, combination in combinations_of_rank.items():
                if merged.setdefault(name, combination) != combination:
                    raise RunError("number-name", f"the number {name!r} is a sum on one rank, but a root on another")
        self._combinations = dict(sorted(merged.items()))
        self.names = tuple(self._combinations)

    def local_shares(self, device: torch.device) -> Tensor:
        """Returns this rank's shares, float64 [numbers] on `device`; 0 for names that this rank did not add."""
        shares = [self._shares[name]() if name in self._shares else 0.0 for name in self.names]
        on_device = [isinstance(share, Tensor) and share.device.type == device.type for share in shares]
        on_host = [0.0 if is_on_device else float(share) for share, is_on_device in zip(shares, on_device, strict=True)]
        values = torch.tensor(on_host, dtype=torch.float64).to(device)  # one copy
        for index, share in enumerate(shares):
            if on_device[index]:
                values[index] = share.detach() if isinstance(share, Tensor) else share
        return values

    def row(self, sums: Sequence[float]) -> dict[str, float]:
        numbers = zip(self._combinations.items(), sums, strict=True)
        roots = {"root": lambda number: math.sqrt(number) if number >= 0 else math.nan, "sum": float}
        return {name: roots[of](number) for (name, of), number in numbers}


@dataclass(frozen=True)
class Parts:
    """One rank's part of a run, to which gradient handlers, scheduler hooks, stage links and weight communicators are attached.

    run, batch, precision, limits: the plan's tables. world: this process and its device. topology: the ranks along each axis.
    groups: this rank's groups by axis. layers: this rank's layers. registry: their parameters. store: the accumulated
    gradients. weights: the store of the working weights. waits: the callbacks before a layer's weights are used. queue: the
    weight gradients that a split backward defers. numbers: the numbers that plugins add to each row. pool: the memory pool of
    the run's device buffers. events: the callbacks of a step, for plugins other than gradient handlers. is_compiled: whether
    torch.compile compiles the layers. describe_output: returns the description of the value that a chunk of another stage
    (stage, chunk) would send to this stage, in a fake world that takes steps; None elsewhere.
    head: the model's last linear, if the loss computes its logits in chunks.
    """

    run: RunTable
    batch: BatchTable
    precision: PrecisionTable
    limits: LimitsTable
    world: World
    topology: Topology
    groups: Groups
    layers: Sequence[Layer]
    registry: ParameterRegistry
    store: GradientStore
    weights: WeightStore
    waits: Waits
    queue: WeightQueue
    numbers: StepNumbers
    pool: DevicePool
    is_compiled: bool = False
    events: StepEvents = field(default_factory=StepEvents)
    describe_output: Callable[[int, int], Description] | None = None
    head: HeadChunks | None = None
