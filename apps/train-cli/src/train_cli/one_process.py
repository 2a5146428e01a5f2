"""Derives plans that write no files or run in one process, and opens trained runs with their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.data.dataset import DataContext, Sample
from sley_core.plan.load import resolve_plan
from sley_core.plan.loader import PluginLoader
from sley_core.records import GradientHandlerRecord
from train_cli.saved import open_weights, read_run_document

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_trainer.run import Run

_OUTPUT_TABLES = ("checkpoint", "profile")
"""The tables of a plan that only make a run write files."""

_CHECKPOINT_KEYS = ("keep_best", "patience")
"""The keys of `[evaluation]` that need checkpoints."""

_LAYOUT_TABLES = ("pipeline", "partition", "link", "weights", "sequence", "activations", "offload")
"""The tables of a plan that decide where and when values are computed, but change no result."""

_LAYOUT_ROLES = ("reducer", "tie")
"""The roles of the gradient handlers that belong to a layout. Transforms change results, so they are kept."""

_EXCLUSIVE_KEYS = (("source", "files"), ("held_out", "held_out_files"), ("separator", "field"))
"""Pairs of keys of `[data]` that exclude each other. A change of one key removes the other."""


def read_only_plan(plan: Plan) -> Plan:
    """Returns the plan without the tables that make a run write files; the layout is unchanged."""
    return _replace_tables(plan, _remove_tables(plan, _OUTPUT_TABLES))


def one_process_plan(plan: Plan) -> Plan:
    """Returns a plan that computes the same values in one process, without parallel axes, reducers and offload.

    The plan keeps its batches, microbatches, seed, precision, `reduction` and transforms.
    """
    tables = _remove_tables(plan, (*_OUTPUT_TABLES, *_LAYOUT_TABLES))
    tables["parallel"] = {**tables.get("parallel", {}), "dp": 1, "pp": 1, "sp": 1, "wp": 1}
    handlers = zip(tables.get("gradient_handlers", []), plan.gradient_handlers, strict=False)
    tables["gradient_handlers"] = [table for table, handler in handlers if not _belongs_to_layout(handler.record)]
    return _replace_tables(plan, tables)


def has_layout(plan: Plan) -> bool:
    """Returns whether the plan has tables or gradient handlers of a layout, which include offload and recomputation."""
    tables = plan.document.tables
    handlers = plan.gradient_handlers
    return any(tables.get(key) for key in _LAYOUT_TABLES) or any(_belongs_to_layout(handler.record) for handler in handlers)


def plan_with_data(folder: Path, data: Sequence[str] = ()) -> Plan:
    """Returns a run's plan with the changes `data` in `[data]`. Raises UsageError "no-run", and errors of loading a plan."""
    document = read_run_document(folder, [f"data.{change}" for change in data])
    changed_keys = {str(override.path[1]) for override in document.overrides}
    if changed_keys:
        removed_keys = {"samples_per_epoch"}  # holds only for the run's own data
        for pair in _EXCLUSIVE_KEYS:
            removed_keys |= set(pair) if changed_keys & set(pair) else set()
        removed_keys -= changed_keys
        table = {key: value for key, value in document.tables["data"].items() if key not in removed_keys}
        document = replace(document, tables={**document.tables, "data": table})
    return resolve_plan(document, PluginLoader())


@contextmanager
def open_trained_run(folder: Path, plan: Plan, *, best: bool = False, with_evaluation: bool = False) -> Iterator[Run]:
    """Yields a one-process run with the newest weights of the run in `folder`, or with `best` those of its best checkpoint.
    Prints the origin of these weights.

    plan: the run's plan, from `plan_with_data`. with_evaluation: whether the run can evaluate; otherwise `NoData` replaces its
    data, unless a factory makes them. Raises UsageError "no-weights" if the run has no such weights.
    """
    from sley_core.comm.world import World
    from sley_trainer.assemble import assemble

    _, weights = open_weights(str(folder), best=best)
    tables = one_process_plan(plan).document.tables
    tables["run"]["device"] = "auto"
    config: Any = plan.model.config
    if getattr(config, "weights", None) is not None:  # all values are loaded below
        tables["model"] = {"use": plan.model.name, **config.without_weights().model_dump(mode="json", exclude_none=True)}
    evaluation = tables.pop("evaluation", {"every": 1})
    if with_evaluation:
        if plan.document.overrides:  # `plan_with_data` has changed [data]
            evaluation = {**evaluation, "held_out": True}
        tables["evaluation"] = evaluation
    else:
        tables["batch"] = {"global_size": 1, "micro_size": 1}  # the run only predicts single samples
    one_process = _replace_tables(plan, tables)
    if not with_evaluation:
        one_process = _without_data(one_process)
    with assemble(one_process, World.alone(one_process.run.device)) as run:
        run.load_weights((name, weights.tensor(name)) for name in weights.names)
        yield run


class NoData:
    """A placeholder dataset: its length is 1, but it has no sample to read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        raise AssertionError(f"sample {index} of a placeholder dataset")


def _without_data(plan: Plan) -> Plan:
    """Returns the plan with `NoData` as its data, for runs that only call the model. Batches keep their fields and sizes. A
    dataset of a factory is kept, because only its first sample may determine the fields.
    """
    if plan.data.record is None:
        return plan
    from sley_core.data.batches import open_dataset

    info = open_dataset(plan.data, DataContext(plan.run.seed)).info
    table: dict[str, Any] = {"factory": f"{__name__}:NoData", "vocab_size": info.vocab_size, "sequence": info.sequence}
    table["fields"] = {
        name: {key: value for key, value in asdict(field).items() if value is not None} for name, field in info.fields.items()
    }
    table = {key: value for key, value in table.items() if value is not None}
    return _replace_tables(plan, {**deepcopy(dict(plan.document.tables)), "data": table})


def _belongs_to_layout(record: object) -> bool:
    assert isinstance(record, GradientHandlerRecord), record
    return record.role in _LAYOUT_ROLES


def _remove_tables(plan: Plan, keys: tuple[str, ...]) -> dict[str, Any]:
    tables = {key: deepcopy(value) for key, value in plan.document.tables.items() if key not in keys}
    if "evaluation" in tables:  # these plans write no checkpoints
        tables["evaluation"] = {key: value for key, value in tables["evaluation"].items() if key not in _CHECKPOINT_KEYS}
    return tables


def _replace_tables(plan: Plan, tables: dict[str, Any]) -> Plan:
    return resolve_plan(replace(plan.document, tables=tables), plan.loader)
