"""Declares the records of the plugin `optim`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sley_core.hookspecs import hookimpl
from sley_core.records import AveragingRecord, OptimizerRecord, Problem, Record
from sley_optim.config import EMAConfig, MeanConfig, MuonConfig

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


@hookimpl
def sley_records() -> list[Record]:
    return [
        AveragingRecord(name="ema", config=EMAConfig, build="sley_optim.averaging:ema"),
        AveragingRecord(name="mean", config=MeanConfig, build="sley_optim.averaging:mean"),
        OptimizerRecord(
            name="muon", config=MuonConfig, build="sley_optim.muon:build", scope="per_matrix", roles="sley_optim.muon:roles"
        ),
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for a mean over steps that the run does not have."""
    config = None if plan.averaging is None else plan.averaging.config
    if isinstance(config, MeanConfig) and not 0 <= config.start(plan.run.steps) < plan.run.steps:
        key = "last" if config.last is not None else "from_step"
        message = f"`{key} = {getattr(config, key)}` needs more steps than `run.steps = {plan.run.steps}`"
        yield Problem(("averaging", key), message, f"use {key} = {plan.run.steps} or less", "averaging-steps")
