"""`core.each` holds the contract that every gradient handler holds."""

from __future__ import annotations

from typing import ClassVar

from sley_core.testing.contract import GradientHandlerContract


class TestEach(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "core.each"}
