"""The files that a run keeps in its folder: copies of its inputs, its metrics rows, and its attempts. Imports no torch.

An attempt is one start of the run's processes. The folder and each checkpoint record the attempts and their steps, so that a
run resumes only from its own checkpoints.

    attempt A    steps 1 to 14, then killed; its newest checkpoint is from step 10
    attempt B    steps 11 to 20, by `--resume auto`                                       lineage of B: (A, 0), (B, 10)
"""

import json
import os
import secrets
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sley_core.errors import RunError, UsageError, shorten_names
from sley_core.files import COPIED_FILES, WEIGHTS_FOLDER, write_atomically
from sley_core.json_text import to_json
from sley_core.plan.document import Document
from sley_core.plugin import JsonlConfig
from sley_core.protocols import MetricsWriter


def use_copied_files(document: Document, folder: Path) -> Document:
    """Returns a copy of the plan's document that names the copied files in the run's `folder` instead of the originals. A run
    copies only the files of a mixture's first source, so a source with other files keeps the originals.
    """
    tables: dict[str, Any] = deepcopy(dict(document.tables))
    for (table, key), name in COPIED_FILES.items():
        content = tables.get(table, {})
        owners = [owner for owner in (content, *content.get("sources", ())) if isinstance(owner, dict) and key in owner]
        originals = [owner[key] for owner in owners]
        copy = folder / name
        if key == "template" and not copy.exists() and key in (content.get("sources") or [content])[0]:
            copy = folder / "tokenizer" / "chat_template.jinja"  # its place in version 0.1.0
        for owner, original in zip(owners, originals, strict=True):
            if original == originals[0] and copy.exists():
                owner[key] = str(copy.absolute())
    return replace(document, tables=tables)


METRICS_FILE = "metrics.jsonl"
"""The name of the metrics file in a run's folder."""


