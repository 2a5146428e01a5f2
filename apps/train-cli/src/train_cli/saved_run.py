"""Reads the plan, checkpoints and newest weights of a run from its folder, resumes the run, and opens it in one process.

    --resume PATH ──> starts from PATH, which `attempt.json` in the folder records ──> saves its own checkpoints
                           └── restarted, or --resume auto ───> resumes from its newest checkpoint, or from PATH if it has none

Listing checkpoints reads no tensors. Loading a checkpoint also checks that the files of the checkpoint are intact.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.data.dataset import DataContext, Sample
from sley_core.errors import SleyError, UsageError
from sley_core.files import CHECKPOINTS_FOLDER, COPIED_FILES, PLAN_FILE, WEIGHTS_FOLDER
from sley_core.plan.document import add_overrides, read_file
from sley_core.plan.load import resolve_plan
from sley_core.plan.loader import PluginLoader
from sley_core.plan.plan import Plan, check_changes, compare_plans
from sley_core.protocols import CheckpointFiles
from sley_core.records import GradientHandlerRecord
from sley_core.run_folder import read_attempt, slurm_job_id, torchrun_id, use_copied_files
from sley_core.weight_files.read import TensorReader, WeightFiles
from train_cli.console import print_line

if TYPE_CHECKING:
    from sley_core.checkpointing import SavedRun
    from sley_trainer.run import Run

SUMMARY = "summary.json"
"""The name of the file in a run folder that contains the totals of the run."""

AUTO = "auto"
"""The value of `--resume` that selects the run's own newest checkpoint, or starts the run if it has taken no step."""

RESTART = "restart"
"""Replaces a missing `--resume` if torchrun or SLURM has restarted the run. Selects the same checkpoint as `AUTO`."""


_EXCLUSIVE_KEYS = (("source", "files"), ("held_out", "held_out_files"), ("separator", "field"))
"""Pairs of keys that exclude each other in `[data]`. If a user changes one key of a pair, the other is removed."""


def run_folder(plan: Plan) -> Path:
    """Returns the run folder of `plan`. A relative `[run] folder` is relative to the current folder."""
    return Path(plan.run.folder, plan.run.name)


def copy_run_files(plan: Plan, folder: Path) -> None:
    """Copies files for `export` and `sample` into the run folder: the tokenizer with its chat template, and the configs next to
    the weights from which the run started. Raises OSError if a copy fails.
    """
    for (table, key), name in COPIED_FILES.items():
        source = getattr(getattr(plan, table).config, key, None)
        if not isinstance(source, Path) or source.resolve().is_relative_to(folder.resolve()):
            continue
        from sley_core.weight_files.read import CONFIG_FILE, GENERATION_CONFIG_FILE, TOKENIZER_FILES, config_folder

        source, target = config_folder(source), folder / name
        files = [
            (source / file_name, target / file_name) for file_name in (*TOKENIZER_FILES, CONFIG_FILE, GENERATION_CONFIG_FILE)
        ]
        if source.is_file():
            files = [(source, target if target.suffix else target / (CONFIG_FILE if table == "model" else TOKENIZER_FILES[0]))]
        for file, copy in files:
            if file.is_file():
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def load_run_plan(folder: Path, data_changes: Sequence[str] = ()) -> Plan:
    """Returns the resolved plan of the run in `folder`, even if the folder was moved. data_changes: changes to `[data]`, each
    as "key=VALUE". Raises UsageError "no-run" if `folder` has no plan, and the errors of loading a plan.
    """
    if not (folder / PLAN_FILE).is_file():
        raise UsageError("no-run", f"`{folder}` must be a run folder, but has no `{PLAN_FILE}`")
    document = use_copied_files(read_file(folder / PLAN_FILE), folder)
    document = add_overrides(document, [f"data.{change}" for change in data_changes])
    if changed_keys := {str(override.path[1]) for override in document.overrides}:
        removed_keys = {"samples_per_epoch"}  # holds only for the run's own data
        for pair in _EXCLUSIVE_KEYS:
            removed_keys |= set(pair) if changed_keys & set(pair) else set()
        removed_keys -= changed_keys
        table = {key: value for key, value in document.tables["data"].items() if key not in removed_keys}
        document = replace(document, tables={**document.tables, "data": table})
    return resolve_plan(document, PluginLoader())


