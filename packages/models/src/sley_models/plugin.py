"""Declares the records of the plugin `models`."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import ModelRecord
from sley_models.config import LlamaConfig


@hookimpl
def sley_records() -> list[ModelRecord]:
    return [
        ModelRecord(
            name="llama",
            config=LlamaConfig,
            build="sley_models.llama:build_llama",
            hugging_face="sley_models.hf:hugging_face",
            uses_layer_names=True,
        )
    ]
