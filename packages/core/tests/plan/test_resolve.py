"""A valid plan resolves: defaults are filled in, plugins and named tables are found, and factories build their parts."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sley_core.errors import PlanError, SleyError
from sley_core.hookspecs import hookimpl
from sley_core.plan.load import load_plan, plan_from_dict, plan_from_text, replace_values
from sley_core.plan.plan import Plan
from sley_core.records import GradientHandlerRecord, PartitionerRecord, Record, ScheduleRecord, StageLinkRecord
from sley_core.table import Table
from sley_testing.plans import loader_of

Make = Callable[..., Plan]


def test_defaults_are_filled_in(make: Make) -> None:
    plan = make(loss={"label_smoothing": 0.1})
    assert (plan.run.seed, plan.run.device, plan.precision.gradients, plan.evaluation) == (0, "auto", "fp32", None)
    single = (plan.model, plan.data, plan.loss, plan.optimizer, plan.learning_rate, plan.activations)
    assert [one.name for one in (*single, *plan.gradient_handlers, *plan.scheduler_hooks, *plan.metrics)] == [
        *("models.llama", "data.text", "core.cross_entropy", "core.adamw", "core.constant", "core.keep"),
        *("core.each", "core.jsonl"),
    ]
    assert list(plan.plugins) == ["core", "models", "data"]
    assert make(precision={"compute": "fp64"}).precision.gradients == "fp64"


@pytest.mark.parametrize(
    ("parallel", "handlers"),
    [({"dp": 2}, ["core.each"]), ({"dp": 1}, []), ({}, ["core.each"]), ({"dp": 1, "sp": 2}, ["core.each"])],
)
def test_a_reducer_is_the_default_where_ranks_may_share_weights(make: Make, parallel: Any, handlers: list[str]) -> None:
    assert [one.name for one in make(parallel=parallel).gradient_handlers] == handlers
    assert make(parallel=parallel, gradient_handlers=[]).gradient_handlers == ()


def test_a_value_has_the_place_where_it_was_written(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    plan = load_plan(path, ["optimizer.eps=1e-6", "run.seed=1", "run.seed=2"])
    assert (plan.run.seed, plan.folder) == (2, tmp_path)
    assert plan.origin(("run", "steps")) == f"{path}:5:1"
    assert plan.origin(("optimizer", "eps")) == "--set #1"
    assert plan.origin(("run", "seed")) == "--set #3"
    assert plan.origin(("optimizer", "weight_decay")) == plan.origin(("loss", "use")) == "default"


def test_a_program_needs_no_text(tables: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert plan_from_dict(tables) == plan_from_text(text)
    with pytest.raises(PlanError) as caught:
        plan_from_dict({**tables, "batch": {"global_size": 1.5, "micro_size": None}})
    assert [found.code for found in caught.value.diagnostics] == ["wrong-type", "missing-key"]
    plan = plan_from_dict({**tables, "data": {"use": "data.text", "files": [Path("a.txt")], "sequence": 8}}, tmp_path)
    assert plan.data.config.files == (tmp_path / "a.txt",)


def test_values_that_a_run_has_found(text: str, tmp_path: Path) -> None:
    plan = plan_from_text(text.replace("plan = 1", 'plan = 1\nsource_folder = "sub"'), folder=tmp_path)
    changed = replace_values(plan, {("data", "samples_per_epoch"): 100, ("evaluation", "every"): 5})
    assert (changed.data.config.samples_per_epoch, changed.evaluation and changed.evaluation.every) == (100, 5)
    assert changed.folder == plan.folder == tmp_path / "sub"
    assert plan.data.config.samples_per_epoch is None
    assert changed.digest != plan.digest
    with pytest.raises(PlanError, match="out-of-range"):
        replace_values(plan, {("data", "samples_per_epoch"): 0})


@pytest.mark.parametrize(
    ("parallel", "available", "world"),
    [
        ({"dp": 4}, None, 4),
        ({"dp": 4}, 8, 4),
        ({"dp": 2, "pp": 2, "sp": 3}, 1, 12),
        ({}, None, 1),
        ({}, 6, 6),
        ({"pp": 2, "sp": 2, "wp": 4}, None, 8),
        ({"wp": 3, "sp": 2}, None, 6),
    ],
)
def test_the_world_of_a_plan(make: Make, parallel: Any, available: int | None, world: int) -> None:
    plan = make(parallel=parallel)
    assert plan.world_size(available) == world
    if available is None:
        assert plan.topology(world).world_size == world


CODE = """\
import sys

def loss(scale=1): return ("loss", scale)
def data(context, size): return (context, size)
def fails(): raise KeyError("inside")
def ends(): sys.exit(3)
def lacks(): import nowhere_at_all

class Outer:
    @staticmethod
    def inner(): return 7

