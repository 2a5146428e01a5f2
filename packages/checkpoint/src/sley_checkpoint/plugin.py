"""Declares the records of the plugin `checkpoint`."""

from __future__ import annotations

from sley_checkpoint.config import AnyLayoutConfig
from sley_core.hookspecs import hookimpl
from sley_core.records import CheckpointerRecord


@hookimpl
def sley_records() -> list[CheckpointerRecord]:
    build, files = "sley_checkpoint.checkpoints:AnyLayout", "sley_checkpoint.reader:CheckpointFileReader"
    return [CheckpointerRecord(name="any_layout", config=AnyLayoutConfig, build=build, files=files, keeps_best=True)]
