from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sley_core.table import Table
from sley_data.config import TextConfig, TokensConfig


def refused(model: type[Table], message: str, **table: Any) -> None:
    with pytest.raises(ValidationError, match=message):
        model.model_validate(table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "one of `source` and `files` is needed"),
        ({"files": []}, "one of `source` and `files` is needed"),
        ({"files": ["a"], "source": "python-stdlib"}, "`source` and `files` exclude"),
        ({"files": ["a"], "end_of_document": "<end>"}, "bytes have none"),
        ({"files": ["a"], "held_out": 0.1, "held_out_files": ["b"]}, "`held_out` and `held_out_files` exclude"),
        ({"files": ["a"], "held_out": 1.0}, "less than 1"),
        ({"files": ["a"], "separator": ""}, "at least 1 character"),
        ({"files": "a"}, "tuple"),
        ({"files": ["a"], "sequence": 0}, "greater than or equal to 1"),
        ({"files": ["a"], "sequence": True}, "integer"),
        ({"source": "wikipedia"}, "python-stdlib"),
    ],
)
def test_text_tables_that_mean_nothing_are_refused(table: dict[str, Any], message: str) -> None:
    refused(TextConfig, message, **{"sequence": 4, **table})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"files": []}, "names no file"),
        ({"documents": "pack"}, "needs the `end_of_document` token id"),
        ({"documents": "pad"}, "needs the `end_of_document` token id"),
        ({"end_of_document": 100}, "not below `vocab_size`"),
        ({"vocab_size": 65537}, "uint16 cannot hold"),
        ({"dtype": "uint8"}, "uint16"),
    ],
)
def test_token_tables_that_mean_nothing_are_refused(table: dict[str, Any], message: str) -> None:
    refused(TokensConfig, message, **{"files": ["a"], "vocab_size": 100, "sequence": 4, **table})


def test_held_out_files_leave_no_share_to_hold_out() -> None:
    assert TextConfig(source="python-stdlib", sequence=1).held_out == 0.02
    files = TextConfig(source="python-stdlib", sequence=1, held_out_files=(Path("b"),))
    assert files.held_out == 0
    assert TextConfig.model_validate(files.model_dump()) == files
