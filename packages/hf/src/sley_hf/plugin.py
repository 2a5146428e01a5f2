"""Declares the records of the plugin `hf`."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import ModelRecord, Record
from sley_hf.config import DecoderConfig


@hookimpl
def sley_records() -> list[Record]:
    return [
        ModelRecord(
            name="decoder",
            config=DecoderConfig,
            build="sley_hf.decoder:layers",
            compare="sley_hf.compare:compare_with_transformers",
            uses_layer_names=True,
        )
    ]
