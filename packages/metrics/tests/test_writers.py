"""Reads the curves of TensorBoard and Weights & Biases back, and checks plans with these writers."""

import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from sley_core.api.plan import Plan
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_metrics import plugin
from sley_metrics.plugin import WandbConfig, sley_check_plan
from sley_metrics.writers import WandbWriter
from sley_testing.hook_contract import MetricsWriterContract, Point
from sley_testing.plans import small_plan


class Runs:
    """Stands in for the package `wandb`. Stores the options and the rows of each run."""

    def __init__(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.logged: list[tuple[int, int, dict[str, float]]] = []
        self.finished = 0
        self.Error = ValueError

    def init(self, **options: Any) -> SimpleNamespace:
        self.starts.append(options)
        number = len(self.starts)
        return SimpleNamespace(log=lambda row, step: self.logged.append((number, step, row)), finish=self._finish)

    def _finish(self) -> None:
        self.finished += 1


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs()
    monkeypatch.setitem(sys.modules, "wandb", found)  # type: ignore[arg-type]
    return found


def test_what_goes_on_is_another_run_of_the_group(tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "plan.toml").write_text("[run]\nsteps = 9\n")
    writer = WandbWriter(WandbConfig(project="p", tags=("a",)), tmp_path)
    writer.rewind(0)
    assert runs.starts == [], "a run without a step leaves none"
    for step in (1, 2):
        writer.write({"step": step, "loss": 6.0 - step})
    writer.rewind(1)
    writer.write({"step": 2, "loss": 3.5})
    writer.close()
    writer.close()
    assert runs.logged == [(1, 1, {"loss": 5.0}), (1, 2, {"loss": 4.0}), (2, 2, {"loss": 3.5})]
    assert runs.finished == 2
    assert {options["group"] for options in runs.starts} == {tmp_path.name}
    assert runs.starts[0]["config"] == {"run": {"steps": 9}}
    assert (runs.starts[0]["project"], runs.starts[0]["tags"], runs.starts[0]["mode"]) == ("p", ["a"], "online")


def test_a_run_that_cannot_begin_says_what_to_do(tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise ValueError("no API key")

    monkeypatch.setattr(runs, "init", refuse)
    with pytest.raises(RunError, match=r"metrics-wandb.*no API key(?s:.*)wandb login"):
        WandbWriter(WandbConfig(project="p"), tmp_path).write({"step": 1, "loss": 1.0})


@pytest.fixture
def no_service() -> Iterator[None]:
    """Ends the process that the package `wandb` starts."""
    yield
    import_module("wandb").teardown()


@pytest.mark.campaign
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("no_children", "no_service")
def test_offline_rows_are_in_the_files_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = WandbWriter(WandbConfig(project="p", mode="offline"), tmp_path)
    writer.write({"step": 1, "loss": 5.0, "trained_tokens": 90})
    writer.write({"step": 2, "loss/code": 4.0, "held_out/web text/loss": 0.5})
    writer.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while not all(name in file.read_bytes() for name in (b"trained_tokens", b"loss/code", b"held_out/web text/loss")):
        assert time.monotonic() < deadline
        time.sleep(0.1)  # a process of `wandb` writes the last rows later


# -- TensorBoard ---------------------------------------------------------------------------------------------------------


class TestTensorboard(MetricsWriterContract):
    """A thread of TensorBoard's writes its points, which also is where a full disk is an error."""

    writer: ClassVar[dict[str, Any]] = {"use": "metrics.tensorboard"}
    writes_at_once = False
    writes_files = False

    @pytest.fixture(autouse=True)
    def tensorboard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Files of one second are read in the order of their numbers in a process, as text, in which 10 is before 9: each test
        counts from 0, as each run does.
        """
        from tensorboard.summary.writer import event_file_writer  # type: ignore[import-untyped]

        monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    def read(self, folder: Path) -> Iterator[Point]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

        events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
        events.Reload()
        for name in events.Tags()["scalars"]:
            yield from ((event.step, name, event.value) for event in events.Scalars(name))


# -- plans -----------------------------------------------------------------------------------------------------------------

JSONL = {"use": "core.jsonl"}
TENSORBOARD = {"use": "metrics.tensorboard"}
WANDB = {"use": "metrics.wandb", "project": "p"}


def plan_with(*writers: dict[str, Any]) -> Plan:
    return plan_from_dict(small_plan(metrics=list(writers)))


@pytest.mark.parametrize("writer", [TENSORBOARD, WANDB])
def test_a_missing_package_is_named_with_the_command(writer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    (problem,) = sley_check_plan(plan_with(JSONL, writer))
    name = writer["use"].removeprefix("metrics.")
    assert (problem.code, problem.path) == (f"{name}-missing", ("metrics", 1, "use"))
    assert problem.hint is not None
    assert problem.hint.endswith(f'in a clone of Sley\'s repository, run `pip install -e "packages/metrics[{name}]"`')


@pytest.mark.parametrize("writer", [TENSORBOARD, WANDB])
def test_a_writer_that_is_listed_twice_is_refused(writer: dict[str, Any]) -> None:
    (problem,) = sley_check_plan(plan_with(writer, JSONL, writer))
    assert (problem.code, problem.path) == ("metrics-twice", ("metrics", 2))
