"""A small valid plan, and a plugin of records that core does not have."""

from collections.abc import Callable
from typing import Any

import pytest
import tomli

from sley_core import records
from sley_core.actions.action import Schedule
from sley_core.hookspecs import hookimpl
from sley_core.plan.load import plan_from_dict
from sley_core.plan.loader import PluginLoader
from sley_core.plan.plan import Plan
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


def empty(_: Table) -> Schedule:
    return Schedule(lambda *_: [])


class Handlers:
    """A plugin of gradient handlers of every role."""

    @hookimpl
    def sley_gradient_handlers(self) -> list[records.GradientHandlerRecord]:
        def record(name: str, **more: Any) -> records.GradientHandlerRecord:
            return records.GradientHandlerRecord(name=name, config=Table, build="nowhere:Nothing", **more)

        return [
            record("buckets", role="reducer"),
            record("shards", role="reducer", result="shard"),
            record("noise", role="transform", after=("reducer",)),
            record("squeeze", role="transform", before=("reducer",)),
            record("ties", role="tie"),
            record("more_ties", role="tie"),
        ]


class Timed(Table):
    layer_costs: None = None


class Policies:
    """A plugin of an activation policy, a writer, and parts that do not fit; its check fails for microbatches of four."""

    @hookimpl
    def sley_records(self) -> list[records.Record]:
        return [
            records.ActivationPolicyRecord(name="lean", config=Table, build="nowhere:Lean"),
            records.MetricsWriterRecord(name="csv", config=Table, build="collections:OrderedDict"),
            records.WeightCommunicatorRecord(name="gathered", config=Table, build="nowhere:Gathered", fixed_order=False),
            records.ScheduleRecord(
                name="empty", config=Table, build=f"{__name__}:empty", link="policies.link", partition="policies.timed"
            ),
            records.StageLinkRecord(name="link", config=Table, build="nowhere:Link"),
            records.PartitionerRecord(name="timed", config=Timed, build="nowhere:Timed", timer="nowhere.times:measure"),
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
