"""Finds out which objects of a run hold memory, and attaches the plan's offload managers to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.engine.update import named_tensors, optimizer_states
from sley_core.memory.holdings import Held, Holdings
from sley_core.memory.protocols import Holds, HoldsMessages, Trims
from sley_core.memory.run_memory import MoveNumbers, RunMemory
from sley_core.memory.state import Part
from sley_core.records import OffloadManagerRecord

if TYPE_CHECKING:
    from contextlib import ExitStack

    from sley_core.engine.parts import Parts
    from sley_core.engine.stepper import Stepper
    from sley_core.engine.update import Update
    from sley_core.engine.weights import Stepped
    from sley_core.memory.protocols import OffloadManager
    from sley_core.plan.plan import Component, Plan


def memory_of(plan: Plan, parts: Parts, stepper: Stepper, numbers: MoveNumbers | None, undo: ExitStack) -> RunMemory:
    """Builds the plan's offload managers, attaches them to a run whose other parts are attached, and returns the run's memory.
    `undo` gets a call that detaches each.

    numbers: what a plan with managers adds to each row; it is told of the managers. None without.
    """
    update = stepper.update
    sources: dict[Part, Held] = {
        "weights": lambda: ((param.name, param.parameter) for param in parts.registry),
        "buffers": lambda: _buffers(parts),
        "masters": update.masters.held,
        "optimizer_states": lambda: _states(update),
        "gradients": parts.store.held,
        "handlers": lambda: _all_held(stepper.handlers),
        "pools": parts.pool.held,
        "messages": lambda: _messages(stepper),
    }
    trims: dict[Part, Callable[[], Iterable[object]]] = {
        "pools": parts.pool.made.values,
        "messages": lambda: [stepper.executor.crossing.link, *stepper.handlers],
    }
    holdings = Holdings(
        parts.world.device.torch_device, parts.store, sources, partial(_states_of, update), partial(_trim, trims)
    )
    managers: list[OffloadManager] = [component.build() for component in plan.offload]
    for manager in managers if parts.world.device.type != "meta" else ():  # nothing moves where nothing has memory
        manager.attach(parts, holdings)
        undo.callback(manager.detach)
    if numbers is not None:
        numbers.managers = managers
    return RunMemory(parts.world.device, holdings, managers, update.masters, parts.events.came_back)


def move_numbers(plan: Plan, parts: Parts) -> MoveNumbers | None:
    """Adds numbers of how much memory moved to each row, and returns what fills them; None for a plan without `[[offload]]`. To
    be called before all ranks agree on the names of such numbers.
    """
    if not plan.offload:
        return None
    moved = [part for one in plan.offload for part in _parts_of(one)]
    return MoveNumbers(parts.numbers, parts.groups["all"].size, moved)


def _parts_of(manager: Component) -> Sequence[str]:
    record = manager.record
    assert isinstance(record, OffloadManagerRecord), manager.name
    return record.parts(manager.config)


def _buffers(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of all buffers of this rank's layers."""
    for layer in parts.layers:
        yield from layer.module.named_buffers(layer.name)


def _states(update: Update) -> Iterator[tuple[str, Tensor]]:
    """Yields name, `<parameter>.<state>`, and tensor of all optimizer states, in the order of the parameters; then those that
    the optimizer keeps under other keys, as `optimizer.<state>`. None before its first step.
    """
    names = {id(stepped.parameter): stepped.name for stepped in update.masters.stepped}
    for stepped in update.masters.stepped:
        yield from _states_of(update, stepped)
    for key, state in update.optimizer.state.items():
        if id(key) not in names:
            yield from _under("optimizer", named_tensors(state))


def _states_of(update: Update, stepped: Stepped) -> Iterator[tuple[str, Tensor]]:
    """Returns name and tensor of the optimizer's states of one parameter."""
    return _under(stepped.name, optimizer_states(update, stepped))


def _under(name: str, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Returns the tensors with `name.` in front of their names."""
    return ((f"{name}.{inner}" if inner else name, tensor) for inner, tensor in tensors)


def _all_held(objects: Iterable[object]) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of what those of `objects` hold that tell it."""
    for one in objects:
        if isinstance(one, Holds):
            yield from one.held()


def _messages(stepper: Stepper) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of the buffers of stage links and handlers for what is on its way."""
    yield from _all_held([stepper.executor.crossing.link])
    for handler in stepper.handlers:
        if isinstance(handler, HoldsMessages):
            yield from handler.messages()


def _trim(of_part: Mapping[Part, Callable[[], Iterable[object]]], part: Part) -> int:
    """Lets the objects of `part` free what they can allocate anew; returns the bytes, 0 for a part that has none."""
    return sum(one.trim() for one in of_part[part]() if isinstance(one, Trims)) if part in of_part else 0
