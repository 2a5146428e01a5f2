"""Derives plans that write nothing: the same layout, the same training in one process, and a finished run for reading."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sley_core.data.dataset import DataContext, Sample
from sley_core.plan.load import resolve
from sley_core.records import GradientHandlerRecord

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

_WRITES = ("checkpoint", "profile", "timeline")
"""Tables whose only effect is on files."""

_LAYOUT = ("pipeline", "partition", "link", "weights", "sequence", "activations", "offload", "pools")
"""Tables that decide where and when something is computed, and never what."""

_BETWEEN_RANKS = ("reducer", "tie")
"""Roles of handlers that only make up for the layout. A transform changes what is learned, and stays."""


def in_layout(plan: Plan) -> Plan:
    """Returns the plan without what it writes, in its own layout."""
    return _with(plan, _without(plan, _WRITES))


def in_one_process(plan: Plan) -> Plan:
    """Returns the plan that computes the same in one process: no parallel axis, no reducer, no memory that moves.

    What determines the numbers is kept: batches, micro-batches, seed, precision, the order of sums (`reduction`), transforms.
    """
    tables = _without(plan, (*_WRITES, *_LAYOUT))
    tables["parallel"] = {**tables.get("parallel", {}), "dp": 1, "pp": 1, "sp": 1, "wp": 1}
    given = tables.get("gradient_handlers", [])
    kept = [table for table, one in zip(given, plan.gradient_handlers, strict=False) if not _is_between(one.record)]
    tables["gradient_handlers"] = kept
    return _with(plan, tables)


def has_layout(plan: Plan) -> bool:
    """Returns whether `in_one_process` removes anything from the plan, on one rank too: offload and recomputation count."""
    tables = plan.document.tables
    return any(tables.get(key) for key in _LAYOUT) or any(_is_between(one.record) for one in plan.gradient_handlers)


def of_trained(plan: Plan, *, evaluates: bool, batches: int | None = None) -> Plan:
    """Returns the plan of a finished run for one process that only calls the model: on any available device, with weights that
    are loaded later instead of those that the run began with.

    evaluates: whether the plan has an evaluation, with the plan's number of `batches` unless given. Otherwise it has none.
    """
    tables = in_one_process(plan).document.tables
    tables["run"]["device"] = "auto"
    tables["model"].pop("weights", None)  # the resolved plan has the sizes that these files decided
    given = tables.pop("evaluation", {"every": 1})
    if evaluates:
        tables["evaluation"] = given if batches is None else {**given, "steps": batches}
    return _with(plan, tables)


class NoData:
    """A dataset that is never read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        raise AssertionError(f"sample {index} of no data")


def without_data(plan: Plan) -> Plan:
    """Returns the plan with `NoData` in place of its data, for a run that only calls the model; a batch has the same fields and
    sizes. The dataset of a factory stays as it is: its fields may be those of its first sample.
    """
    if plan.data.record is None:
        return plan
    from sley_core.data.factory import open_dataset

    info = open_dataset(plan.data, DataContext(plan.run.seed)).info
    table: dict[str, Any] = {"factory": f"{__name__}:NoData", "vocab_size": info.vocab_size, "sequence": info.sequence}
    table["fields"] = {name: _given(asdict(field)) for name, field in info.fields.items()}
    return _with(plan, {**deepcopy(dict(plan.document.tables)), "data": _given(table)})


def _given(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _is_between(record: object) -> bool:
    assert isinstance(record, GradientHandlerRecord), record
    return record.role in _BETWEEN_RANKS


def _without(plan: Plan, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: deepcopy(value) for key, value in plan.document.tables.items() if key not in keys}


def _with(plan: Plan, tables: dict[str, Any]) -> Plan:
    return resolve(replace(plan.document, tables=tables), plan.loader)
