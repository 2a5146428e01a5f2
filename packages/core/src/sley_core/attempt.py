"""The attempts of a run, and the steps that each has taken. The run's folder and each checkpoint name them, so that a run
resumes from a checkpoint of its own, or from none.

    attempt A    steps 1 to 14, then killed; its newest checkpoint is that of step 10
    attempt B    steps 11 to 20, by `--resume auto`                                       lineage of B: (A, 0), (B, 10)
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sley_core.errors import RunError, UsageError
from sley_core.metrics.jsonl import NAME as METRICS
from sley_core.metrics.jsonl import rows
from sley_core.run_files import CHECKPOINTS as CHECKPOINTS
from sley_core.run_files import COPIES as COPIES
from sley_core.run_files import PLAN as PLAN
from sley_core.run_files import WEIGHTS as WEIGHTS
from sley_core.whole_files import write_atomically

if TYPE_CHECKING:
    from sley_core.plan.document import Document


def use_copied_files(document: Document, folder: Path) -> Document:
    """Returns the plan's document with the copies of files in the run's `folder` in place of the originals."""
    tables: dict[str, Any] = deepcopy(dict(document.tables))
    for (table, key), name in COPIES.items():
        content = tables.get(table, {})
        for owner in (content, *content.get("sources", ())):  # a mixture's sources share their token ids
            if isinstance(owner, dict) and key in owner and (folder / name).exists():
                owner[key] = str((folder / name).absolute())
    return replace(document, tables=tables)


NAME = "attempt.json"

ID_LENGTH = 12
"""Hexadecimal digits of an attempt's id."""

NEVER_ANEW = "never-anew"
"""The error code of a load that would repeat finished work."""

_NO_LIMIT = 2**63


class AttemptStart(NamedTuple):
    """An attempt, and the number of completed steps at its start."""

    id: str
    step: int


Lineage = tuple[AttemptStart, ...]
"""The attempts that took the steps of a run, the latest last: each those from its own start to the start of the next."""


def parse_lineage(pairs: Iterable[Sequence[Any]]) -> Lineage:
    """Returns the lineage from the pairs of a JSON file. Raises ValueError or TypeError for invalid pairs."""
    return tuple(AttemptStart(str(name), int(step)) for name, step in pairs)


def count_common_steps(one: Lineage, other: Lineage) -> int:
    """Returns how many first steps were taken by the same attempts in both lineages; a lineage has no last step."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    nexts = [line[count].step for line in (one, other) if len(line) > count]
    return min(nexts, default=_NO_LIMIT) if count else 0


@dataclass(frozen=True)
class Attempt:
    """The attempt of the run in a folder.

    lineage: of its steps. left: earlier attempts of this run without a step in the lineage. given: the checkpoint that the user
    has named; origin: the path of the one that was loaded for it. saved: the step of the newest checkpoint, -1 for none. job,
    torchrun: the SLURM job and the torchrun that have started it; "" for none.
    """

    lineage: Lineage
    left: tuple[str, ...] = ()
    given: str = ""
    origin: str = ""
    saved: int = -1
    job: str = ""
    torchrun: str = ""

    @property
    def id(self) -> str:
        return self.lineage[-1].id

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all attempts of this run."""
        return frozenset(self.left) | {start.id for start in self.lineage}

    def wrote(self, lineage: Lineage) -> bool:
        """Returns whether an attempt of this run wrote the checkpoint with this lineage."""
        return lineage[-1].id in self.ids

    def has_taken(self, lineage: Lineage, step: int) -> bool:
        """Returns whether this attempt and `lineage` share their first `step` steps."""
        return self.wrote(lineage) and count_common_steps(self.lineage, lineage) >= step

    def took(self, name: str, step: int) -> bool:
        """Returns whether the first `step` steps of the attempt `name` are steps of this attempt, too."""
        index = next((number for number, start in enumerate(self.lineage) if start.id == name), None)
        return index is not None and (index + 1 == len(self.lineage) or step <= self.lineage[index + 1].step)


