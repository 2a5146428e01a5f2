"""Checks that a plan's gradient handlers do every necessary job exactly once, in an order that works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sley_core.errors import KeyPath
from sley_core.records import GradientHandlerRecord, Problem, Role
from sley_core.topology import Topology

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

ONE_EACH: tuple[Role, ...] = ("reducer", "tie")
"""Roles that must not occur twice: a sum would be summed again."""

Handlers = Sequence[tuple[int, str, GradientHandlerRecord]]


def check_handlers(plan: Plan, topology: Topology) -> Iterator[Problem]:
    """Yields the problems of the plan's gradient handlers; each job that correctness needs must be done exactly once.

    Codes: "handler-missing", "handler-twice", "handler-conflict" (two for one job), "handler-order", "handler-shards".
    """
    handlers: Handlers = [
        (number, one.name, one.record)
        for number, one in enumerate(plan.gradient_handlers)
        if isinstance(one.record, GradientHandlerRecord)
    ]
    yield from _missing(handlers, topology)
    yield from _twice(handlers)
    yield from _order(handlers)
    yield from _shards(handlers, topology)


def sums_ties(plan: Plan) -> bool:
    """Returns whether a gradient handler of the plan sums the gradients of parameters that several stages hold."""
    records = (one.record for one in plan.gradient_handlers)
    return any(isinstance(record, GradientHandlerRecord) and record.role == "tie" for record in records)


def _missing(handlers: Handlers, topology: Topology) -> Iterator[Problem]:
    """Yields a problem if ranks hold the same weights and no handler is a reducer."""
    ranks = topology.ranks_per_stage
    if ranks > 1 and not any(record.role == "reducer" for _, _, record in handlers):
        message = f"{ranks} ranks hold the same weights, but no gradient handler sums their gradients"
        hint = 'add [[gradient_handlers]] with `use = "core.each"`, or leave the list out'
        yield Problem(("gradient_handlers",), message, hint, "handler-missing")


def _twice(handlers: Handlers) -> Iterator[Problem]:
    """Yields a problem for a handler listed twice, and for a second handler of a job that must be done once."""
    seen: dict[str, int] = {}
    first: dict[Role, str] = {}
    for number, name, record in handlers:
        if name in seen:
            message = f"`{name}` is listed twice"
            yield Problem(_path(number), message, "keep one of them", "handler-twice")
            continue
        seen[name] = number
        if record.role in ONE_EACH and record.role in first:
            job = "sum gradients" if record.role == "reducer" else "sum gradients of shared weights"
            message = f"`{first[record.role]}` and `{name}` both {job}, so the sum would be wrong"
            yield Problem(_path(number), message, "keep one of them", "handler-conflict")
        first.setdefault(record.role, name)


def _order(handlers: Handlers) -> Iterator[Problem]:
    """Yields a problem for each pair of handlers in an order that a record's `before` or `after` forbids."""
    for number, name, record in handlers:
        for other_number, other, other_record in handlers:
            if other_number < number and other_record.role in record.before:
                yield _wrong_order(number, name, "before", other, other_record.role)
            elif other_number > number and other_record.role in record.after:
                yield _wrong_order(number, name, "after", other, other_record.role)


def _shards(handlers: Handlers, topology: Topology) -> Iterator[Problem]:
    """Yields a problem for a handler that needs whole gradients, after a reducer that leaves only a part of each to a rank."""
    reducer = ""
    for number, name, record in handlers:
        if reducer and record.role in ("tie", "transform") and not record.takes_shards:
            message = f"`{name}` works on whole gradients, of which `{reducer}` leaves a part to each rank"
            yield Problem(_path(number), message, "take a reducer such as `dp.bucketed`", "handler-shards")
        if record.role == "reducer" and record.result == "shard" and topology.ranks_per_stage > 1:
            reducer = name


def _wrong_order(number: int, name: str, word: str, other: str, role: Role) -> Problem:
    message = f"`{name}` must come {word} `{other}`: it works {word} every {role}"
    return Problem(_path(number), message, f"move its table {word} that of `{other}`", "handler-order")


def _path(number: int) -> KeyPath:
    return ("gradient_handlers", number, "use")
