"""Checks the top level of a plan: its format, its tables, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sley_core.errors import Diagnostic
from sley_core.plan.document import Document, first_of
from sley_core.plan.faults import unknown_key
from sley_core.plan.kinds import COMPONENTS
from sley_core.plan.tables import FORMAT, OPTIONAL, TABLES
from sley_core.words import shown, suggestion

TOP_LEVEL = ("plan", "source_folder", *TABLES, *OPTIONAL, *(table.key for table in COMPONENTS))


def top_level_faults(document: Document) -> list[Diagnostic]:
    """Returns problems for an unsupported format, and for tables and keys that no plan has."""
    found = []
    version = document.tables.get("plan", FORMAT)
    if version != FORMAT or isinstance(version, bool):
        message = f"`plan` is the format of the plan, {FORMAT}, not {shown(version)}"
        found.append(document.diagnostic("plan-format", message, ("plan",)))
    unknown = [key for key in document.tables if key not in TOP_LEVEL]
    return found + first_of(unknown, partial(_unknown, document), "the plan")


def _unknown(document: Document, key: str) -> Diagnostic:
    """Returns the diagnostic of an unknown top-level key or table, with a suggestion."""
    if not isinstance(document.tables[key], dict | list):
        return unknown_key(key, TOP_LEVEL, (key,), document, "a plan", _elsewhere(key, document.tables))
    tables = [name for name in TOP_LEVEL if name not in ("plan", "source_folder")]
    hint = suggestion(key, tables, f"its tables are {', '.join(tables)}")
    return document.diagnostic("unknown-table", f"`{key}` is not a table of a plan", (key,), hint, "key")


def _elsewhere(key: str, tables: Mapping[str, Any]) -> str | None:
    """Returns a hint which table has `key`: the only one of this plan that contains it, or the only one whose model has it;
    else None.
    """
    here = [name for name, table in tables.items() if isinstance(table, dict) and key in table]
    known = [name for name, model in {**TABLES, **OPTIONAL}.items() if key in model.model_fields]
    found = here if len(here) == 1 else known
    return f"did you mean `{found[0]}.{key}`?" if len(found) == 1 else None