def checkpoint_folder(plan: Plan, folder: Path) -> str:
    """Returns the path or URL of the checkpoint folder for a run of `plan` in `folder`."""
    return (plan.checkpoint.config.folder if plan.checkpoint else None) or str(folder.absolute() / CHECKPOINTS_FOLDER)


def _load_reader(plan: Plan | None) -> CheckpointFiles:
    """Returns the checkpoint reader of the plan's checkpointer, or of the default checkpointer if `plan` is None or has none.
    Imports torch. Raises PluginError "plugin-missing" if the checkpointer is not installed, and UsageError
    "no-checkpoint-files" if it has no reader.
    """
    reader = _find_reader(plan)
    if reader is None:
        name = plan.checkpoint.name if plan and plan.checkpoint else ""
        hint = "resume the run with `train-cli run --resume PATH`, and use its final weights"
        raise UsageError("no-checkpoint-files", f"only a run can read checkpoints of `{name}`", hint=hint)
    return reader


def _find_reader(plan: Plan | None) -> CheckpointFiles | None:  # None if the checkpointer has no reader
    from sley_core.checkpointing import checkpoint_files

    return checkpoint_files(PluginLoader() if plan is None else plan.loader, plan)


def _list_checkpoints(reader: CheckpointFiles, folder: str) -> list[str]:
    return [f"{folder.rstrip('/')}/{name}" for name in reader.names(folder)]


def _describe_checkpoint(reader: CheckpointFiles, path: str) -> "SavedRun | None":
    """Returns the description of the checkpoint at `path`; None if there is no checkpoint, or if it is damaged."""
    try:
        return reader.describe(path)
    except Exception:  # a file system may raise any error
        return None


def _read_weights_origin(folder: Path) -> tuple[str, int | None]:
    """Returns the id of the attempt that wrote the weights in `folder`, and the step of the weights; "" and None if the files
    do not record them. Raises RunError "weight-files" if a file cannot be read.
    """
    from sley_core.weight_files.read import SINGLE_FILE, open_safetensors

    file = next(iter(sorted(folder.glob("model*.safetensors"))), folder / SINGLE_FILE)
    with open_safetensors(file, "numpy") as content:
        metadata = content.metadata() or {}
    step = str(metadata.get("step", ""))
    return str(metadata.get("attempt", "")), int(step) if step.isdecimal() else None


def find_newest_weights(folder: Path, plan: Plan, *, best: bool = False) -> tuple[Path | str, int | None]:
    """Returns the path of the newest weights of the run in `folder`, and the step of these weights (None if it is not known).

    The newest weights are the final weights, or an intact checkpoint of a later step. best: whether to return instead the
    newest checkpoint that was the best when it was saved. Ignores weights of steps that the run discarded when it resumed from
    an earlier step or started over. Raises UsageError "no-weights" if there are no such weights.
    """
    attempt = read_attempt(folder)
    final: tuple[Path, int | None] | None = None
    if (folder / WEIGHTS_FOLDER).is_dir() and not best:
        writer, step = _read_weights_origin(folder / WEIGHTS_FOLDER)
        if attempt is None or step is None or attempt.includes_steps(writer, step):
            final = folder / WEIGHTS_FOLDER, step
    checkpoints = checkpoint_folder(plan, folder)
    if "://" in checkpoints or Path(checkpoints).is_dir():
        reader = _load_reader(plan)
        descriptions = {path: _describe_checkpoint(reader, path) for path in _list_checkpoints(reader, checkpoints)}
        readable = [(saved, path) for path, saved in descriptions.items() if saved is not None]
        for saved, path in sorted(readable, key=lambda pair: pair[0].step, reverse=True):
            if best and not saved.is_best:
                continue
            if final is not None and (final[1] is None or final[1] >= saved.step):
                break
            if (attempt is None or attempt.shares_steps(saved.lineage, saved.step)) and reader.is_intact(path):
                return path, saved.step
    if final is None:
        if best:
            message = f"the run in `{folder}` has written no best checkpoint"
            raise UsageError("no-weights", message, hint="add `[evaluation] keep_best` to the plan")
        hint = "wait until the run ends, or add `[checkpoint]` to its plan; a failed run writes no final weights"
        raise UsageError("no-weights", f"the run in `{folder}` has no weights and no checkpoint", hint=hint)
    return final


