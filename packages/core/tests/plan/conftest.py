"""A small valid plan, and a plugin of records that core does not have."""

from collections.abc import Callable
from typing import Any

import pytest
import tomli

from sley_core.hookspecs import hookimpl
from sley_core.plan.load import plan_from_dict
from sley_core.plan.loader import PluginLoader
from sley_core.plan.plan import Plan
from sley_core.records import ActivationPolicyRecord, GradientHandlerRecord, MetricsWriterRecord, Record
from sley_core.table import Table
from sley_testing.plans import loader_of

TEXT = """\
plan = 1

[run]
name = "small"
steps = 20

[model]
use = "models.llama"
num_layers = 2
hidden = 16
heads = 2

[data]
use = "data.text"
source = "python-stdlib"
sequence = 8

[batch]
global_size = 8
micro_size = 2

[optimizer]
use = "core.adamw"
lr = 3e-3

[parallel]
dp = 2
"""


class Handlers:
    """A plugin of gradient handlers of every role."""

    @hookimpl
    def sley_gradient_handlers(self) -> list[GradientHandlerRecord]:
        def record(name: str, **more: Any) -> GradientHandlerRecord:
            return GradientHandlerRecord(name=name, config=Table, build="nowhere:Nothing", **more)

        return [
            record("buckets", role="reducer"),
            record("shards", role="reducer", result="shard"),
            record("noise", role="transform", after=("reducer",)),
            record("squeeze", role="transform", before=("reducer",)),
            record("ties", role="tie"),
            record("more_ties", role="tie"),
        ]


class Policies:
    """A plugin of an activation policy and a writer, whose check fails for microbatches of four."""

    @hookimpl
    def sley_records(self) -> list[Record]:
        return [
            ActivationPolicyRecord(name="lean", config=Table, build="nowhere:Lean"),
            MetricsWriterRecord(name="csv", config=Table, build="collections:OrderedDict"),
        ]

    @hookimpl
    def sley_check_plan(self, plan: Plan) -> Any:
        if plan.batch.micro_size == 4:
            raise ValueError("four is unlucky")
        return []


@pytest.fixture
def loader() -> PluginLoader:
    return loader_of({"handlers": Handlers(), "policies": Policies()})


@pytest.fixture
def tables() -> dict[str, Any]:
    """The tables of a small valid plan, to change at will."""
    return tomli.loads(TEXT)


@pytest.fixture
def text() -> str:
    """The same plan as text."""
    return TEXT


@pytest.fixture
def make(loader: PluginLoader, tables: dict[str, Any]) -> Callable[..., Plan]:
    """The small plan with some tables replaced or, by None, left out."""
    return lambda **changed: plan_from_dict({**tables, **changed}, loader=loader)
