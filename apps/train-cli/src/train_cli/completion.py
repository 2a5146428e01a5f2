"""Completes `--set` and `plugins` in a shell: keys of the plan, records that a key takes, plugins. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sley_core.errors import PluginError, SleyError, dotted
from sley_core.plan.kinds import COMPONENTS
from sley_core.plan.load import load_plan
from sley_core.plan.loader import Loader
from sley_core.plan.plan import Component, Plan
from sley_core.plan.tables import OPTIONAL, TABLES
from sley_core.table import RecordKind


def completions(words: Sequence[str], incomplete: str) -> Iterator[str]:
    """Yields the completions of `--set` that begin with `incomplete`: keys of the plan and of the records that it names, and
    after `use=` the installed records.

    words: of the command line so far, the plan among them. For a plan that cannot be loaded, only the keys of tables are
    yielded.
    """
    key, equals, _ = incomplete.partition("=")
    table, _, last = key.rpartition(".")
    if equals and last == "use":
        kind = next((spec.kind for spec in COMPONENTS if spec.key == table.partition(".")[0]), None)
        found = (f"{key}={name}" for name in plugin_ids(kind)) if kind else iter(())
    else:
        plan = _plan(words)
        found = iter(dict.fromkeys([*table_keys(), *(_component_keys(plan) if plan else ())]))
    yield from (one for one in found if one.startswith(incomplete))


def table_keys() -> Iterator[str]:
    """Yields the keys that every plan may have, each with its equals sign: `run.steps=`, `model.use=`, `metrics.0.use=`."""
    for table, model in {**TABLES, **OPTIONAL}.items():
        yield from (f"{table}.{key}=" for key in model.model_fields)
    yield from (f"{spec.key}.{'0.' if spec.many else ''}use=" for spec in COMPONENTS if not spec.named)


def plugin_ids(kind: RecordKind | None = None) -> list[str]:
    """Returns the records of all plugins that can be loaded, those of `kind` or all: `dp.bucketed`."""
    loader = Loader()
    found: list[str] = []
    for name in loader.names():
        with suppress(PluginError):
            records = loader.load(name).records
            found += [f"{name}.{one}" for each, named in records.items() if kind in (None, each) for one in named]
    return sorted(set(found))


def _plan(words: Sequence[str]) -> Plan | None:
    """Returns the plan among the words, if there is one that can be loaded."""
    file = next((word for word in words if Path(word).is_file()), None)
    try:
        return load_plan(file) if file else None
    except SleyError:
        return None


def _component_keys(plan: Plan) -> Iterator[str]:
    """Yields the keys of the records that the plan names: `optimizer.lr=`, `gradient_handlers.0.bucket_mb=`."""
    for spec in COMPONENTS:
        found = getattr(plan, spec.key) or ()
        parts = found if isinstance(found, tuple) else found.values() if isinstance(found, Mapping) else (found,)
        for part in parts:
            assert isinstance(part, Component), part
            yield from (f"{dotted((*part.path, key))}=" for key in type(part.config).model_fields)