def open_weights(run: str, *, best: bool) -> tuple[Plan, TensorReader]:
    """Returns the plan and the weights of a run or checkpoint, and prints the origin of the weights. run: a run folder, or the
    path or URL of a checkpoint. best: whether to use the best checkpoint of a run folder instead of its newest weights. Raises
    UsageError: "no-run" if `run` is neither, or if `best` is set and `run` is not a run folder; "no-weights" if the run has no
    such weights.
    """
    from sley_core.checkpointing import load_plan_and_weights

    path: Path | str = run
    plan = None
    if (Path(run) / PLAN_FILE).is_file():
        plan = load_run_plan(Path(run))
        path, step = find_newest_weights(Path(run), plan, best=best)
        if isinstance(path, Path):
            print_line(f"using the weights{'' if step is None else f' of step {step}'} in {path}")
            return plan, WeightFiles(path)
    elif best:
        raise UsageError("no-run", f"`--best` needs a run folder, but `{run}` is not one")
    can_exist = "://" in str(path) or Path(path).is_dir()
    checkpoint = _load_reader(plan).open(str(path)) if can_exist else None
    if checkpoint is None:
        raise UsageError("no-run", f"`{run}` must be a run folder with a `{PLAN_FILE}`, or a checkpoint")
    saved_plan, source = load_plan_and_weights(checkpoint)
    progress = f"step {checkpoint.description.step} of {saved_plan.run.steps}"
    print_line(f"using the weights after {progress} of the run {saved_plan.run.name!r}, from {checkpoint.place}")
    return plan or saved_plan, source


def can_resume(plan: Plan, folder: Path) -> bool:
    """Returns whether the run in `folder` may have a checkpoint to continue from: its own, or the checkpoint at its start."""
    checkpoints, attempt = checkpoint_folder(plan, folder), read_attempt(folder)
    if "://" in checkpoints or (attempt is not None and attempt.loaded_path):
        return True
    try:
        return Path(checkpoints).is_dir() and bool(_load_reader(plan).names(checkpoints))
    except SleyError:  # no installed package can read the checkpoints
        return False


def check_checkpoint_path(plan: Plan, path: str) -> None:
    """Raises UsageError "no-checkpoint" if `path` is neither a checkpoint nor a folder of checkpoints. Does not check URLs."""
    if "://" in path or (reader := _find_reader(plan)) is None:
        return
    try:
        is_missing = reader.describe(path) is None and not reader.names(path)
    except SleyError:  # a damaged checkpoint, which loading reports
        return
    if is_missing:
        hint = "pass a checkpoint, or a folder of checkpoints such as `runs/NAME/checkpoints`"
        raise UsageError("no-checkpoint", f"there is no checkpoint in `{path}`", hint=hint)


def is_restarted() -> bool:
    """Returns whether torchrun or SLURM has restarted this run."""
    restarts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count != "0" for count in restarts)


def is_folder_continued(plan: Plan, resume: str | None) -> bool:
    """Returns whether a run of `plan` continues in its existing folder instead of replacing the folder. It does if it resumes
    the same run, or if torchrun or SLURM has restarted the same job. resume: the value of `--resume`; None if it is missing.
    """
    folder = run_folder(plan)
    if resume == AUTO:
        return True
    if is_restarted():
        attempt = read_attempt(folder)
        return resume is not None or attempt is None or attempt.slurm_job_id == slurm_job_id()
    if resume is None:
        return False
    # The path is compared with and without resolved links, since the checkpoint folder may be a link.
    paths = {Path(resume).resolve(), Path(os.path.abspath(resume))}  # noqa: PTH100  # does not follow links
    if any(path.is_relative_to(base) for path in paths for base in (folder.resolve(), folder.absolute())):
        return True
    # A checkpoint in another folder may also belong to this run.
    attempt = read_attempt(folder)
    if attempt is None or (reader := _find_reader(plan)) is None:
        return False
    candidates = (_describe_checkpoint(reader, path) for path in _list_checkpoints(reader, resume))
    saved = _describe_checkpoint(reader, resume) or next(candidates, None)
    return saved is not None and attempt.is_writer_of(saved.lineage)


