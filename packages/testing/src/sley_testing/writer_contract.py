"""Tests what every metrics writer must pass; the tests of a plugin inherit them.

    class TestCsv(MetricsWriterContract):
        writer = {"use": "csv.writer"}

        def read(self, folder):
            return [(step, name, value), ...]

The tests run in this process: rows of a run, rows of two runs into one folder, rows that are taken again after a checkpoint, a
full disk, and a process that is killed.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import MetricsWriter, Rewinds
from sley_testing.plans import small_plan

Point = tuple[int, str, float | None]
"""Step, name and value of a number; None for one that is not finite, if the writer has no form for it."""

MOST_BYTES = 4096  # what a file may have where the disk is full; so many rows are written that it does not do


class MetricsWriterContract:
    """Tests a metrics writer: inherit, set `writer` to a table of `[[metrics]]`, write `read`, and pytest does the rest.

    writes_at_once: whether a row is there when `write` returns, so that a killed run keeps it. goes_on: whether a run that
    resumes from a checkpoint drops the rows of later steps (`rewind`). on_disk: whether it writes into its folder.
    """

    writer: ClassVar[dict[str, Any]]
    writes_at_once: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True
    on_disk: ClassVar[bool] = True

    def read(self, folder: Path) -> Iterable[Point]:
        """Returns every number that the writer has written into `folder`, as a reader of the files would find it."""
        raise NotImplementedError("a writer's tests say how its output is read: write `read`")

    def test_run_writes_every_number_once(self, texts: Path, tmp_path: Path) -> None:
        """Each number of each step once, with its value."""
        with assemble(plan_from_dict(small_plan(metrics=[self.writer]), texts), World.alone("cpu"), folder=tmp_path) as run:
            rows = [run.step() for _ in range(3)]
        self._assert_rows(tmp_path, rows)

    def test_rows_with_different_names(self, tmp_path: Path) -> None:
        """In their names: some numbers occur only in some steps; and in their values: integers, negative, tiny."""
        rows: list[dict[str, float | int]] = [
            {"step": 1, "loss": 2.5},
            {"step": 2, "loss": -1e-30, "held_out_loss": 3.0, "tokens": 10**9},
            {"step": 3, "norms/layer.0": 0.0, "loss/code": 1.5, "held_out/web text/loss": 2.5},
        ]
        self._write(tmp_path, rows)
        self._assert_rows(tmp_path, rows)

    def test_non_finite_numbers_hide_no_others(self, tmp_path: Path) -> None:
        """They must not hide the numbers beside and after them."""
        rows = [{"step": 1, "loss": math.nan, "lr": 0.5}, {"step": 2, "loss": math.inf}, {"step": 3, "loss": 1.0}]
        self._write(tmp_path, rows)
        found = {(step, name): value for step, name, value in self.read(tmp_path)}
        for place in ((1, "lr"), (3, "loss")):
            wanted = 0.5 if place[1] == "lr" else 1.0
            assert found.get(place) == wanted, f"{place} is {found.get(place)}, beside a number that is not finite"
        odd = found.get((1, "loss"))
        assert odd is None or not math.isfinite(odd), f"a loss that is no number is written as {odd}"

    def test_reopened_folder_keeps_rows(self, tmp_path: Path) -> None:
        """As when a run is resumed."""
        rows = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3, 4)]
        self._write(tmp_path, rows[:2])
        self._write(tmp_path, rows[2:])
        self._assert_rows(tmp_path, rows)

    def test_repeated_steps_are_written_once(self, tmp_path: Path) -> None:
        """After `rewind`, which a resumed run calls; in the same writer and in another."""
        if not self.goes_on:
            pytest.skip("it does not go on (`goes_on`)")
        for number, again in enumerate((False, True)):
            folder = tmp_path / str(number)
            folder.mkdir()
            writer = self._writer(folder)
            assert isinstance(writer, Rewinds), "the writer has no `rewind`: steps taken again would stand twice"
            for step in (1, 2, 3):
                writer.write({"step": step, "loss": 1.0 / step})
            if again:
                writer.close()
                writer = self._writer(folder)
                assert isinstance(writer, Rewinds)
            writer.rewind(1)
            writer.write({"step": 2, "loss": 7.0})
            writer.close()
            self._assert_rows(folder, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 7.0}])

    def test_second_close_does_nothing(self, tmp_path: Path) -> None:
        """The second time does nothing, and everything is there after the first."""
        writer = self._writer(tmp_path)
        writer.write({"step": 1, "loss": 1.0})
        writer.close()
        before = self._points(tmp_path)
        try:
            writer.close()
        except Exception as error:
            raise AssertionError(f"a second close fails: {type(error).__name__}: {error}") from error
        assert before == self._points(tmp_path) == [(1, "loss", 1.0)], f"after close the folder has {before}"

    def test_written_rows_survive_a_kill(self, tmp_path: Path) -> None:
        """One that is killed after `write`."""
        if not self.writes_at_once:
            pytest.skip("rows may be under way for a while (`writes_at_once`)")
        writer = self._writer(tmp_path)
        writer.write({"step": 1, "loss": 1.0})
        found = self._points(tmp_path)  # now, as if the process were gone
        writer.close()
        assert found == [(1, "loss", 1.0)], f"a run that is killed now would leave {found}"

    def test_full_disk_is_an_error(self, tmp_path: Path) -> None:
        """Raised by `write` or `close`: rows must not be lost silently."""
        if not self.on_disk:
            pytest.skip("it writes into no folder (`on_disk`)")
        writer, num_rows = self._writer(tmp_path), MOST_BYTES // 8
        failed = False
        with _files_end_at(MOST_BYTES):
            try:
                for step in range(1, num_rows + 1):
                    writer.write({"step": step, "loss": 1.0 / step})
                writer.close()
            except Exception:  # RunError, or what the library raises
                failed = True
        with suppress(Exception):
            writer.close()
        assert failed, (
            f"the disk took {MOST_BYTES} bytes, and {len(self._points(tmp_path))} of {num_rows} rows are there: neither write "
            "nor close says so"
        )

    def _writer(self, folder: Path) -> MetricsWriter:
        """Returns the writer as rank 0 of a run makes it."""
        writer: MetricsWriter = plan_from_dict(small_plan(metrics=[self.writer])).metrics[0].build(folder)
        return writer

    def _write(self, folder: Path, rows: Iterable[Mapping[str, float | int]]) -> None:
        """Writes `rows` with a new writer, and closes it."""
        writer = self._writer(folder)
        for row in rows:
            writer.write(row)
        writer.close()

    def _points(self, folder: Path) -> list[Point]:
        return sorted((step, name, value) for step, name, value in self.read(folder) if name != "step")

    def _assert_rows(self, folder: Path, rows: Iterable[Mapping[str, float | int]]) -> None:
        """Asserts that what is read are the numbers of `rows`, each once."""
        found = self._points(folder)
        twice = [place for place, count in Counter((step, name) for step, name, _ in found).items() if count > 1]
        assert not twice, f"step and name stand more than once: {twice[:3]}"
        wanted = {(int(row["step"]), name): value for row in rows for name, value in row.items() if name != "step"}
        values = {(step, name): value for step, name, value in found}
        missing, extra = wanted.keys() - values.keys(), values.keys() - wanted.keys()
        assert not missing, f"numbers of {len(missing)} steps and names are missing: {sorted(missing)[:3]}"
        assert not extra, f"numbers that no row has: {sorted(extra)[:3]}"
        for place, value in wanted.items():
            assert values[place] == pytest.approx(value, rel=1e-5), f"{place} is {values[place]}, not {value}"


@contextmanager
def _files_end_at(num_bytes: int) -> Iterator[None]:
    """Lets no file of this process grow beyond `num_bytes`: writing fails as on a full disk."""
    resource = pytest.importorskip("resource", reason="the system has no limits of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
