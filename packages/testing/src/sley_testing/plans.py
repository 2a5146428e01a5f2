"""Makes tables of small plans for tests, changed by keyword, and the text files that they read.

tables = small_plan(batch__micro_size=1)                      # keys by `table__key`, whole tables by their name
reference = record(tables, 3, folder=texts)                   # `texts` is a fixture: a folder with the text files
layouts = ranks(2)(record, changed(tables, parallel={"dp": 2}), 3, folder=texts)
assert_parity(reference, layouts, "fp64")

Since core 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

from sley_core.plan.loader import Loader

Tables = dict[str, Any]

_SMALL: Tables = {
    "run": {"name": "small", "steps": 3, "device": "cpu", "seed": 7},
    "model": {"use": "models.llama", "num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24},
    "data": {"use": "data.text", "files": ["text/*.txt"], "sequence": 24, "separator": "\n\n", "held_out": 0.1},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 3e-3, "clip_norm": 0.5},
    "precision": {"compute": "fp64"},
}


def small_plan(**changes: Any) -> Tables:
    """Returns the tables of a plan for one process on CPU, with `changes` as in `changed`.

    A Llama of two layers takes three steps in fp64 on the documents of `texts`. A tenth of them is held out, for plans
    that add `evaluation`.
    """
    return changed(_SMALL, **changes)


def loader_of(plugins: Mapping[str, Any]) -> Loader:
    """Returns a loader of `plugins`, by name, that finds nothing else that is installed but what `small_plan` names, and what
    saves a run.
    """
    return Loader({name: import_module(f"sley_{name}.plugin") for name in ("data", "models", "checkpoint")} | dict(plugins))


def changed(tables: Mapping[str, Any], **changes: Any) -> Tables:
    """Returns a deep copy of `tables` with `table__key=value` set, or a whole table by `table=value`.

    A table that is not there is made. None removes the key or the table.
    """
    made = deepcopy(dict(tables))
    for path, value in deepcopy(changes).items():
        table, _, key = path.partition("__")
        target, name = (made.setdefault(table, {}), key) if key else (made, table)
        if value is None:
            target.pop(name, None)
        else:
            target[name] = value
    return made


def write_texts(folder: Path) -> None:
    """Writes `text/a.txt` and `text/b.txt`, 60 documents each, separated by an empty line.

    They are 3 to 124 bytes long: some shorter than the small plan's sequence of 24, some over several sequences or slices.
    """
    (folder / "text").mkdir()
    for name in ("a", "b"):
        documents = [f"{name}{number} " + "the sley beats home " * (number % 7) for number in range(60)]
        (folder / "text" / f"{name}.txt").write_text("\n\n".join(documents), "utf-8")
