"""The recorder of fault reports and work records, which train-cli loads if this package is installed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from sley_doctor.fault_report import LaunchReport, remove_reports, write_launch_report
from train_cli.run_folder import RunRecorder

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.data.feed import Feed
    from sley_core.engine.parts import Parts
    from sley_core.errors import Diagnostic

# Only ranks import modules that need torch: the launcher and `train-cli doctor` run without torch.


class DoctorRecorder(RunRecorder):
    """Writes `work/rank-N.jsonl` while a rank trains, and `faults/` when ranks fail."""

    def working(self, parts: Parts, feed: Feed | None, folder: Path, notes: list[str]) -> AbstractContextManager[None]:
        from sley_doctor.work_recorder import record_work

        return record_work(parts, feed, folder, notes)

    def failed(self, folder: Path, world: World, diagnostic: Diagnostic, error: BaseException) -> None:
        from sley_doctor.fault_report import report_error

        report_error(folder, world, diagnostic, error)

    def stuck(self, folder: Path, world: World, diagnostic: Diagnostic) -> None:
        from sley_doctor.fault_report import report_stuck

        report_stuck(folder, world, diagnostic)

    def launched(
        self, folder: Path, world: int, codes: Mapping[int, int], silent: Mapping[int, str], first: int | None
    ) -> None:
        write_launch_report(folder, LaunchReport(world, codes, silent, first))

    def forget(self, folder: Path) -> None:
        remove_reports(folder)
