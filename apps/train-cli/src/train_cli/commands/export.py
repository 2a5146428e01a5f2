"""`train-cli export`: weights of a run, at its end or in a checkpoint, as other programs read them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sley_core.attempt import PLAN
from sley_core.errors import UsageError
from sley_core.records import ModelRecord
from train_cli.console import say
from train_cli.run_files import newest_weights, plan_of_run
from train_cli.saved import files_of, is_remote

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.weight_files.read import Tensors


class ExportFormat(StrEnum):
    """Whose names and layout the files have."""

    safetensors = "safetensors"
    huggingface = "huggingface"


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The folder of a run, runs/NAME, of which the newest weights count; or a checkpoint, by its folder or URL.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A folder that does not exist yet, or is empty.")],
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors: any model, by the names of its own state. huggingface: models.llama, as transformers reads it.",
        ),
    ] = ExportFormat.safetensors,
    max_file_mb: Annotated[
        int, typer.Option("--max-file-mb", metavar="N", min=1, help="The size of a file of weights at most.")
    ] = 5000,
) -> None:
    """Write a run's newest weights, or those of a checkpoint, for other programs, one tensor in memory at a time."""
    plan, source = _source(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError("export-folder", f"`{out}` exists and is not an empty folder", hint="choose another `--out`")
    to = out.absolute()
    if form is ExportFormat.huggingface:
        files = _exporter(plan, form)(plan, source, to, max_file_mb * 10**6)
    else:
        from train_cli.plain_export import export_safetensors

        files, names = export_safetensors(plan, source, to, max_file_mb * 10**6)
        if names.module:
            say(f"names are those of `{names.module}.load_state_dict`")
        if names.missing:
            more = f", and {len(names.missing) - 1} more" if len(names.missing) > 1 else ""
            say(f"its state also has {names.missing[0]!r}{more}, which no layer of the run uses: load with `strict=False`")
    many = "1 file" if len(files) == 1 else f"{len(files)} files"
    say(f"{len(source.names)} tensors in {many}: {out}")


def _exporter(plan: Plan, form: ExportFormat) -> Callable[[Plan, Tensors, Path, int], list[str]]:
    """Returns what exports the plan's model in a format of its own; raises UsageError "export-format" if it has none."""
    record = plan.model.record
    name = record.exports.get(form.value) if isinstance(record, ModelRecord) else None
    if name is None:
        hint = "`--format safetensors` gives any model's weights"
        raise UsageError("export-format", f"`{plan.model.name}` has no layout of Hugging Face", hint=hint)
    module, _, attribute = name.partition(":")
    found: Callable[[Plan, Tensors, Path, int], list[str]] = getattr(import_module(module), attribute)
    return found


def _source(run: str) -> tuple[Plan, Tensors]:
    """Returns the plan and the weights of a checkpoint, or the newest ones of a run; says which."""
    from sley_core.run_state.tensors import plan_and_weights
    from sley_core.weight_files.read import WeightFiles

    path: Path | str = run
    plan = None
    if (Path(run) / PLAN).is_file():
        plan = plan_of_run(Path(run))
        path, step = newest_weights(Path(run), plan)
        if isinstance(path, Path):
            say(f"the weights{'' if step is None else f' of step {step}'} in {path}")
            return plan, WeightFiles(path)
    is_there = is_remote(str(path)) or Path(path).is_dir()
    found = files_of(plan).open(str(path)) if is_there else None
    if found is None:
        raise UsageError("no-run", f"`{run}` is neither the folder of a run, with its `{PLAN}`, nor a checkpoint")
    own, source = plan_and_weights(found)
    say(f"after step {found.description.step} of {own.run.steps} of the run {own.run.name!r}, from {found.place}")
    return plan or own, source
