"""Checks that a model's embedding tables can be cut by columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from sley_core.errors import PlanError
from sley_isp.sites import is_plain

if TYPE_CHECKING:
    from sley_core.api.model import Layer


def check_tables(layers: Sequence[Layer]) -> None:
    """Raises PlanError "embedding-hidden" unless there is a plain embedding and only such modules hold these tables.

    A head that is tied to a table needs full rows of it.
    """
    tables: dict[int, str] = {}
    others: dict[int, str] = {}
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            for attribute, parameter in module._parameters.items():
                is_table = type(module) is nn.Embedding and is_plain(module, attribute)
                (tables if is_table else others).setdefault(id(parameter), name)
    if not tables:
        raise _refused(
            "no layer has a plain nn.Embedding, whose table could be cut along its hidden dim", "leave it out"
        )
    for table, name in tables.items():
        if table in others:
            message = f"`{others[table]}` holds the table of `{name}` too, and needs whole rows of it"
            raise _refused(message, "give it a weight of its own (`models.llama`: `tie_embeddings = false`)")


def _refused(message: str, hint: str) -> PlanError:
    """Returns the PlanError "embedding-hidden"."""
    return PlanError(
        "embedding-hidden", message, path=("weights", "embedding"), hint=f'{hint}; or `embedding = "gather"`'
    )
