"""`checkpoint.any_layout` holds the contract of checkpointers."""

from __future__ import annotations

from typing import Any, ClassVar

from sley_testing.checkpointer_contract import CheckpointerContract


class TestAnyLayout(CheckpointerContract):
    checkpoint: ClassVar[dict[str, Any]] = {"use": "checkpoint.any_layout"}
