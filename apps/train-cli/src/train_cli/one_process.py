"""Derives plans that write nothing: the same layout, the same training in one process, and a trained run with its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.data.dataset import DataContext, Sample
from sley_core.plan.load import resolve
from sley_core.plan.loader import Loader
from sley_core.records import GradientHandlerRecord
from train_cli.saved import document_of_run, files_of, newest_weights

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.run import Run

_WRITES = ("checkpoint", "profile")
"""Tables whose only effect is on files."""

_LAYOUT = ("pipeline", "partition", "link", "weights", "sequence", "activations", "offload", "pools")
"""Tables that decide where and when something is computed, and never its value."""

_BETWEEN_RANKS = ("reducer", "tie")
"""Roles of handlers that only make up for the layout. A transform changes what is learned, and stays."""

_EITHER = (("source", "files"), ("held_out", "held_out_files"), ("separator", "field"))
"""Keys of `[data]` that exclude each other: a new value of one takes the place of the run's other one."""


def in_layout(plan: Plan) -> Plan:
    """Returns the plan in its own layout, without the tables that write files."""
    return _with_tables(plan, _without(plan, _WRITES))


def in_one_process(plan: Plan) -> Plan:
    """Returns the plan that computes the same in one process: no parallel axis, no reducer, no memory that moves.

    What determines the numbers is kept: batches, micro-batches, seed, precision, the order of sums (`reduction`), transforms.
    """
    tables = _without(plan, (*_WRITES, *_LAYOUT))
    tables["parallel"] = {**tables.get("parallel", {}), "dp": 1, "pp": 1, "sp": 1, "wp": 1}
    handlers = zip(tables.get("gradient_handlers", []), plan.gradient_handlers, strict=False)
    tables["gradient_handlers"] = [table for table, handler in handlers if not _is_between_ranks(handler.record)]
    return _with_tables(plan, tables)


def has_layout(plan: Plan) -> bool:
    """Returns whether `in_one_process` removes anything from the plan, on one rank too: offload and recomputation count."""
    tables = plan.document.tables
    handlers = plan.gradient_handlers
    return any(tables.get(key) for key in _LAYOUT) or any(_is_between_ranks(handler.record) for handler in handlers)


def plan_of(folder: Path, data: Sequence[str] = ()) -> Plan:
    """Returns the plan of the run in `folder`, with each `key=VALUE` of `data` set in `[data]`.

    Raises UsageError "no-run", and what the plan's loading raises.
    """
    document = document_of_run(folder, [f"data.{change}" for change in data])
    changed = {str(override.path[1]) for override in document.overrides}
    if changed:
        gone = {"samples_per_epoch"}  # of the run's own data
        for pair in _EITHER:
            gone |= set(pair) if changed & set(pair) else set()
        table = {key: value for key, value in document.tables["data"].items() if key in changed or key not in gone}
        document = replace(document, tables={**document.tables, "data": table})
    return resolve(document, Loader())


@contextmanager
def trained_run(folder: Path, plan: Plan, *, evaluates: bool = False, batches: int | None = None) -> Iterator[tuple[Run, str]]:
    """Yields a run in one process, on any available device, with the newest weights of the run in `folder`, and which they are.

    plan: of the run, as `plan_of` returns it. evaluates: whether the plan has an evaluation, with the plan's number of
    `batches` unless given; otherwise it has none, and its data are not opened. Raises UsageError "no-weights".
    """
    from sley_core.assemble import assemble
    from sley_core.comm.world import World
    from sley_core.run_state.tensors import plan_and_weights
    from sley_core.weight_files.read import WeightFiles

    path, step = newest_weights(folder, plan)
    tables = in_one_process(plan).document.tables
    tables["run"]["device"] = "auto"
    tables["model"].pop("weights", None)  # the resolved plan has the sizes that these files decided
    evaluation = tables.pop("evaluation", {"every": 1})
    if evaluates:
        tables["evaluation"] = evaluation if batches is None else {**evaluation, "steps": batches}
    alone = _with_tables(plan, tables)
    if not evaluates:
        alone = _without_data(alone)
    with ExitStack() as stack:
        run = stack.enter_context(assemble(alone, World.alone(alone.run.device)))
        if isinstance(path, Path):
            weights: Any = WeightFiles(path)
            which = f"the weights{'' if step is None else f' of step {step}'} in {path}"
        else:
            checkpoint = files_of(plan).open(path)
            assert checkpoint is not None, path
            _, weights = plan_and_weights(checkpoint)
            which = f"the checkpoint of step {step} in {path}"
        run.load_weights((name, weights.tensor(name)) for name in weights.names)
        yield run, which


class NoData:
    """A dataset that is never read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        raise AssertionError(f"sample {index} of no data")


def _without_data(plan: Plan) -> Plan:
    """Returns the plan with `NoData` in place of its data, for a run that only calls the model; a batch has the same fields and
    sizes. The dataset of a factory stays as it is: its fields may be those of its first sample.
    """
    if plan.data.record is None:
        return plan
    from sley_core.data.factory import open_dataset

    info = open_dataset(plan.data, DataContext(plan.run.seed)).info
    table: dict[str, Any] = {"factory": f"{__name__}:NoData", "vocab_size": info.vocab_size, "sequence": info.sequence}
    table["fields"] = {
        name: {key: value for key, value in asdict(field).items() if value is not None} for name, field in info.fields.items()
    }
    table = {key: value for key, value in table.items() if value is not None}
    return _with_tables(plan, {**deepcopy(dict(plan.document.tables)), "data": table})


def _is_between_ranks(record: object) -> bool:
    assert isinstance(record, GradientHandlerRecord), record
    return record.role in _BETWEEN_RANKS


def _without(plan: Plan, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: deepcopy(value) for key, value in plan.document.tables.items() if key not in keys}


def _with_tables(plan: Plan, tables: dict[str, Any]) -> Plan:
    return resolve(replace(plan.document, tables=tables), plan.loader)
