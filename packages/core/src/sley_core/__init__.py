"""The core of Sley. This module imports no torch: it imports each name below when the name is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sley_core.hookspecs import hookimpl as hookimpl
    from sley_core.plan.load import load_plan as load_plan
    from sley_core.plan.plan import Plan as Plan

_HOME = {"Plan": "sley_core.plan.plan", "hookimpl": "sley_core.hookspecs", "load_plan": "sley_core.plan.load"}
"""The module of each public name."""

__all__ = ["Plan", "hookimpl", "load_plan"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("sley-core")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'sley_core' has no attribute {name!r}")