def is_finished(run: "Run", folder: Path) -> bool:
    """Returns whether the run in `folder` has finished. All ranks must call it. Raises PlanError "resume-differs" if it has
    finished with a plan that differs from the plan of `run`.
    """
    text = ""
    if run.world.rank == 0:  # rank 0 owns the folder, and decides for all ranks
        with suppress(OSError, ValueError, KeyError, TypeError):  # without a complete summary the run has not finished
            content = json.loads((folder / SUMMARY).read_text("utf-8"))
            has_weights = run.plan.run.final_weights == "none" or (folder / WEIGHTS_FOLDER).is_dir()
            if content["outcome"] == "finished" and content["steps"] >= run.plan.run.steps and has_weights:
                text = (folder / PLAN_FILE).read_text("utf-8")
    saved_plan: str = run.groups["control"].gather_objects(text, label="whether the run has finished")[0]
    if saved_plan:
        check_changes(compare_plans(saved_plan, run.resolved_plan.to_toml()))
    return bool(saved_plan)


def resume_run(run: "Run", folder: Path, resume: str | None) -> list[str]:
    """Loads a checkpoint into `run`, and returns notes for the user. All ranks must call it. resume: the path of the
    checkpoint, `AUTO` or `RESTART`; None loads nothing.

    A restarted run continues from its own newest checkpoint, not from the checkpoint at its start. A run without a checkpoint
    starts at step 1. If such a run has already taken steps, it repeats them only if torchrun restarts it, and not if the user
    has passed `AUTO` with a plan that saves no checkpoints; otherwise, raises UsageError "never-anew".
    """
    if resume is None:
        return []
    attempt = read_attempt(folder) if run.world.rank == 0 else None
    can_start_over = is_restarted() and (resume != AUTO or run.plan.checkpoint is not None)
    if resume == RESTART:
        resume = AUTO
    elif resume != AUTO and is_restarted():
        has_started = attempt is not None and attempt.requested_path == resume
        # All ranks join: they have the same command and environment, so all of them take this branch.
        if run.groups["control"].gather_objects(has_started, label="where the run has started")[0]:
            resume = AUTO
    # The torchrun that started the attempt in the folder may restart it at step 1.
    allow_fresh_start = can_start_over and attempt is not None and attempt.torchrun_id == torchrun_id() != ""
    result = run.load_checkpoint(resume, allow_fresh_start=allow_fresh_start)
    if result is None:
        return ["there is no checkpoint yet, so the run starts at step 1"]
    notes = [f"skipped {path}: {', '.join(map(str, damages))}" for path, damages in result.damaged_checkpoints]
    return [*notes, f"continuing after step {result.step} of {run.plan.run.steps}, from {result.path}", *result.notes]


_OUTPUT_TABLES = ("checkpoint", "profile")  # the tables of a plan whose only effect is that a run writes files

_LAYOUT_TABLES = ("pipeline", "partition", "link", "weights", "sequence", "activations", "offload")
"""The tables of a plan that determine where and when a run computes its values, but that change no value."""


def read_only_plan(plan: Plan) -> Plan:
    """Returns a plan like `plan`, with the same layout, but without the tables that make a run write files."""
    return _replace_tables(plan, _remove_tables(plan, _OUTPUT_TABLES))


