"""Names of files and folders that a run leaves in its folder, and copies of files that its plan names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sley_core.plan.document import Document

PLAN = "plan.toml"
WEIGHTS = "weights"
CHECKPOINTS = "checkpoints"
"""In a run's folder: its plan, its final weights, and its checkpoints, where the plan names no other folder for them."""

KEPT = {("data", "tokenizer"): "tokenizer", ("model", "weights"): "start"}
"""Keys of the plan that name files, and the folder in the run's own in which a run keeps copies of the small ones."""


def with_kept(document: Document, folder: Path) -> Document:
    """Returns the plan's document with the files that the run in `folder` has kept in place of those that it names."""
    tables: dict[str, Any] = dict(document.tables)
    for (table, key), name in KEPT.items():
        if key in tables.get(table, {}) and (folder / name).is_dir():
            tables[table] = {**tables[table], key: str((folder / name).absolute())}
    return replace(document, tables=tables)