def new_attempt(step: int = 0) -> Attempt:
    return Attempt((AttemptStart(secrets.token_hex(ID_LENGTH // 2), step),), job=slurm_job_id(), torchrun=torchrun_id())


def resume_attempt(before: Attempt | None, lineage: Lineage, step: int, given: str, path: str) -> Attempt:
    """Returns the attempt that resumes after the first `step` steps of `lineage`, from the checkpoint at `path`.

    before: the folder's attempt; a checkpoint that none of its attempts wrote begins a lineage of its own. given: the path that
    the user has named; "" if the run has found the checkpoint itself.
    """
    new = new_attempt(step)
    if before is not None and before.wrote(lineage):
        new = replace(new, lineage=(*(start for start in lineage if start.step < step), *new.lineage))
    left = () if before is None else tuple(sorted(before.ids - {start.id for start in new.lineage}))
    if given or before is None:
        return replace(new, left=left if before is not None and before.wrote(lineage) else (), given=given, origin=path)
    return replace(new, left=left, given=before.given, origin=before.origin, saved=before.saved)


def slurm_job_id() -> str:
    """Returns the id of the SLURM job that this process belongs to; "" without one."""
    return os.environ.get("SLURM_JOB_ID", "")


def torchrun_id() -> str:
    """Returns an id of the torchrun that started this process; "" without one."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{run} {socket.gethostname()} {os.getppid()}" if run else ""


def read_attempt(folder: Path) -> Attempt | None:
    """Returns the attempt of the run in `folder`; None if none has begun. Raises RunError "attempt" for a damaged file."""
    path = folder / NAME
    try:
        fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
        attempt = Attempt(**{**fields, "lineage": parse_lineage(fields["lineage"]), "left": tuple(fields["left"])})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "pass the checkpoint to resume from, and use another run name"
        raise RunError(
            "attempt", f"`{path}` does not identify the attempt that wrote the steps in this folder: {error}", hint=hint
        ) from error
    if not attempt.lineage:
        raise RunError("attempt", f"`{path}` contains no attempt", hint="pass the checkpoint to resume from")
    return attempt


def write_attempt(folder: Path, attempt: Attempt) -> None:
    """Writes the attempt file of `folder`. Raises RunError "attempt" if it cannot be written."""
    try:
        write_atomically(folder / NAME, json.dumps(asdict(attempt)))
    except OSError as error:
        hint = "set `[run] folder` to a writable folder"
        raise RunError("attempt", f"cannot write `{folder / NAME}`: {error.strerror or error}", hint=hint) from error


class RunAttempt:
    """The attempt file in a run's `folder`; None without one. current: this process's attempt, on rank 0 alone."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder = None if folder is None else folder.absolute()
        self.current: Attempt | None = None
        self._is_first_rank = rank == 0
        self._is_begun = False

    @property
    def known(self) -> Attempt | None:
        """The attempt of this process, or else the folder's. Raises RunError "attempt"."""
        return self.current or (None if self.folder is None else read_attempt(self.folder))

    def begin(self, step: int) -> None:
        """Writes the attempt into the run's folder, once, before its first step or save. Raises RunError "attempt"."""
        if self._is_begun or not self._is_first_rank:
            return
        if self.current is None and self.folder is not None and next(rows(self.folder), None) is not None:
            hint = 'use `load_checkpoint("auto")` to resume that attempt, or an empty folder for a new run'
            raise RunError("attempt", f"`{self.folder}` contains rows of another attempt", hint=hint)
        self.current = self.current or new_attempt(step)
        if self.folder is not None:
            write_attempt(self.folder, self.current)
        self._is_begun = True

    def saved(self, step: int) -> None:
        """Records in the run's folder that the attempt has saved a checkpoint of `step`."""
        if self.current is not None:
            self.current = replace(self.current, saved=step)
            if self.folder is not None:
                with suppress(RunError):  # the checkpoint is there all the same
                    write_attempt(self.folder, self.current)

    def resume(self, lineage: Lineage, step: int, given: str, path: str) -> tuple[int, str]:
        """Makes the next step the first of an attempt that goes on after the first `step` steps of `lineage`.

        given: as of `resume_attempt`. Returns how many steps the attempts before it in the run's folder have in common with the
        checkpoint at `path`, and a note for the user; 0 and "" on ranks other than 0.
        """
        if not self._is_first_rank:
            return 0, ""
        # Without a folder nothing else says whose the checkpoint is.
        before = self.known if self.current or self.folder is not None else Attempt(lineage)
        common, note = 0 if before is None else count_common_steps(before.lineage, lineage), ""
        if before is not None and common < step and before.origin != path:
            owner = "an earlier attempt of this run" if before.wrote(lineage) else "another run"
            note = f"{path} belongs to {owner}; rows of steps after the checkpoint are dropped"
        self.current, self._is_begun = resume_attempt(before, lineage, step, given, path), False
        return min(step, common), note

    def refuse_fresh_start(self, where: str, others: Sequence[str] = ()) -> None:
        """Raises UsageError "never-anew" if the run has done work that a first step would begin again.

        where: its folder of checkpoints, in which there are none of this run. others: names of those of other attempts.
        """
        assert self.folder is not None, "a run without a folder has no steps"
        attempt = self.known
        steps = max((int(row["step"]) for row in rows(self.folder)), default=0)
        work = [f"rows up to step {steps}"] if steps else []
        if attempt is not None and not (self.folder / METRICS).exists():
            work = [f"an attempt without rows in {METRICS}"]
        work += ["final weights"] if (self.folder / WEIGHTS).is_dir() else []
        saved = -1 if attempt is None else attempt.saved
        if work or saved >= 0:
            work_text = " and ".join(work) or "an attempt without rows"
            others_text = f", only checkpoints of other attempts: {shorten_names(others)}" if others else ""
            newest_text = f"; its newest checkpoint was from step {saved}" if saved >= 0 else "; it saved no checkpoint"
            hint = "restore the checkpoints, pass one with `--resume PATH`, or use `--overwrite` to start again"
            if saved < 0:
                hint = "use `--overwrite` to start again; add `[checkpoint]` to the plan to save checkpoints during a run"
            message = f"{self.folder} has {work_text}, but {where} has no checkpoint of this run{others_text}{newest_text}"
            raise UsageError(NEVER_ANEW, message, hint=hint)
        if others and attempt is None:
            message = (
                f"{where} has checkpoints ({shorten_names(others)}), but {self.folder} does not show that this run wrote them"
            )
            hint = "use `--resume PATH` to resume from one of them, or remove `--resume` to start at the first step"
            raise UsageError(NEVER_ANEW, message, hint=hint)


def shorten_names(names: Sequence[str], most: int = 4) -> str:
    """Returns a text with the first `most` names and the number of remaining ones."""
    suffix = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{suffix}"