def one_process_plan(plan: Plan) -> Plan:
    """Returns a plan that computes the same values as `plan` in one process, without parallel axes, reducers or offload. Its
    batches, microbatches, seed, precision, `reduction` and gradient transforms are the same as in `plan`.
    """
    tables = _remove_tables(plan, (*_OUTPUT_TABLES, *_LAYOUT_TABLES))
    tables["parallel"] = {**tables.get("parallel", {}), "dp": 1, "pp": 1, "sp": 1, "wp": 1}
    handlers = zip(tables.get("gradient_handlers", []), plan.gradient_handlers, strict=False)
    tables["gradient_handlers"] = [table for table, handler in handlers if not _belongs_to_layout(handler.record)]
    return _replace_tables(plan, tables)


def has_layout(plan: Plan) -> bool:
    """Returns whether the plan has a table of `_LAYOUT_TABLES`, or a gradient handler that only serves a layout."""
    tables = plan.document.tables
    handlers = plan.gradient_handlers
    return any(tables.get(key) for key in _LAYOUT_TABLES) or any(_belongs_to_layout(handler.record) for handler in handlers)


@contextmanager
def open_trained_run(folder: Path, plan: Plan, *, best: bool = False, with_evaluation: bool = False) -> Iterator["Run"]:
    """Yields a one-process run with the newest weights of the run in `folder`, and prints the origin of the weights. plan: from
    `load_run_plan`. best: whether to use the best checkpoint instead. with_evaluation: whether the run can evaluate; if not,
    `NoData` replaces its data, unless a factory makes the data. Raises UsageError "no-weights".
    """
    from sley_core.comm.world import World
    from sley_trainer.assemble import assemble

    _, weights = open_weights(str(folder), best=best)
    tables = one_process_plan(plan).document.tables
    tables["run"]["device"] = "auto"
    config: Any = plan.model.config
    if getattr(config, "weights", None) is not None:  # all values are loaded below
        tables["model"] = {"use": plan.model.name, **config.without_weights().model_dump(mode="json", exclude_none=True)}
    evaluation = tables.pop("evaluation", {"every": 1})
    if with_evaluation:
        # If `load_run_plan` has changed [data], the plan may not have evaluated held-out samples before.
        tables["evaluation"] = {**evaluation, **({"held_out": True} if plan.document.overrides else {})}
    else:
        tables["batch"] = {"global_size": 1, "micro_size": 1}  # the run only predicts single samples
        if plan.data.record is not None:  # the fields of a factory's dataset may depend on its first sample
            tables["data"] = _make_placeholder_table(plan)
    with assemble(_replace_tables(plan, tables), World.alone("auto")) as run:
        run.load_weights((name, weights.tensor(name)) for name in weights.names)
        yield run


class NoData:
    """A placeholder for the dataset of a run that reads no samples: its length is 1, but reading a sample fails."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        raise AssertionError(f"sample {index} of a placeholder dataset")


def _make_placeholder_table(plan: Plan) -> dict[str, Any]:
    """Returns a `[data]` table with `NoData`, and with the fields and sizes of the plan's data."""
    from sley_core.data.batches import open_dataset

    info = open_dataset(plan.data, DataContext(plan.run.seed)).info
    fields = {
        name: {key: value for key, value in asdict(field).items() if value is not None} for name, field in info.fields.items()
    }
    table = {"factory": f"{__name__}:NoData", "fields": fields, "vocab_size": info.vocab_size, "sequence": info.sequence}
    return {key: value for key, value in table.items() if value is not None}


def _belongs_to_layout(record: object) -> bool:
    """Returns whether a gradient handler with this record only serves a layout, and does not change results."""
    assert isinstance(record, GradientHandlerRecord), record
    return record.role in ("reducer", "tie")  # transforms change results


def _remove_tables(plan: Plan, keys: tuple[str, ...]) -> dict[str, Any]:
    """Returns a copy of the plan's tables without the tables `keys`, and without the evaluation keys that need checkpoints."""
    tables = {key: deepcopy(value) for key, value in plan.document.tables.items() if key not in keys}
    for key in ("keep_best", "patience"):
        tables.get("evaluation", {}).pop(key, None)
    return tables


def _replace_tables(plan: Plan, tables: dict[str, Any]) -> Plan:
    return resolve_plan(replace(plan.document, tables=tables), plan.loader)
