"""Declares the records of the plugin `models`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core.hookspecs import hookimpl
from sley_core.records import ModelRecord, Problem
from sley_models.config import LlamaConfig
from sley_models.hf import check_model

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


@hookimpl
def sley_records() -> list[ModelRecord]:
    return [
        ModelRecord(
            name="llama",
            config=LlamaConfig,
            build="sley_models.llama:build_llama",
            hugging_face="sley_models.export:hugging_face",
            uses_layer_names=True,
        )
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[Problem]:
    return check_model(plan)