number = 3
"""


@pytest.fixture
def build(tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Builds a part of a plan by a factory of the module `my_own_parts`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_own_parts", raising=False)
    (tmp_path / "my_own_parts.py").write_text(CODE)
    (tmp_path / "my_broken_parts.py").write_text("raise SystemExit(2)")

    def build(factory: str, key: str = "loss", *args: Any, **options: Any) -> Any:
        table = {"factory": factory, "options": options}
        return getattr(plan_from_dict({**tables, key: table}, tmp_path), key).build(*args)

    return build


def test_a_factory_gets_its_options_and_what_its_signature_names(build: Callable[..., Any]) -> None:
    assert build("my_own_parts:loss") == ("loss", 1)
    assert build("my_own_parts:loss", scale=3) == ("loss", 3)
    assert build("my_own_parts:Outer.inner") == 7
    assert build("my_own_parts:data", "data", "context", size=4) == ("context", 4)


@pytest.mark.parametrize(
    ("factory", "options", "code"),
    [
        ("my_own_parts:los", {}, "factory-import"),
        ("my_own_part:loss", {}, "factory-import"),
        ("my_broken_parts:loss", {}, "factory-import"),
        ("my_own_parts:number", {}, "factory-import"),
        ("my_own_parts:loss", {"skale": 1}, "unexpected keyword argument 'skale'"),
        ("my_own_parts:fails", {}, r"my_own_parts.py:5"),
        ("my_own_parts:ends", {}, "SystemExit: 3"),
        ("my_own_parts:lacks", {}, "install the package that provides `nowhere_at_all`"),
    ],
)
def test_a_factory_that_fails_is_the_users(build: Callable[..., Any], factory: str, options: Any, code: str) -> None:
    with pytest.raises(PlanError, match=code):
        build(factory, **options)


def test_a_failing_factory_is_placed_at_its_key(text: str) -> None:
    plan = plan_from_text(text + "[loss]\nfactory = 'no_such_module_here:loss'\n")
    with pytest.raises(PlanError) as caught:
        plan.loss.build()
    assert str(caught.value).startswith("plan.toml:29:11: error[factory-import]: ")


def plugin(links: int = 0, partitions: int = 0, **schedule: str | None) -> Any:
    """A plugin with a schedule `s`, stage links `l0`, `l1`, ..., partitioners `p0`, ... and a handler of ties `t`."""

    @hookimpl
    def sley_records() -> list[Record]:
        return [
            ScheduleRecord(name="s", config=Table, build="nowhere:s", **schedule),
            *(StageLinkRecord(name=f"l{at}", config=Table, build="nowhere:l") for at in range(links)),
            *(PartitionerRecord(name=f"p{at}", config=Table, build="nowhere:p") for at in range(partitions)),
        ]

    @hookimpl
    def sley_gradient_handlers() -> list[GradientHandlerRecord]:
        return [GradientHandlerRecord(name="t", config=Table, build="nowhere:t", role="tie")]

    return SimpleNamespace(sley_records=sley_records, sley_gradient_handlers=sley_gradient_handlers)


def resolve_stages(text: str, tables: str = "", **plugins: Any) -> list[str | None]:
    """Returns the names of link, partitioner and handlers of the small plan in two stages."""
    tables = f'dp = 2\npp = 2\n\n[pipeline]\nuse = "mine.s"\n{tables}'
    plan = plan_from_text(text.replace("dp = 2\n", tables), loader=loader_of(plugins))
    assert plan_from_text(plan.to_toml(), loader=plan.loader) == plan
    parts = (plan.link, plan.partition, *plan.gradient_handlers)
    return [None if part is None else part.name for part in parts]


def test_a_pipeline_takes_the_parts_that_its_schedule_names(text: str) -> None:
    mine = plugin(2, 2, link="mine.l1", partition="other.p0", ties="mine.t")
    assert resolve_stages(text, mine=mine, other=plugin(1, 1)) == ["mine.l1", "other.p0", "core.each", "mine.t"]
    tables = '[link]\nuse = "mine.l0"\n[partition]\nuse = "mine.p0"\n'
    assert resolve_stages(text, tables, mine=mine)[:2] == ["mine.l0", "mine.p0"]


@pytest.mark.parametrize(
    ("plugins", "codes"),
    [
        ({"mine": plugin(2, 1)}, ["plugin-missing"]),
        ({"mine": plugin(1, 1, link="mine.l0", partition="mine.it")}, ["unknown-record"]),
        ({"mine": plugin(1, 1, link="mine.l0", partition="mine.p0", ties="it")}, ["wrong-value"]),
        ({"mine": SimpleNamespace()}, ["unknown-record"]),
    ],
)
def test_a_part_that_nobody_has(text: str, plugins: Any, codes: list[str]) -> None:
    with pytest.raises(SleyError) as caught:
        resolve_stages(text, **plugins)
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == codes
