"""Runs the contracts of all records of an installed distribution: `train-cli plugins check DIST`.

Each plugin must load: it can be imported, its records are well-formed, and their `build` targets can be imported. Then each
record must pass the contract of its type with its default options. A record is skipped if its contract needs input from the
plugin's author, such as the files of a dataset.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest

from sley_core import records
from sley_core.errors import SleyError
from sley_core.plan.loader import PluginLoader
from sley_testing.plans import Tables

CONTRACTS: dict[type[records.Record], tuple[str, str, str]] = {
    records.GradientHandlerRecord: ("contract", "GradientHandlerContract", "handler"),
    records.SchedulerHookRecord: ("hook_contract", "SchedulerHookContract", "hook"),
    records.LRScheduleRecord: ("optimizer_contract", "LRScheduleContract", "learning_rate"),
    records.OffloadManagerRecord: ("state_contract", "OffloadManagerContract", "offload"),
    records.ScheduleRecord: ("pipeline_contract", "ScheduleContract", "pipeline"),
    records.StageLinkRecord: ("pipeline_contract", "StageLinkContract", "link"),
    records.WeightCommunicatorRecord: ("weight_contract", "WeightCommunicatorContract", "weights"),
    records.SequenceAttentionRecord: ("attention_contract", "SequenceAttentionContract", "sequence"),
    records.CheckpointerRecord: ("state_contract", "CheckpointerContract", "checkpoint"),
}
"""Maps a class of records to the module and the class of its contract, and the contract's attribute for a record's table."""


@dataclass(frozen=True)
class Verdict:
    """Holds the result for one record, or for a plugin that does not load. record: the name of the record, or "" if the plugin
    cannot be imported. reason: why the record failed or was skipped, in one or more lines, or which tests were not checked.
    """

    plugin: str
    record: str
    status: Literal["passed", "failed", "skipped"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.status:8} {self.plugin}{self.record and '.'}{self.record}{self.reason and ': '}{self.reason}"


def certify(distribution: str) -> Iterator[Verdict]:
    """Yields a verdict for each record of `distribution`. If a plugin does not load, yields only a failed verdict for each such
    plugin. Yields nothing if the distribution has no plugin.
    """
    loader = PluginLoader()
    loaded: list[tuple[str, records.Record]] = []
    failures = []
    for name in loader.names():
        if all(source.dist != distribution for source in loader.sources(name)):
            continue
        record_name = ""
        try:
            plugin = loader.load(name)
            for record_name, record in plugin.records.items():  # noqa: B007  # a failure needs the name
                plugin.load_builder(record)
                loaded.append((name, record))
        except SleyError as error:
            failures.append(Verdict(name, record_name, "failed", f"does not load: {error}"))
    yield from failures or (_check_record(name, record) for name, record in loaded)


def _check_record(plugin: str, record: records.Record) -> Verdict:
    """Returns the verdict on a record. Runs the record's contract with default options, unless the record must be skipped."""
    if reason := _skip_reason(record):
        return Verdict(plugin, record.name, "skipped", reason)
    report = _run_contract(type(record), {"use": f"{plugin}.{record.name}"})
    reason = "\n".join(report.failures or report.unchecked_tests)
    return Verdict(plugin, record.name, "failed" if report.failures else "passed", reason)


def _skip_reason(record: records.Record) -> str:
    """Returns why the record cannot be checked without input from the plugin's author, or "" if it can."""
    if type(record) not in CONTRACTS:
        return "its contract needs inputs from the plugin's author: subclass it in a test (docs/testing-plugins.md)"
    if isinstance(record, records.GradientHandlerRecord) and record.role == "tie":
        return "a tie handler needs a schedule: subclass `pipeline_contract.TieContract` in a test"
    required_keys = [key for key, info in record.config.model_fields.items() if info.is_required()]
    if required_keys:
        return f"its table needs {', '.join(f'`{key}`' for key in required_keys)}: subclass its contract in a test"
    return ""


def _run_contract(record_type: type[records.Record], table: Tables) -> "_ReportCollector":
    """Runs the contract for `record_type` with pytest in this process, and returns its report. table: the record's table."""
    module, contract, attribute = CONTRACTS[record_type]
    text = f"from sley_testing.{module} import {contract}\n\n\nclass TestIt({contract}):\n    {attribute} = {table!r}\n"
    collector = _ReportCollector()
    with TemporaryDirectory() as folder:
        name = f"test_{module}_{table['use'].replace('.', '_')}"  # unique, since pytest caches modules by name
        file = Path(folder, f"{name}.py")
        file.write_text(text, "utf-8")
        options = ("-q", "--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", folder)
        with contextlib.redirect_stdout(io.StringIO()):
            code = pytest.main([*options, str(file)], plugins=[collector])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        collector.failures.append(f"pytest ended with exit code {int(code)}")
    return collector


class _ReportCollector:
    """Collects failure messages as a pytest plugin. unchecked_tests: messages of tests that need input from the author."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.unchecked_tests: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            name = report.nodeid.rpartition("::")[2]
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else str(report.longrepr)
            first_line, _, _ = message.strip().partition("\n")
            line = f"{name}: {first_line}"
            if message.startswith("NotImplementedError"):  # raised by a contract that needs a method of its subclass
                self.unchecked_tests.append(f"not checked, {line}")
            else:
                self.failures.append(line)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(str(report.longrepr))


def main(distribution: str) -> int:
    """Prints the verdicts on a distribution. Returns the exit code: 1 if there are no verdicts or one is "failed", else 0."""
    statuses = []
    for verdict in certify(distribution):
        statuses.append(verdict.status)
        print(verdict, flush=True)
    return int(not statuses or "failed" in statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
