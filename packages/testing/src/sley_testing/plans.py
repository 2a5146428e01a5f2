"""Builds the tables of small plans for tests, and writes the text files that these plans read.

tables = small_plan(batch__micro_size=1)                      # `table__key` sets a key, `table` sets a table
reference = record(tables, 3, folder=texts)                   # `texts` is a fixture: a folder with the text files
layouts = ranks(2)(record, changed(tables, parallel={"dp": 2}), 3, folder=texts)
assert_parity(reference, layouts, "fp64")
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sley_core.data.dataset import DataInfo, Field
from sley_core.model.build import HostModel, build_on_meta
from sley_core.model.layers import Model
from sley_core.plan.loader import PluginLoader

Tables = dict[str, Any]

_SMALL_PLAN: Tables = {  # the tables of `small_plan` without changes
    "run": {"name": "small", "steps": 3, "device": "cpu", "seed": 7},
    "model": {"use": "models.llama", "num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24},
    "data": {"use": "data.text", "files": ["text/*.txt"], "sequence": 24, "separator": "\n\n", "held_out": 0.1},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 3e-3, "clip_norm": 0.5},
    "precision": {"compute": "fp64"},
}


def small_plan(**changes: Any) -> Tables:
    """Returns the tables of a one-process CPU plan. A two-layer Llama takes three fp64 steps on the documents of the `texts`
    fixture. One tenth of the documents is held out, for plans with `evaluation`. changes: such as `batch__micro_size=1`.
    """
    return changed(_SMALL_PLAN, **changes)


def loader_of(plugins: Mapping[str, Any]) -> PluginLoader:
    """Returns a loader with the plugins that `small_plan` and checkpoints need, and with `plugins`, by name."""
    return PluginLoader(
        {name: import_module(f"sley_{name}.plugin") for name in ("data", "models", "checkpoint")} | dict(plugins)
    )


def changed(tables: Mapping[str, Any], **changes: Any) -> Tables:
    """Returns a deep copy of `tables` with changes. `table__key=value` sets a key, and adds its table if it is missing.
    `table=value` sets a table. The value None removes a key or table.
    """
    result = deepcopy(dict(tables))
    for path, value in deepcopy(changes).items():
        table, _, key = path.partition("__")
        target, name = (result.setdefault(table, {}), key) if key else (result, table)
        if value is None:
            target.pop(name, None)
        else:
            target[name] = value
    return result


def write_texts(folder: Path) -> None:
    """Writes `text/a.txt` and `text/b.txt` with 60 documents each, separated by empty lines. Documents have 3 to 124 bytes, so
    some are shorter than the small plan's sequences of 24 tokens, and some span several sequences.
    """
    (folder / "text").mkdir()
    for name in ("a", "b"):
        documents = [f"{name}{number} " + "the sley beats home " * (number % 7) for number in range(60)]
        (folder / "text" / f"{name}.txt").write_text("\n\n".join(documents), "utf-8")


_TOKEN_FIELD = Field("int64", sequence_dim=1)  # a field with one int64 number per token
TOKENS = DataInfo(
    {"tokens": _TOKEN_FIELD, "labels": _TOKEN_FIELD, "positions": _TOKEN_FIELD, "cu_seqlens": Field("int32")},
    vocab_size=97,
    sequence=24,
)
"""The data info of packed sequences of 24 tokens from a vocabulary of 97 ids."""


def build_meta_model(function: Callable[[DataInfo], Any], info: DataInfo = TOKENS, seed: int = 0) -> Model:
    """Builds the model of the factory `function(info)` on the meta device, and returns it."""
    component: Any = SimpleNamespace(build=function, name="function")  # stands in for the component of a plan
    return build_on_meta(component, info, seed)


def build_model_with_values(
    function: Callable[[DataInfo], Any],
    dtype: torch.dtype = torch.float32,
    owned: set[str] | None = None,
    seed: int = 0,
    info: DataInfo = TOKENS,
) -> Model:
    """Builds the model of the factory `function(info)` on the CPU, and returns it. owned: the names of the layers that get
    initial values; the other layers stay on the meta device. None means all layers.
    """
    model = build_meta_model(function, info, seed)
    names = {layer.name for layer in model.layers} if owned is None else owned
    host = HostModel(model)
    host.drop_other_layers(host.load_values(names, dtype=dtype, device=torch.device("cpu")), names)
    return model
