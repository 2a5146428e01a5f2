"""The recorder of a run: writes what each rank works at, waits for and fails with, for a look at it later.

An installed package brings one by an entry point of the group `sley.recorders`, a subclass of `RunRecorder`; sley-doctor does.
Without such a package nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.errors import PluginError

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.data.feed import Feed
    from sley_core.engine.parts import Parts
    from sley_core.errors import Diagnostic

GROUP = "sley.recorders"

FAULTS = "faults"
WORK = "work"
"""The folders in a run's folder that a recorder writes: reports of failures, and what ranks worked at."""


class RunRecorder:
    """Records nothing; a package's recorder overrides what it records. `folder` is always the folder of the run."""

    def working(self, parts: Parts, feed: Feed | None, folder: Path, notes: list[str]) -> AbstractContextManager[None]:
        """Returns a context manager in which this rank's steps are recorded. No rank waits for another in it.

        feed: of the run's samples. notes: of the run; a recorder that cannot write adds one, and ends nothing else.
        """
        return nullcontext()

    def failed(self, folder: Path, world: World, what: Diagnostic, error: BaseException) -> None:
        """Reports that this rank failed with `error`, before anything is torn down. what: the error as the user sees it."""

    def stuck(self, folder: Path, world: World, what: Diagnostic) -> None:
        """Reports what this rank is doing, when it was asked to end and has not; called in a thread beside the main one."""

    def launched(
        self, folder: Path, world: int, codes: Mapping[int, int], silent: Mapping[int, str], first: int | None
    ) -> None:
        """Reports how the `world` ranks of a local launcher ended, if one failed.

        codes: exit codes by rank, negative for signals. silent: the states, in words, of ranks that had to be killed.
        first: the rank that ended first.
        """

    def forget(self, folder: Path) -> None:
        """Removes the reports of an earlier attempt, before a run begins."""


@cache
def recorder() -> RunRecorder:
    """Returns the recorder of the package that is installed, or one that records nothing.

    Raises PluginError "recorder-import" if it cannot be imported, "recorder-ambiguous" if there are several.
    """
    points = sorted(entry_points(group=GROUP), key=lambda point: point.value)
    if not points:
        return RunRecorder()
    if len(points) > 1:
        names = " and ".join(f"`{point.value}`" for point in points)
        raise PluginError("recorder-ambiguous", f"several packages record runs: {names}", hint="uninstall all but one")
    try:
        made: RunRecorder = points[0].load()()
    except Exception as error:
        message = f"the recorder `{points[0].value}` cannot be imported: {type(error).__name__}: {error}"
        raise PluginError("recorder-import", message, hint="reinstall its package, or uninstall it") from error
    return made
