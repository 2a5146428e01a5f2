"""Loads a plan from a file, a text, or tables that a program made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from sley_core.errors import KeyPath
from sley_core.plan.document import plain
from sley_core.plan.loader import Loader
from sley_core.plan.plan import Plan
from sley_core.plan.read import read_file, read_tables, read_text
from sley_core.plan.resolve import resolve
from sley_core.plan.write import leaves


def load_plan(path: str | Path, overrides: Sequence[str] = (), *, loader: Loader | None = None) -> Plan:
    """Loads the plan in the file `path`, with each `key.path=VALUE` of `overrides` applied in order.

    Raises PlanError with all problems, sorted by place, or PluginError if a plugin is among them. Imports no torch.
    """
    return resolve(read_file(path, overrides), loader or Loader())


def plan_from_text(
    text: str,
    file: str = "plan.toml",
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    loader: Loader | None = None,
) -> Plan:
    """Loads the plan in `text`; messages call it `file`, relative paths start at `folder`. Raises as `load_plan`."""
    return resolve(read_text(text, file, folder, overrides), loader or Loader())


def plan_from_dict(
    tables: Mapping[str, Any], folder: Path | None = None, overrides: Sequence[str] = (), *, loader: Loader | None = None
) -> Plan:
    """Loads the plan in plain data, as TOML would give it; None leaves a key out. Raises as `load_plan`."""
    return resolve(read_tables(tables, folder, overrides), loader or Loader())


def with_values(plan: Plan, values: Mapping[KeyPath, Any]) -> Plan:
    """Returns a plan with some values changed to what a run found out, such as the number of its samples.

    Checked like any other, with the plugins that are loaded already. The changed values get the origin "core"; all others, also
    those of `values` that are the same as before, keep their place and origin.
    """
    tables = deepcopy(plan.document.tables)
    known = dict(leaves(plan.tables))
    values = {path: value for path, value in values.items() if path not in known or known[path] != plain(value)}
    for path, value in values.items():
        here: Any = tables
        for part in path[:-1]:
            here = here.setdefault(part, {}) if isinstance(here, dict) else here[part]
        here[path[-1]] = plain(value)
    return resolve(replace(plan.document, tables=tables), plan.loader, values)


def with_tables(plan: Plan, tables: Mapping[str, Any]) -> Plan:
    """Returns a plan with whole tables changed; None removes one. Checked like any other, with the plugins that are loaded
    already. The changed tables have no place in a file.
    """
    kept = {key: value for key, value in plan.document.tables.items() if key not in tables}
    given = {key: plain(value) for key, value in tables.items() if value is not None}
    return resolve(replace(plan.document, tables={**kept, **given}), plan.loader)