class JsonlWriter(MetricsWriter):
    """The metrics writer `core.jsonl`. When `write` returns, the row is in the file, so a killed run keeps its rows. Appends to
    an existing file. If the last line of this file is incomplete, ends the line first. Infinities and NaN become null.
    """

    def __init__(self, config: JsonlConfig, folder: Path) -> None:
        """Opens the file for appending. Raises RunError "metrics-file" if this fails."""
        self.path = folder / METRICS_FILE
        try:
            self._file = self.path.open("a+b", buffering=0)
            if size := self._file.seek(0, os.SEEK_END):
                self._file.seek(size - 1)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        except OSError as error:
            message = f"cannot open `{self.path}`: {error.strerror}"
            raise RunError("metrics-file", message, hint="set `[run] folder` to a writable folder") from error

    def write(self, row: Mapping[str, float | int]) -> None:
        """Appends one line in a single system call. Raises RunError "metrics-file" if this fails or the file was deleted."""
        line = (to_json(row) + "\n").encode()
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise RunError("metrics-file", f"`{self.path}` was deleted while the run wrote to it")
            written = self._file.write(line)
        except OSError as error:
            raise RunError("metrics-file", f"cannot write to `{self.path}`: {error.strerror}") from error
        if written != len(line):
            raise RunError("metrics-file", f"cannot write to `{self.path}`: {written} of {len(line)} bytes were written")

    def rewind(self, step: int) -> None:
        """Truncates the file before the first row of a step after `step`. Raises RunError "metrics-file" if this fails."""
        try:
            end = 0
            with self.path.open("rb") as file:
                for line in file:
                    if _parse_step(line) > step:
                        break
                    end += len(line)
            self._file.truncate(end)
        except OSError as error:
            raise RunError("metrics-file", f"cannot truncate `{self.path}` after step {step}: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of the metrics file in the run folder `folder`, or nothing if there is no file. Skips invalid lines. None
    stands for infinities and NaN.
    """
    with suppress(FileNotFoundError), (folder / METRICS_FILE).open("rb") as file:
        yield from (json.loads(line) for line in file if _parse_step(line))


def _parse_step(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


ATTEMPT_FILE = "attempt.json"
"""The name of the attempt file in a run's folder."""


class AttemptStart(NamedTuple):
    """The id of an attempt, and the number of completed steps at its start."""

    id: str
    step: int


Lineage = tuple[AttemptStart, ...]
"""The attempts that ran the steps of a run, from first to last. Each attempt ran the steps up to the start of the next."""


def parse_lineage(pairs: Iterable[Sequence[Any]]) -> Lineage:
    """Returns the lineage for the (id, step) pairs of a JSON file. Raises ValueError or TypeError for invalid pairs."""
    return tuple(AttemptStart(str(attempt_id), int(step)) for attempt_id, step in pairs)


def count_common_steps(first: Lineage, second: Lineage) -> int:
    """Returns the number of steps, counted from the first, that two lineages share; `sys.maxsize` if they are equal."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    next_starts = [lineage[count].step for lineage in (first, second) if len(lineage) > count]
    return min(next_starts, default=sys.maxsize) if count else 0


@dataclass(frozen=True)
class Attempt:
    """Describes the present attempt of a run. lineage: the attempts that ran its steps. abandoned_ids: the ids of earlier
    attempts of this run that have no step in the lineage. requested_path: the checkpoint path that the user passed, or "".
    loaded_path: the path of the checkpoint that was loaded for this path, or "". saved_step: the step of the newest checkpoint,
    or -1. slurm_job_id, torchrun_id: the ids of the SLURM job and of the torchrun agent that started the attempt, or "".
    """

    lineage: Lineage
    abandoned_ids: tuple[str, ...] = ()
    requested_path: str = ""
    loaded_path: str = ""
    saved_step: int = -1
    slurm_job_id: str = ""
    torchrun_id: str = ""

    @property
    def id(self) -> str:
        """The random id of this attempt, in hexadecimal digits."""
        return self.lineage[-1].id

    @property
    def all_attempt_ids(self) -> frozenset[str]:
        """The ids of all attempts of this run, including this attempt."""
        return frozenset(self.abandoned_ids) | {start.id for start in self.lineage}

    def is_writer_of(self, lineage: Lineage) -> bool:
        """Returns whether an attempt of this run wrote the checkpoint with the lineage `lineage`."""
        return lineage[-1].id in self.all_attempt_ids

    def shares_steps(self, lineage: Lineage, num_steps: int) -> bool:
        """Returns whether this attempt and `lineage` share their first `num_steps` steps."""
        return self.is_writer_of(lineage) and count_common_steps(self.lineage, lineage) >= num_steps

    def includes_steps(self, attempt_id: str, num_steps: int) -> bool:
        """Returns whether the first `num_steps` steps of the attempt `attempt_id` are also steps of this attempt."""
        index = next((index for index, start in enumerate(self.lineage) if start.id == attempt_id), None)
        return index is not None and (index + 1 == len(self.lineage) or num_steps <= self.lineage[index + 1].step)


def create_attempt(step: int = 0) -> Attempt:
    """Returns an attempt with a random id and no earlier attempts. step: the number of steps done before the attempt."""
    return Attempt((AttemptStart(secrets.token_hex(6), step),), slurm_job_id=slurm_job_id(), torchrun_id=torchrun_id())


def resume_attempt(previous: Attempt | None, lineage: Lineage, step: int, requested_path: str, path: str) -> Attempt:
    """Returns a new attempt that resumes from the checkpoint at `path`, which contains the first `step` steps of `lineage`.
    previous: the attempt in the run's folder, or None. If no attempt of the run wrote the checkpoint, a new lineage begins.
    requested_path: the path that the user passed, or "" if the run selected the checkpoint.
    """
    new = create_attempt(step)
    if previous is not None and previous.is_writer_of(lineage):
        new = replace(new, lineage=(*(start for start in lineage if start.step < step), *new.lineage))
    ids = () if previous is None else tuple(sorted(previous.all_attempt_ids - {start.id for start in new.lineage}))
    if requested_path or previous is None:
        ids = ids if previous and previous.is_writer_of(lineage) else ()
        return replace(new, abandoned_ids=ids, requested_path=requested_path, loaded_path=path)
    return replace(previous, lineage=new.lineage, abandoned_ids=ids, slurm_job_id=new.slurm_job_id, torchrun_id=new.torchrun_id)


def slurm_job_id() -> str:
    """Returns the id of this process's SLURM job, or ""."""
    return os.environ.get("SLURM_JOB_ID", "")


def torchrun_id() -> str:
    """Returns an id of the torchrun agent of this host that started this process, or "" if torchrun did not start it."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{run} {socket.gethostname()} {os.getppid()}" if run else ""


def read_attempt(folder: Path) -> Attempt | None:
    """Returns the attempt in the run folder, or None if there is no file. Raises RunError "attempt" if it cannot be read."""
    path = folder / ATTEMPT_FILE
    try:
        fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
        lineage = parse_lineage(fields["lineage"])
        if not lineage:
            raise ValueError("it contains no attempt")
        return Attempt(**{**fields, "lineage": lineage, "abandoned_ids": tuple(fields["abandoned_ids"])})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"`{path}` does not identify the attempt that wrote the steps in this folder: {error}"
        hint = "pass the checkpoint to resume from, and use another run name"
        raise RunError("attempt", message, hint=hint) from error


def write_attempt(folder: Path, attempt: Attempt) -> None:
    """Writes the attempt file of `folder`. Raises RunError "attempt" if it cannot be written."""
    try:
        write_atomically(folder / ATTEMPT_FILE, json.dumps(asdict(attempt)))
    except OSError as error:
        hint = "set `[run] folder` to a writable folder"
        raise RunError("attempt", f"cannot write `{folder / ATTEMPT_FILE}`: {error.strerror or error}", hint=hint) from error


class AttemptTracker:
    """Tracks the present attempt of a run, and writes it into the attempt file in the run's `folder`, unless `folder` is None.
    current: the attempt of this process; None before it begins or resumes, and on ranks other than 0.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder = None if folder is None else folder.absolute()
        self.current: Attempt | None = None
        self._is_first_rank = rank == 0
        self._has_begun = False

    @property
    def latest(self) -> Attempt | None:
        """The attempt of this process, or else of the attempt file, if any. Raises RunError "attempt" if it is damaged."""
        return self.current or (None if self.folder is None else read_attempt(self.folder))

    def begin(self, step: int) -> None:
        """Writes the attempt file once, before the first step or save. Raises RunError "attempt" if the folder has rows of
        another attempt or cannot be written.
        """
        if self._has_begun or not self._is_first_rank:
            return
        if self.current is None and self.folder is not None and next(read_rows(self.folder), None) is not None:
            hint = 'use `load_checkpoint("auto")` to resume that attempt, or an empty folder for a new run'
            raise RunError("attempt", f"`{self.folder}` contains rows of another attempt", hint=hint)
        self.current = self.current or create_attempt(step)
        if self.folder is not None:
            write_attempt(self.folder, self.current)
        self._has_begun = True

    def record_save(self, step: int) -> None:
        """Records that the attempt has saved a checkpoint after `step`."""
        if self.current is not None:
            self.current = replace(self.current, saved_step=step)
            if self.folder is not None:
                with suppress(RunError):  # the checkpoint exists nevertheless
                    write_attempt(self.folder, self.current)

    def resume(self, lineage: Lineage, step: int, requested_path: str, path: str) -> tuple[int, str]:
        """Starts the attempt that `resume_attempt` returns for the same arguments.

        Returns the number of steps, from the first step on, whose rows in the run's folder belong to `lineage`, and a note for
        the user, or ""; (0, "") on ranks other than 0.
        """
        if not self._is_first_rank:
            return 0, ""
        # Without a folder, only the checkpoint itself records its run.
        previous = self.latest if self.current or self.folder is not None else Attempt(lineage)
        common, note = 0 if previous is None else count_common_steps(previous.lineage, lineage), ""
        if previous is not None and common < step and previous.loaded_path != path:
            owner = "an earlier attempt of this run" if previous.is_writer_of(lineage) else "another run"
            note = f"{path} belongs to {owner}; rows of steps after the checkpoint are dropped"
        self.current, self._has_begun = resume_attempt(previous, lineage, step, requested_path, path), False
        return min(step, common), note

    def refuse_fresh_start(self, location: str, foreign_names: Sequence[str] = ()) -> None:
        """Raises UsageError "never-anew" if a fresh start would repeat steps that the run has already trained.

        location: the checkpoint folder, in which no checkpoint of this run was found. foreign_names: the names of checkpoints
        of other attempts in it.
        """
        assert self.folder is not None, "a run without a folder has no steps"
        attempt = self.latest
        saved_step = -1 if attempt is None else attempt.saved_step
        last_step = max((int(row["step"]) for row in read_rows(self.folder)), default=0)
        results = [f"rows up to step {last_step}"] if last_step else []
        if attempt is not None and not (self.folder / METRICS_FILE).exists():
            results = [f"an attempt without rows in {METRICS_FILE}"]
        results += ["final weights"] if (self.folder / WEIGHTS_FOLDER).is_dir() else []
        if results or saved_step >= 0 or (foreign_names and attempt is None):
            foreign = f", only checkpoints of other attempts: {shorten_names(foreign_names)}" if foreign_names else ""
            newest = f"its newest checkpoint was from step {saved_step}" if saved_step >= 0 else "it saved no checkpoint"
            contents = " and ".join(results) or "no rows"
            message = f"{self.folder} has {contents}, but {location} has no checkpoint of this run{foreign}; {newest}"
            hint = "restore the checkpoints, pass one with `--resume PATH`, or use `--overwrite` to start again"
            raise UsageError("never-anew", message, hint=hint)
