"""Declares the records of the plugin `data`."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import DatasetRecord
from sley_data.config import ChatConfig, MixtureConfig, TextConfig, TokensConfig


@hookimpl
def sley_records() -> list[DatasetRecord]:
    check = "sley_data.check:check"
    return [
        DatasetRecord(
            name="text",
            config=TextConfig,
            build="sley_data.datasets:TokenDataset",
            check=check,
            text_ids="sley_data.tokenizer:text_ids",
            describe_overlap="sley_data.documents:describe_overlap",
            rows="sley_data.packing:TokenRows",
        ),
        DatasetRecord(
            name="chat",
            config=ChatConfig,
            build="sley_data.datasets:ChatDataset",
            check="sley_data.check:check_chat",
            text_ids="sley_data.chat_template:text_ids",
            describe_overlap="sley_data.conversations:describe_overlap",
            rows="sley_data.chat:ChatRows",
        ),
        DatasetRecord(
            name="tokens",
            config=TokensConfig,
            build="sley_data.datasets:TokenDataset",
            check=check,
            rows="sley_data.packing:TokenRows",
        ),
        DatasetRecord(
            name="mixture",
            config=MixtureConfig,
            build="sley_data.mixture:Mixture",
            check="sley_data.sources:check_mixture",
            text_ids="sley_data.sources:text_ids",
            describe_overlap="sley_data.sources:describe_overlap",
        ),
    ]
