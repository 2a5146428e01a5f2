"""A plugin that is missing, unknown, broken or in the wrong place is told at its name in the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sley_core.discovery import installed

PLUGIN = 4

Refused = Callable[..., None]


def with_handlers(plan: Path, *names: str) -> Path:
    tables = "".join(f'[[gradient_handlers]]\nuse = "{name}"\n' for name in names)
    plan.write_text(plan.read_text("utf-8") + tables, "utf-8")
    return plan


def handlers(*records: str) -> str:
    """The source of a plugin with these gradient-handler records."""
    return f"""
        from sley_core.hookspecs import hookimpl
        from sley_core.table import Table
        from sley_core.records import GradientHandlerRecord, OptimizerRecord
        from sley_core.optim.config import AdamWConfig

        class Config(Table):
            "Nothing to choose."

        def record(name, role, **more):
            return GradientHandlerRecord(name=name, config=Config, build="nowhere:Nothing", role=role, **more)

        @hookimpl
        def sley_gradient_handlers():
            return [{", ".join(records)}]

        @hookimpl
        def sley_records():
            return [OptimizerRecord(name="whole", config=AdamWConfig, build="nowhere:Nothing", scope="per_matrix")]
    """


def test_plugin_of_ours_missing(plan: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: found for name, found in installed().items() if name != "dp"}
    monkeypatch.setattr("sley_core.plan.loader.installed", lambda: others)
    refused(with_handlers(plan, "dp.bucketed"), "plugin-missing", '"dp.bucketed"', exit_code=PLUGIN)


def test_plugin_unknown(plan: Path, refused: Refused) -> None:
    refused(with_handlers(plan, "nobody.knows"), "plugin-unknown", '"nobody.knows"', exit_code=PLUGIN)


def test_plugin_ambiguous(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd")
    install("sley-other", "odd")
    refused(with_handlers(plan, "odd.sum"), "plugin-ambiguous", '"odd.sum"', exit_code=PLUGIN)


def test_plugin_incompatible(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd", requires="sley-core>=99")
    refused(with_handlers(plan, "odd.sum"), "plugin-incompatible", '"odd.sum"', exit_code=PLUGIN)


def test_plugin_fails_to_import(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd", "raise RuntimeError('not today')")
    refused(with_handlers(plan, "odd.sum"), "plugin-import", '"odd.sum"', exit_code=PLUGIN)


def test_two_handlers_for_one_job(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd", handlers('record("sum", "reducer")'))
    refused(with_handlers(plan, "core.each", "odd.sum"), "handler-conflict", '"odd.sum"')


def test_handlers_in_an_impossible_order(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd", handlers('record("cut", "transform", after=("reducer",))'))
    refused(with_handlers(plan, "odd.cut", "core.each"), "handler-order", '"odd.cut"')


def test_optimizer_that_does_not_fit_the_layout(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd", handlers('record("shards", "reducer", result="shard")'))
    with_handlers(plan, "odd.shards")
    plan.write_text(plan.read_text("utf-8").replace("core.adamw", "odd.whole"), "utf-8")
    refused(plan, "optimizer-layout", '"odd.whole"')
