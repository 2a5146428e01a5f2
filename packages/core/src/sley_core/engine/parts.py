"""The parts of a run on one rank that plugins receive: its step state, callbacks and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from sley_core.actions.action import Action
from sley_core.comm.exchanges import ActionProgress
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.comm.world import Groups, World
    from sley_core.engine.boundary import Description
    from sley_core.engine.buffers import WeightStore
    from sley_core.engine.direct import WeightQueue
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.registry import Param, ParameterRegistry
    from sley_core.engine.weights import OptimizerParam
    from sley_core.losses.chunked_head import HeadChunks
    from sley_core.memory import DevicePool
    from sley_core.model.layers import Layer
    from sley_core.plan.tables import BatchTable, LimitsTable, PrecisionTable, RunTable
    from sley_core.topology import Topology


class Phase(StrEnum):
    """The purpose of a call: training, recomputation in a backward, deferred weight gradients, or an evaluation."""

    TRAIN = "train"
    RECOMPUTE = "recompute"
    WEIGHTS = "weights"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class MicroStep:
    """Identifies a call of the model chunk `chunk` for the purpose `phase`. micro, global_micro: the microbatch's number on
    this rank and in the global batch. step: the optimizer step, from 0. layer: the layer that is recomputed, in a report of a
    recomputation; else "".
    """

    chunk: int
    micro: int
    phase: Phase
    step: int
    global_micro: int
    layer: str = ""


class StepState:
    """This rank's position in its list of actions.

             begin ──> enter(action) ──> leave(action) ──> enter ... ──> begin of the next step

    step: the optimizer step, from 0. num_microbatches: the number of this rank's microbatches in the step. first_micro: the
    global number of this rank's first microbatch. action: the running action, or None. after_first_action: called once, after
    the first action. done_chunks: the chunks whose last gradient action is over. step_progress: shown in failure reports.
    """

    def __init__(self, within: ActionProgress | None = None) -> None:
        """Creates the state before the first step. within: for an evaluation, the progress of the training; else None."""
        self._is_within = within is not None
        self.step_progress = within or ActionProgress()
        self.step = -1
        self.num_microbatches = 0
        self.first_micro = 0
        self._was_taken: bool | Callable[[], bool] = True
        self.action: Action | None = None
        self.after_first_action: Callable[[], None] | None = None
        self._last: dict[int, Action] = {}
        self.done_chunks: frozenset[int] = frozenset()
        self._settled: frozenset[int] | None = None

    def begin(self, step: int, actions: Sequence[Action], num_microbatches: int, first_micro: int) -> None:
        """Begins a step that runs the list `actions`. step, num_microbatches, first_micro: the attributes' new values."""
        self.step = step
        if not self._is_within:
            self.step_progress.begin_step(step + 1)
        self.num_microbatches = num_microbatches
        self.first_micro = first_micro
        self.action = None
        self.after_first_action = None
        self._last = {action.chunk: action for action in actions if action.kind.makes_gradients}
        self.done_chunks = frozenset()
        self._settled = None

    @property
    def was_taken(self) -> bool:
        """Returns whether the last step changed weights. If not, handlers must discard all data that they saved in it."""
        if callable(self._was_taken):
            self._was_taken = self._was_taken()
        return self._was_taken

    @was_taken.setter
    def was_taken(self, taken: bool | Callable[[], bool]) -> None:
        """Sets `was_taken`, or a function that returns it. The first read calls the function, which may wait for the device."""
        self._was_taken = taken

    def micro_step(self, action: Action, phase: Phase) -> MicroStep:
        """Returns the identity of the call that `action` makes in the current step."""
        return MicroStep(action.chunk, action.micro, phase, self.step, self.first_micro + action.micro)

    def enter(self, action: Action) -> None:
        """Marks `action` as running, and records whether it is its chunk's last gradient action."""
        self.action = action
        is_last = self._last.get(action.chunk) == action
        self._settled = self.done_chunks | {action.chunk} if is_last else None

    def leave(self, action: Action) -> None:
        """Ends `action`. Marks its chunk as done if no gradient action follows. The first call runs `after_first_action`."""
        if self._last.get(action.chunk) == action:
            self.done_chunks |= {action.chunk}
        self.action = None
        self._settled = None
        if self.after_first_action is not None:
            after, self.after_first_action = self.after_first_action, None
            after()

    def are_gradients_final(self, chunks: frozenset[int]) -> bool:
        """Returns whether no action after the running one can add to a gradient of a parameter that `chunks` share."""
        return self._settled is not None and chunks <= self._settled


class Waits:
    """Holds, for each layer, the callbacks that run before the layer's weights are used, in the order of registration."""

    def __init__(self) -> None:
        self._waits: dict[str, list[tuple[Callable[[], None], Callable[[], bool] | None]]] = {}

    def before_layer(self, name: str, wait: Callable[[], None], is_due: Callable[[], bool] | None = None) -> None:
        """Registers `wait`, which is called before every use of the weights of layer `name`. is_due: returns whether weights
        are missing; if it returns False, `wait` is not called. If None, `wait` is always called. `is_due` must be cheap, change
        nothing, and return the same value on all ranks that hold shards of the layer, since these ranks read each other's
        shards during a step only if nothing is due.
        """
        self._waits.setdefault(name, []).append((wait, is_due))

    def wait_for(self, name: str) -> bool:
        """Calls the callbacks of layer `name` that are due. Returns whether any were due."""
        has_waited = False
        for wait, is_due in self._waits.get(name, ()):
            if is_due is None or is_due():
                wait()
                has_waited = True
        return has_waited

    def is_due(self, name: str) -> bool:
        """Returns whether a callback of layer `name` is due."""
        return any(is_due is None or is_due() for _, is_due in self._waits.get(name, ()))


