"""Runs the contracts of all records of an installed distribution: `train-cli plugins check DIST`.

loads      each plugin is imported, its records are well-formed, and what they build can be imported
contract   every record passes the contract of its kind, with the options of its first variant, else its defaults
verified   a plan that uses the record has the numbers of one process, on the two ranks of the layout that the record is for

A kind whose contract needs to know more than the record says (a dataset's files, a loss's batch, what a writer wrote) is
skipped: its author inherits that contract in a test (docs/testing-plugins.md).
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import pytest

from sley_core.errors import SleyError
from sley_core.plan.loader import Loader, Plugin
from sley_core.records import GradientHandlerRecord, Record
from sley_core.table import RecordKind
from sley_testing.plans import Tables, changed, small_plan, write_texts
from sley_testing.ranks import Ranks
from sley_testing.runs import assert_parity_of_parts, record, record_reference

Level = Literal["loads", "contract", "verified"]
Status = Literal["passed", "failed", "skipped"]
LEVELS: tuple[Level, ...] = get_args(Level)

CONTRACTS: dict[RecordKind, tuple[str, str, str]] = {
    "gradient_handlers": ("contract", "GradientHandlerContract", "handler"),
    "scheduler_hooks": ("hook_contract", "SchedulerHookContract", "hook"),
    "lr_schedules": ("optimizer_contract", "LRScheduleContract", "learning_rate"),
    "memory_pools": ("pool_contract", "MemoryPoolContract", "pool"),
    "offload_managers": ("offload_contract", "OffloadManagerContract", "offload"),
    "schedules": ("schedule_contract", "ScheduleContract", "pipeline"),
    "stage_links": ("link_contract", "StageLinkContract", "link"),
    "weight_communicators": ("weight_contract", "WeightCommunicatorContract", "weights"),
    "sequence_attentions": ("attention_contract", "SequenceAttentionContract", "sequence"),
    "checkpointers": ("checkpointer_contract", "CheckpointerContract", "checkpoint"),
}
"""By kind of record: the module of the contract, its class, and the attribute that takes the record's table."""

LAYOUTS: dict[RecordKind, Tables] = {
    "gradient_handlers": {"parallel": {"dp": 2}},
    "schedules": {"parallel": {"dp": 1, "pp": 2}},
    "weight_communicators": {"parallel": {"dp": 2, "wp": 2}},
    "sequence_attentions": {"parallel": {"dp": 1, "sp": 2}},
}
"""By kind of record: the layout of two ranks that it is for. Other kinds have none; one rank runs them."""

EACH = {"use": "core.each"}
STEPS = 3
RANKS_S = 120.0  # the time limit of a run on ranks


@dataclass(frozen=True)
class Verdict:
    """Holds the result of one record, or of a plugin that does not load (with `record` ""). why: the reason of a failure or a
    skip, in one or more lines.
    """

    level: Level
    plugin: str
    record: str
    status: Status
    why: str = ""


def certify(distribution: str, level: Level = "verified") -> Iterator[Verdict]:
    """Yields the verdicts on the plugins of `distribution`, level by level up to `level`; stops after a level that failed.

    Takes seconds for each record of "contract" and "verified"; starts processes. Yields nothing if the distribution has no
    plugin.
    """
    loader = Loader()
    names = [name for name in loader.names() if any(each.dist == distribution for each in loader.sources(name))]
    failed = False
    for current in LEVELS[: LEVELS.index(level) + 1]:
        for name in names:
            for verdict in _CHECKS[current](name, loader):
                failed |= verdict.status == "failed"
                yield verdict
        if failed:
            return


def _loads(name: str, loader: Loader) -> Iterator[Verdict]:
    try:
        plugin = loader.load(name)
    except SleyError as error:
        yield Verdict("loads", name, "", "failed", str(error))
        return
    for _, each in _records(plugin):
        try:
            plugin.load_builder(each)
        except SleyError as error:
            yield Verdict("loads", name, each.name, "failed", str(error))
        else:
            yield Verdict("loads", name, each.name, "passed")


def _contract(name: str, loader: Loader) -> Iterator[Verdict]:
    for kind, each in _records(loader.load(name)):
        if why := _unknown(kind, each):
            yield Verdict("contract", name, each.name, "skipped", why)
            continue
        report = _run_contract(kind, {"use": f"{name}.{each.name}"})
        status: Status = "failed" if report.failures else "passed"
        yield Verdict("contract", name, each.name, status, "\n".join(report.failures or report.left_open))


