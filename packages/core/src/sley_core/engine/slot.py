"""The gradient of one parameter: its memory, the contributions that it got in this step, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.engine.registry import Param
from sley_core.engine.shards import sharded_read
from sley_core.engine.step_state import StepState
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.engine.canonical.tree import Arrival


def dense(gradient: Tensor, param: Param) -> Tensor:
    """Returns `gradient` of `param` unchanged. Raises RunError `sparse-gradient` if it is a sparse tensor."""
    if gradient.is_sparse:
        raise RunError(
            "sparse-gradient",
            f"the gradient of the parameter {param.name!r} is sparse, which no reducer and no norm takes",
            hint="make its module with `sparse=False`",
        )
    return gradient


def check_not_sharded(param: Param) -> None:
    """Raises RunError `sharded-weight-read` if `param` is sharded: only its communicator may use a shard."""
    if param.shard is not None:
        raise sharded_read(param, "the forward reads")


@dataclass(slots=True)
class Habit:
    """Remembers how a gradient came in earlier steps; the parameter's slot in the next layout begins with a copy.

    expected: `Slot.final` of the first step. is_irregular: whether that number varies, so that only the end of the chunk
    completes the gradient.
    """

    expected: int = 0
    is_irregular: bool = False

    def learn(self, final: int) -> None:
        """Records, at the end of a chunk, that the gradient came in `final` passes; irregular if that differs from before."""
        if self.expected and final and final != self.expected:
            self.is_irregular = True
        self.expected = max(self.expected, final)


def mark_irregular(tasks: Mapping[Slot, tuple[object, int]]) -> None:
    """Marks each gradient that came in a backward within the backward as irregular: it may come more often next time. tasks:
    the action in which each gradient came in the first step, and the number of autograd's graph task.
    """
    outermost: dict[object, int] = {}  # the action's own backward has the lowest task number: it began first
    for action, task in tasks.values():
        outermost[action] = min(task, outermost.get(action, task))
    for slot, (action, task) in tasks.items():
        slot.habit.is_irregular |= task != outermost[action]


class State(Enum):
    """Says how far a gradient has come in this step; see the diagram of `Slot`."""

    OPEN = "contributions may come"
    COMPLETE = "nothing more is expected; it waits for those before it in the order"
    REPORTED = "handlers know that it is complete"
    PAUSED = "the next call of the same step adds to it"


class Autograd(Enum):
    """Says what autograd does with its gradient of the parameter."""

    COPIED = "a hook adds it to the view"
    IN_VIEW = "after the first, which a hook copies, autograd adds into the view, which is `parameter.grad`, by itself"
    UNWATCHED = "autograd sums in `parameter.grad` without a hook, and the end of the chunk takes that"


class Slot:
    """Holds the gradient of `param` as `view`, a part of a buffer.

             reset ──> OPEN ── complete ──> COMPLETE ── report, in the store's order ──> REPORTED ──> reset of the next step
                        ^                      │                                             │
                        └──── check_open ──────┘                                             └── check_open: `gradient-late`
                         a backward within the backward came once more

    Between two calls of one step an OPEN gradient is PAUSED.

    contributions: their number in this step. final: the number of passes in the action that completes the gradient. Autograd
    makes one pass per backward, however often it uses the parameter; the queue of a W makes one after the parameter's last
    product; a communicator makes one with every contribution. autograd: IN_VIEW only if parameter and view have the same dtype,
    which is not known before the first layout. is_lent: whether `parameter.grad` was made the view in this step, so that its
    present value is the whole sum.
    """

    __slots__ = ("autograd", "chunks", "contributions", "final", "habit", "is_lent", "param", "parameter", "state", "view")

    def __init__(self, param: Param, view: Tensor, habit: Habit, autograd: Autograd) -> None:
        self.param = param
        self.parameter = param.parameter
        self.chunks = param.chunks
        self.view = view
        self.habit = habit
        self.autograd = autograd
        self.reset()

    @property
    def is_open(self) -> bool:
        return self.state is State.OPEN

    def reset(self) -> None:
        """Begins a step: the first contribution will overwrite the view."""
        self.contributions = 0
        self.final = 0
        self.is_lent = False
        self.state = State.OPEN
        self.parameter.grad = None

    def passed(self, *, learning: bool) -> None:
        """Counts one pass in the action that completes the gradient, and completes it if no more are expected. learning:
        whether this is the first step, in which the end of the chunk completes it, since the number is not known yet.
        """
        self.final += 1
        habit = self.habit
        if self.is_open and not learning and not habit.is_irregular and self.final >= habit.expected > 0:
            self.complete()

    def check_open(self, state: StepState) -> None:
        """Checks that a contribution may come now; a COMPLETE gradient that was not yet reported is opened again.

        Raises RunError `gradient-complete` if the gradient is complete and no step runs: a backward called by the user. Raises
        `gradient-late` if it was already reported: its reduction would sum only a part of it.
        """
        if self.state is State.OPEN:
            return
        name = self.param.name
        if state.action is not None:
            assert not self.chunks <= state.done, f"{name}: a contribution after its gradient was reported ready"
            self.habit.is_irregular = True
            if self.state is State.COMPLETE:
                self.state = State.OPEN
                return
            raise RunError(
                "gradient-late",
                f"a backward within the backward reaches the parameter {name!r} again, whose gradient is being reduced: in "
                "the steps before it came once",
                hint="use torch.utils.checkpoint with `use_reentrant=False`, or `core.recompute`",
            )
        if self.state is State.PAUSED:
            self.state = State.REPORTED  # the sum may have it already, so it is of no use
        raise RunError(
            "gradient-complete",
            f"a backward between two steps reaches the parameter {name!r}, whose gradient is that of the step before",
            hint="call `run.store.begin_step()` before a backward of your own, and read `run.store.gradient(param)` after "
            "it, which is of this rank's samples; `run.step(batch)` trains on samples of your own",
        )

    def enter(self, leaf: Arrival) -> None:
        """Announces the micro-batch of the next contribution; only canonical slots need it."""

    def leave(self) -> None:
        """Announces that the running action adds nothing more to this gradient."""

    def settle(self) -> None:
        """Completes the sum; called once per step, when no more contribution can come and before the parameter is reported."""

    def take(self, gradient: Tensor) -> None:
        """Adds `gradient`, of any floating dtype, to the view; the first of a step is copied."""
        if self.contributions:
            self.view.add_(gradient)
        else:
            self.view.copy_(gradient)

    def adopt(self, gradient: Tensor) -> None:
        """Adds `gradient` as `take` does, but may keep the tensor itself: the caller must not use it again."""
        self.take(gradient)

    def take_over(self) -> None:
        """Takes `parameter.grad`, set by autograd or a backward of a user's own: the whole sum if the view was lent."""
        gradient = self.parameter.grad
        assert gradient is not None, self.param
        if gradient is not self.view:
            if self.is_lent:
                self.contributions = 0
            self.adopt(dense(gradient, self.param))
            self.is_lent = self.autograd is Autograd.IN_VIEW and self.parameter.dtype == self.view.dtype
            self.parameter.grad = self.view if self.is_lent else None
        self.contributions += 1

    @property
    def is_assigned(self) -> bool:
        """Whether a backward of a user's own assigned `parameter.grad`, and no hook has taken it."""
        gradient = self.parameter.grad
        return gradient is not None and gradient is not self.view and self.autograd is not Autograd.UNWATCHED

    def take_product(self, left: Tensor, right: Tensor) -> None:
        """Adds left^T right; without a temporary tensor if all have the same dtype."""
        if left.dtype != self.view.dtype:
            self.take(left.t() @ right)
        elif self.contributions:
            self.view.addmm_(left.t(), right)
        else:
            torch.mm(left.t(), right, out=self.view)

    def take_rows(self, indices: Tensor, rows: Tensor) -> None:
        """Adds each of `rows` at its index along dim 0; the first call of a step zeroes the view before."""
        if not self.contributions:
            self.view.zero_()
        add_at(self.view, indices, rows.to(self.view.dtype))

    def sum(self) -> Tensor | None:
        """Returns the sum of this step so far, None if there is no contribution."""
        return self.view if self.contributions else None

    def pause(self) -> None:
        """Ends a call of the step that other calls follow."""
        self.state = State.PAUSED

    def resume(self) -> bool:
        """Begins the next call of the step; returns whether nothing was added since `pause`."""
        was_paused, self.state = self.state is State.PAUSED, State.OPEN
        return was_paused

    def complete(self) -> None:
        """Marks the gradient complete; zeroes it if there was no contribution."""
        if not self.contributions:
            self.view.zero_()
        self.state = State.COMPLETE


