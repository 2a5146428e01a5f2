"""Finds what runs have left in their folders: plans, files that they need again, checkpoints, newest weights; and resumes.

--resume PATH ──> begins at PATH, as `attempt.json` in the folder then says ──> checkpoints of its own
                       └── started again, or --resume auto ─────> the newest of these, or PATH where there is none yet

Checkpoints are found by their files alone. Whether one is intact is checked when it is loaded. URLs are not read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.attempt import CHECKPOINTS, COPIES, PLAN, WEIGHTS, job, read_attempt, torchrun, with_copies
from sley_core.errors import SleyError, UsageError
from sley_core.plan.load import resolve
from sley_core.plan.loader import Loader
from sley_core.plan.read import read_file
from train_cli.progress import SUMMARY

if TYPE_CHECKING:
    from sley_core.plan.document import Document
    from sley_core.plan.plan import Plan
    from sley_core.protocols import CheckpointFiles, Restored
    from sley_core.run import Run
    from sley_core.run_state.pieces import SavedRun

AUTO = "auto"
"""Names the newest checkpoint that the run itself wrote; none for a run that has taken no step."""

AGAIN = "again"
"""As `AUTO`, where torchrun or SLURM has started the run again and its user has named none."""

MODEL = ("config.json", "generation_config.json")
"""The files that `save_pretrained` of a model writes besides its weights."""

_NUM_SHOWN = 4


def run_folder(plan: Plan) -> Path:
    """Returns the folder of a run of `plan`; a relative `[run] folder` starts at the current folder."""
    return Path(plan.run.folder, plan.run.name)


def keep_files(plan: Plan, folder: Path) -> None:
    """Copies into the run's folder what its export and its samples need: the tokenizer with its chat template, and the small
    files beside the weights from which it started. Raises OSError.
    """
    for (table, key), name in COPIES.items():
        source = getattr(getattr(plan, table).config, key, None)
        if not isinstance(source, Path) or source.resolve().is_relative_to(folder.resolve()):
            continue
        from sley_core.weight_files.read import TOKENIZER

        target = folder / name
        files = [(source / own, target / own) for own in (*TOKENIZER, *MODEL)]
        if source.is_file():
            files = [(source, target if target.suffix else target / TOKENIZER[0])]
        for file, copy in files:
            if file.is_file():
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def plan_of_run(folder: Path) -> Plan:
    """Returns the resolved plan of the run in `folder`, which may have been moved since.

    Raises UsageError "no-run", and what the plan's loading raises.
    """
    return resolve(document_of_run(folder), Loader())


def document_of_run(folder: Path, changes: Sequence[str] = ()) -> Document:
    """Returns the plan of the run in `folder` with `changes`, before it is resolved. Raises as `plan_of_run`."""
    if not (folder / PLAN).is_file():
        raise UsageError("no-run", f"`{folder}` is not the folder of a run: it has no `{PLAN}`")
    return with_copies(read_file(folder / PLAN, changes), folder)


def is_remote(path: str) -> bool:
    """Returns whether `path` is a URL."""
    return "://" in path


def checkpoints_of(plan: Plan, folder: Path) -> str:
    """Returns path or URL of the folder of checkpoints of a run of `plan` in `folder`."""
    return (plan.checkpoint.config.folder if plan.checkpoint else None) or str(folder.absolute() / CHECKPOINTS)


def files_of(plan: Plan | None) -> CheckpointFiles:
    """Returns the reader of the checkpoints of a run of `plan`, or that of the default checkpointer. It imports torch.

    Raises PluginError "plugin-missing" if that is not installed, UsageError "no-checkpoint-files" if only a run can read
    them.
    """
    files = _files_or_none(plan)
    if files is None:
        name = plan.checkpoint.name if plan and plan.checkpoint else ""
        hint = "give `train-cli run` the checkpoint with `--resume PATH`, and use the weights at the end of that run"
        raise UsageError("no-checkpoint-files", f"checkpoints of `{name}` can be read by a run alone", hint=hint)
    return files


def _files_or_none(plan: Plan | None) -> CheckpointFiles | None:
    from sley_core.run_state.state import checkpoint_files

    return checkpoint_files(Loader() if plan is None else plan.loader, plan)


def _paths_in(files: CheckpointFiles, folder: str) -> list[str]:
    """Returns paths or URLs of the complete checkpoints in `folder`, the newest first."""
    return [f"{folder.rstrip('/')}/{name}" for name in files.names(folder)]


def _description_or_none(files: CheckpointFiles, path: str) -> SavedRun | None:
    """Returns the description of the checkpoint at `path`; None if there is none, or it is damaged."""
    try:
        return files.describe(path)
    except Exception:  # whatever a file system raises
        return None


def _step_of(folder: Path) -> tuple[str, int | None]:
    """Returns the attempt of a run that wrote the files in `folder`, and after which step; "" and None for other files.

    Raises RunError "weight-files".
    """
    from sley_core.weight_files.read import SINGLE, opened

    file = next(iter(sorted(folder.glob("model*.safetensors"))), folder / SINGLE)
    with opened(file, "numpy") as content:
        facts = content.metadata() or {}
    step = str(facts.get("step", ""))
    return str(facts.get("attempt", "")), int(step) if step.isdecimal() else None


def newest_weights(folder: Path, plan: Plan) -> tuple[Path | str, int | None]:
    """Returns the folder of the newest weights of the run in `folder`, and the step after which they were saved, None if that
    is not known: its final weights, or an intact checkpoint that it wrote. Of the same step, the final weights.

    Weights and checkpoints of steps that the run has not taken (it went back, or was begun anew) do not count. Raises
    UsageError "no-weights" if there are neither.
    """
    attempt = read_attempt(folder)
    final: tuple[Path, int | None] | None = None
    if (folder / WEIGHTS).is_dir():
        writer, step = _step_of(folder / WEIGHTS)
        if attempt is None or step is None or attempt.took(writer, step):
            final = folder / WEIGHTS, step
    own = checkpoints_of(plan, folder)
    if is_remote(own) or Path(own).is_dir():
        files = files_of(plan)
        found = [(about, path) for path in _paths_in(files, own) if (about := _description_or_none(files, path)) is not None]
        for about, path in sorted(found, key=lambda pair: pair[0].step, reverse=True):
            if final is not None and (final[1] is None or final[1] >= about.step):
                break
            if (attempt is None or attempt.has_taken(about.lineage, about.step)) and files.is_whole(path):
                return path, about.step
    if final is None:
        hint = "it has not ended, or failed, or its plan wants none; `[checkpoint]` saves a run on its way"
        raise UsageError("no-weights", f"the run in `{folder}` has left no weights and no checkpoint", hint=hint)
    return final


def can_go_on(plan: Plan, folder: Path) -> bool:
    """Returns whether a run of `plan` in `folder` may find a checkpoint to resume from: its own, or that at which it began."""
    own, attempt = checkpoints_of(plan, folder), read_attempt(folder)
    if is_remote(own) or (attempt is not None and attempt.origin):
        return True
    try:
        return Path(own).is_dir() and bool(files_of(plan).names(own))
    except SleyError:  # nothing here reads them
        return False


def check_given(plan: Plan, path: str) -> None:
    """Raises UsageError "no-checkpoint" if `path` is neither a checkpoint nor a folder of some; the hint names some."""
    if is_remote(path) or (files := _files_or_none(plan)) is None:
        return
    folder = Path(path)
    try:
        has_some = files.describe(path) is not None
    except SleyError:  # a damaged one, which the load names
        has_some = True
    if has_some or files.names(path):
        return
    if files.names(str(folder / CHECKPOINTS)):
        hint = f"those of that run are in `{folder / CHECKPOINTS}`"
    elif beside := files.names(str(folder.parent)):
        more = f" and {len(beside) - _NUM_SHOWN} more" if len(beside) > _NUM_SHOWN else ""
        hint = f"beside it there are {', '.join(f'`{name}`' for name in beside[:_NUM_SHOWN])}{more}"
    else:
        hint = "give the folder of a checkpoint, or of several, such as `runs/NAME/checkpoints`"
    raise UsageError("no-checkpoint", f"there is no checkpoint in `{path}`", hint=hint)


def is_again() -> bool:
    """Returns whether torchrun or SLURM has started this run again."""
    restarts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count != "0" for count in restarts)


def goes_on(plan: Plan, resume: str | None) -> bool:
    """Returns whether the run continues in its own folder, rather than begin in a new one, perhaps from another run's
    checkpoint. resume: as the user has given it.

    A job that SLURM has started again continues the runs that it has begun, but not those of other jobs.
    """
    folder = run_folder(plan)
    if resume == AUTO:
        return True
    if is_again():
        attempt = read_attempt(folder)
        return resume is not None or attempt is None or attempt.job == job()
    if resume is None:
        return False
    # Not resolved too, since the folder of checkpoints may be a link.
    paths = {Path(resume).resolve(), Path(os.path.abspath(resume))}  # noqa: PTH100  # it leaves links as they are
    if any(path.is_relative_to(base) for path in paths for base in (folder.resolve(), folder.absolute())):
        return True
    # Checkpoints that an attempt of the run in the folder wrote, wherever they are.
    attempt = read_attempt(folder)
    if attempt is None or (files := _files_or_none(plan)) is None:
        return False
    candidates = (_description_or_none(files, path) for path in _paths_in(files, resume))
    found = _description_or_none(files, resume) or next(candidates, None)
    return found is not None and attempt.wrote(found.lineage)


def is_finished(run: Run, folder: Path) -> bool:
    """Returns whether the run in `folder` has finished with all of the plan's steps and has its final weights, so that nothing
    is left to do. All ranks call it.

    Raises PlanError "resume-differs" if it is the folder of a run with other numbers.
    """
    from sley_core.comm.collectives import gather_objects

    text = ""
    steps = finished_steps(folder) if run.world.rank == 0 else None
    if steps is not None and steps >= run.plan.run.steps and (folder / PLAN).is_file():
        has_weights = run.plan.run.final_weights == "none" or (folder / WEIGHTS).is_dir()
        text = (folder / PLAN).read_text("utf-8") if has_weights else ""
    # All ranks: what rank 0 sees counts, whose folder it is.
    before: str = gather_objects(text, run.groups["control"], what="whether the run has finished")[0]
    if before:
        from sley_core.plan.write import changes, refuse_changes

        refuse_changes(changes(before, run.resolved_plan.to_toml()))
    return bool(before)


def finished_steps(folder: Path) -> int | None:
    """Returns how many steps the run in `folder` has taken, if it has finished; None if it has not, or if that is not known."""
    try:
        content = json.loads((folder / SUMMARY).read_text("utf-8"))
        return int(content["steps"]) if content["outcome"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load(run: Run, folder: Path, resume: str | None) -> list[str]:
    """Loads the checkpoint that `resume` names into `run`, none if it is None; returns lines for the user. All ranks call it.

    A run that is started again continues from its own newest checkpoint, not from the one at which it began. If it has saved
    none, it begins at step 1, unless its user has asked for `AUTO` with a plan that saves none.
    """
    if resume is None:
        return []
    attempt = read_attempt(folder) if run.world.rank == 0 else None
    may_begin = is_again() and (resume != AUTO or run.plan.checkpoint is not None)
    if resume == AGAIN:
        resume = AUTO
    elif resume != AUTO and is_again():
        from sley_core.comm.collectives import gather_objects

        has_begun = attempt is not None and attempt.given == resume
        # All ranks: they have the same command and environment.
        if gather_objects(has_begun, run.groups["control"], what="where the run has begun")[0]:
            resume = AUTO
    # The torchrun that has started this process began the attempt in the folder: it starts the run again, perhaps at step 1.
    anew = may_begin and attempt is not None and attempt.torchrun == torchrun() != ""
    found = run.load_checkpoint(resume, anew=anew)
    return ["there is no checkpoint yet: the run begins at step 1"] if found is None else list(_lines(run, found))


def _lines(run: Run, found: Restored) -> Iterator[str]:
    for path, damages in found.passed_over:
        yield f"passed over {path}: {', '.join(map(str, damages))}"
    yield f"going on after step {found.step} of {run.plan.run.steps}, from {found.path}"
    yield from found.notes