Buckets: TypeAlias = Callable[[Sequence["OptimizerParam"]], Iterator[Sequence["OptimizerParam"]]]
"""A function that takes all parameters to update, and yields them in buckets. The optimizer updates each bucket before it
requests the next bucket. If an update fails, the iterator is closed.
"""


@dataclass
class StepEvents:
    """Holds the callbacks of a step, in the order of registration. Callbacks run on this rank only, and must not communicate.
    began: called before the first forward. gradients_done: called when all gradients are reduced, before the update.
    after_update: called after the update, also if no weight changed, unless the step raised an error. step_in_buckets: yields
    the buckets that the optimizer updates one at a time; None updates everything at once.
    """

    began: list[Callable[[], None]] = field(default_factory=list)
    gradients_done: list[Callable[[], None]] = field(default_factory=list)
    after_update: list[Callable[[], None]] = field(default_factory=list)
    step_in_buckets: Buckets | None = None


Share = Callable[[], "torch.Tensor | float"]
"""A function that returns this rank's part of a number: a float, or a scalar on the device."""

Combination = Literal["sum", "root"]
"""How a number in a row of metrics is computed: as the sum of all ranks' shares, or as the square root of the sum."""


class StepNumbers:
    """The numbers that plugins add to the rows of metrics. names: the sorted names from all ranks, set by `gather_names`."""

    def __init__(self, groups: Groups) -> None:
        self.names: tuple[str, ...] = ()
        self._groups = groups
        self._shares: dict[str, Share] = {}
        self._combinations: dict[str, Combination] = {}
        self._is_agreed = False

    def add(self, name: str, share: Share, of: Combination = "sum") -> None:
        """Adds a number to every row of metrics. Called while plugins are attached, on any of the ranks. Raises RunError
        `number-name` if the name is taken or has no slash, and `number-late` after `gather_names`. name: of the form
        `plugin/number`. share: returns this rank's part of the number, a float or a scalar on the device; called once per step,
        when gradients are reduced and unscaled but not yet clipped. Ranks that have not added the name contribute 0. of:
        whether the row gets the sum over all ranks or its square root.
        """
        if self._is_agreed:
            message = f"the number {name!r} was added after the plugins had been attached"
            raise RunError("number-late", message, hint="add it in `attach`")
        if "/" not in name or name in self._shares:
            reason = "is there already" if name in self._shares else "has no slash"
            raise RunError("number-name", f"the number {name!r} {reason}", hint="use a name of the form `plugin/number`")
        self._shares[name] = share
        self._combinations[name] = of

    def replica_weight(self, param: Param) -> float:
        """Returns the factor for this rank's sum over `param`, with which the total of all ranks counts each element once."""
        return 1.0 / (self._groups[param.reduce_group].size * len(param.stages))

    def gather_names(self) -> None:
        """Sets `names` to the names that ranks have added. A blocking collective over all ranks. Raises RunError `number-name`
        on all ranks if a number is a sum on one rank and a root on another.
        """
        self._is_agreed = True
        merged: dict[str, Combination] = {}
        label = "the numbers that plugins add to rows"
        for combinations_of_rank in self._groups["control"].gather_objects(self._combinations, label=label):
            for name, combination in combinations_of_rank.items():
                if merged.setdefault(name, combination) != combination:
                    raise RunError(
                        "number-name", f"the number {name!r} is a plain sum on one rank, but the root of a sum on another"
                    )
        self._combinations = dict(sorted(merged.items()))
        self.names = tuple(self._combinations)

    def local_shares(self, device: torch.device) -> torch.Tensor:
        """Returns this rank's shares in the order of `names`, float64 on `device`; 0 for names that this rank has not added."""
        shares = [self._shares[name]() if name in self._shares else 0.0 for name in self.names]
        on_device = [isinstance(share, torch.Tensor) and share.device.type == device.type for share in shares]
        on_host = [0.0 if is_on_device else float(share) for share, is_on_device in zip(shares, on_device, strict=True)]
        values = torch.tensor(on_host, dtype=torch.float64).to(device)  # one copy
        for index, share in enumerate(shares):
            if on_device[index]:
                values[index] = share.detach() if isinstance(share, torch.Tensor) else share
        return values

    def row(self, sums: Sequence[float]) -> dict[str, float]:
        """Returns the numbers by name. sums: the sums of all ranks' `local_shares`. The root of a negative sum is NaN."""
        numbers = zip(self._combinations.items(), sums, strict=True)
        roots = {"root": lambda number: math.sqrt(number) if number >= 0 else math.nan, "sum": float}
        return {name: roots[of](number) for (name, of), number in numbers}


@dataclass(frozen=True)
class Parts:
    """One rank's part of a run, to which gradient handlers, scheduler hooks, stage links and weight communicators are attached.

    run, batch, precision, limits: the plan's tables. world: this process and its device. topology: the ranks along each axis.
    groups: this rank's groups by axis. layers: this rank's layers. registry: the layers' parameters. store: the accumulated
    gradients. weights: the store of the working weights. waits: the callbacks that run before a layer's weights are used.
    queue: the weight gradients that a split backward defers. numbers: the numbers that plugins add to each row. pool: the
    memory pool of the run's device buffers. is_compiled: whether torch.compile compiles the layers. events: the callbacks of a
    step, for plugins other than gradient handlers. describe_output: in a fake world that takes steps, a function `(stage,
    chunk)` that describes the value that this chunk of another stage would send to this stage; None elsewhere. head: the
    model's last linear, if the loss computes its logits in chunks; else None.
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
