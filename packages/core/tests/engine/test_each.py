"""Core's own handlers hold the contract that every gradient handler holds."""

from __future__ import annotations

from typing import ClassVar

from sley_testing.contract import GradientHandlerContract


class TestEach(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "core.each"}


class TestGradientNorms(GradientHandlerContract):
    """An observer that adds numbers to the row."""

    handler: ClassVar[dict] = {"use": "core.gradient_norms"}
