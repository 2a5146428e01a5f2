"""Declares the records of the plugin `hf`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core.hookspecs import hookimpl
from sley_core.records import AdaptersRecord, ModelRecord, Problem, Record
from sley_hf.config import DecoderConfig, LoraConfig, check_positions, check_router_loss

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


@hookimpl
def sley_records() -> list[Record]:
    return [
        ModelRecord(
            name="decoder",
            config=DecoderConfig,
            build="sley_hf.decoder:layers",
            hugging_face="sley_hf.export:hugging_face",
            compare="sley_hf.compare:compare_with_transformers",
            uses_layer_names=True,
        ),
        AdaptersRecord(
            name="lora",
            config=LoraConfig,
            build="sley_hf.lora:adapters",
            merge="sley_hf.peft_export:MergedWeights",
            export="sley_hf.peft_export:export_adapter",
        ),
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[Problem]:
    if isinstance(plan.model.config, DecoderConfig):
        yield from check_router_loss(plan.model.config, plan.loss)
        yield from check_positions(plan.model.config, getattr(plan.data.config, "sequence", None))