def _verified(name: str, loader: Loader) -> Iterator[Verdict]:
    for kind, each in _records(loader.load(name)):
        why = _unknown(kind, each)
        if not why and kind not in LAYOUTS:
            why = "it is for one rank, so there is no layout to compare"
        if not why and isinstance(each, GradientHandlerRecord) and each.role == "reducer" and not each.exact:
            why = "its record says that its sums are not exact"
        if why:
            yield Verdict("verified", name, each.name, "skipped", why)
            continue
        try:
            _compare(kind, each, {"use": f"{name}.{each.name}"})
        except (AssertionError, SleyError) as error:
            yield Verdict("verified", name, each.name, "failed", str(error))
        else:
            yield Verdict("verified", name, each.name, "passed")


_CHECKS = {"loads": _loads, "contract": _contract, "verified": _verified}


def _records(plugin: Plugin) -> Iterator[tuple[RecordKind, Record]]:
    for kind, named in plugin.records.items():
        for each in named.values():
            yield kind, each


def _unknown(kind: RecordKind, each: Record) -> str:
    """Returns why the record cannot be checked without its author; "" if it can."""
    if kind not in CONTRACTS:
        return "its contract needs an author's own inputs: inherit it in a test (docs/testing-plugins.md)"
    if isinstance(each, GradientHandlerRecord) and each.role == "tie":
        return "a handler of ties needs a schedule: inherit `schedule_contract.TieContract` in a test"
    needed = [key for key, info in each.config.model_fields.items() if info.is_required()]
    if needed:
        return f"its table needs {', '.join(f'`{key}`' for key in needed)}: inherit its contract in a test"
    return ""


def _run_contract(kind: RecordKind, table: Tables) -> _Report:
    """Runs the contract of `kind` on the record of `table` by pytest; returns what failed."""
    module, contract, attribute = CONTRACTS[kind]
    text = f"from sley_testing.{module} import {contract}\n\n\nclass TestIt({contract}):\n    {attribute} = {table!r}\n"
    report = _Report()
    with TemporaryDirectory() as folder:
        name = f"test_{kind}_{table['use'].replace('.', '_')}"  # pytest keeps modules by name
        file = Path(folder, f"{name}.py")
        file.write_text(text, "utf-8")
        options = ("-q", "--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", folder)
        with contextlib.redirect_stdout(io.StringIO()):
            code = pytest.main([*options, str(file)], plugins=[report])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        report.failures.append(f"pytest ended with exit code {int(code)}")
    return report


class _Report:
    """Collects failure messages as a pytest plugin. left_open: tests that need input from the record's author."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.left_open: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            name = report.nodeid.rpartition("::")[2]
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else str(report.longrepr)
            line = f"{name}: {message.strip().splitlines()[0] if message.strip() else 'it failed'}"
            if message.startswith("NotImplementedError"):  # how a contract says that its subclass must answer
                self.left_open.append(f"not checked, {line}")
            else:
                self.failures.append(line)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(str(report.longrepr))


def _compare(kind: RecordKind, each: Record, table: Tables) -> None:
    """Asserts that the small plan with the record on two ranks matches one process. Raises AssertionError or SleyError."""
    layout = {**LAYOUTS[kind], kind if kind == "gradient_handlers" else CONTRACTS[kind][2]: table}
    if isinstance(each, GradientHandlerRecord):
        handlers = {"reducer": [table], "before": [table, EACH], "after": [EACH, table]}
        where = each.role if each.role == "reducer" else "before" if "reducer" in each.before else "after"
        layout["gradient_handlers"] = handlers[where]
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder)
        plan = small_plan()
        reference = record_reference(plan, STEPS, folder=folder)
        found = Ranks(2, RANKS_S)(record, changed(plan, **layout), STEPS, folder=folder)
    assert_parity_of_parts(reference, found, plan["precision"]["compute"])


def main(distribution: str) -> int:
    """Prints the verdicts on a distribution's contracts. Returns 0 if at least one record passed and none failed, else 1."""
    verdicts = []
    for verdict in certify(distribution, "contract"):
        verdicts.append(verdict)
        print(f"{verdict.level:9} {verdict.status:8} {verdict.plugin}.{verdict.record} {verdict.why}", flush=True)
    return int(not verdicts or any(verdict.status == "failed" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