class LooseSlot(Slot):
    """Holds an unbuffered gradient, which no handler reduces: it stays in the tensor that autograd made, if that has the
    store's dtype. Saves the buffer and one pass over memory. `view` is a new tensor in every step.
    """

    __slots__ = ("dtype", "nothing", "paused")

    def __init__(self, param: Param, dtype: torch.dtype, habit: Habit, autograd: Autograd) -> None:
        self.dtype = dtype
        self.paused: tuple[Tensor | None, int] = (None, 0)
        self.nothing = param.parameter.new_empty(0, dtype=dtype)
        super().__init__(param, self.nothing, habit, autograd)

    def reset(self) -> None:
        super().reset()
        self.view = self.nothing

    def take(self, gradient: Tensor) -> None:
        # Contiguous, as the parameter is: a fused optimizer ignores strides, and would use elements in the wrong order.
        self.adopt(gradient if self.contributions else gradient.clone(memory_format=torch.contiguous_format))

    def adopt(self, gradient: Tensor) -> None:
        if self.contributions:
            self.view.add_(gradient)
        else:
            self.view = gradient.to(self.dtype).contiguous()  # somebody else's may have any strides

    def take_product(self, left: Tensor, right: Tensor) -> None:
        if self.contributions and left.dtype == self.dtype:
            self.view.addmm_(left.t(), right)
        else:
            self.adopt((left.t() @ right).contiguous())

    def take_rows(self, indices: Tensor, rows: Tensor) -> None:
        if not self.contributions:
            self.view = torch.zeros_like(self.parameter, dtype=self.dtype)
        add_at(self.view, indices, rows.to(self.dtype))

    def check_nothing_came_late(self) -> None:
        """Asserts that no contribution followed `complete`; without a hook nothing else would notice one."""
        gradient = self.parameter.grad
        is_watched = self.autograd is not Autograd.UNWATCHED
        is_late = not is_watched and not self.is_open and gradient is not None and gradient is not self.view
        assert not is_late, f"{self.param.name}: a contribution after its gradient was reported ready"

    def complete(self) -> None:
        summed = self.parameter.grad if self.autograd is Autograd.UNWATCHED else None
        if summed is not None:
            self.adopt(dense(summed, self.param))
            self.contributions += 1
            self.parameter.grad = None
        if not self.contributions:
            self.view = torch.zeros_like(self.parameter, dtype=self.dtype)
        self.state = State.COMPLETE

    def sum(self) -> Tensor | None:
        if self.autograd is not Autograd.UNWATCHED:
            return super().sum()
        return None if self.parameter.grad is None else dense(self.parameter.grad, self.param)

    def pause(self) -> None:
        """Leaves what autograd sums in `parameter.grad` there: without a hook, only its version tells what else is added."""
        super().pause()
        if self.autograd is Autograd.UNWATCHED:
            summed = self.parameter.grad
            self.paused = summed, 0 if summed is None else summed._version

    def resume(self) -> bool:
        is_untouched = True
        if self.autograd is Autograd.UNWATCHED:
            summed, version = self.paused
            is_untouched = self.parameter.grad is summed and (summed is None or summed._version == version)
            self.paused = None, 0
        return super().resume() and is_untouched


def add_at(table: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Adds `rows` [n, ...], of the table's dtype, at `indices` [n] along dim 0, deterministically."""
    if table.is_cuda:
        table.index_put_((indices,), rows, accumulate=True)  # sorted first; `index_add_` would be atomic here
    else:
        table.index_add_(0, indices, rows)  # one after the other; `index_put_` may be atomic here
