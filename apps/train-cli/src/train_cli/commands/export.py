"""`train-cli export`: weights of a run, at its end or in a checkpoint, under the names that other programs use.

A factory returns layers, and the registry calls a weight by its layer: `3.attn.weight` for the fourth of a list. The layers are
mostly parts of a module that the factory made and let go of, in which the same weight is `h.2.attn.weight`. So the factory is
called once more, on meta, with a hook that sees which modules register others: the module that has all of the model's
parameters is that one, and its `load_state_dict` takes these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from sley_core.attempt import PLAN
from sley_core.errors import RunError, UsageError
from sley_core.records import ModelRecord
from train_cli.console import say
from train_cli.saved import files_of, is_remote, newest_weights, plan_of_run

if TYPE_CHECKING:
    from torch import nn

    from sley_core.model.layers import Model
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
        files = _export_safetensors(plan, source, to, max_file_mb * 10**6)
    many = "1 file" if len(files) == 1 else f"{len(files)} files"
    say(f"{len(source.names)} tensors in {many}: {out}")


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
    checkpoint = files_of(plan).open(str(path)) if is_there else None
    if checkpoint is None:
        raise UsageError("no-run", f"`{run}` is neither the folder of a run, with its `{PLAN}`, nor a checkpoint")
    own, source = plan_and_weights(checkpoint)
    say(f"after step {checkpoint.description.step} of {own.run.steps} of the run {own.run.name!r}, from {checkpoint.place}")
    return plan or own, source


def _exporter(plan: Plan, form: ExportFormat) -> Callable[[Plan, Tensors, Path, int], list[str]]:
    """Returns the model's own exporter for a format; raises UsageError "export-format" if it has none."""
    record = plan.model.record
    name = record.exports.get(form.value) if isinstance(record, ModelRecord) else None
    if name is None:
        hint = "`--format safetensors` gives any model's weights"
        raise UsageError("export-format", f"`{plan.model.name}` has no layout of Hugging Face", hint=hint)
    module, _, attribute = name.partition(":")
    exporter: Callable[[Plan, Tensors, Path, int], list[str]] = getattr(import_module(module), attribute)
    return exporter


def _export_safetensors(plan: Plan, source: Tensors, out: Path, max_file_bytes: int) -> list[str]:
    """Writes the weights in `source` into the new folder `out`, a tied weight under each of its names, as in a state; returns
    the files, and says whose names they have.

    Raises RunError "weights-mismatch" if the factory makes another model now.
    """
    from sley_core.weight_files.write import write_tensors

    record = plan.model.record
    if isinstance(record, ModelRecord) and record.names_are_own:
        own = ModuleNames({name: [name] for name in source.names}, "", [])
    else:
        own = own_names(plan)
        if odd := sorted(own.names.keys() ^ set(source.names)):
            which = "the run's weights have" if odd[0] in source.names else "the model now has"
            message = f"the factory does not make the run's model any more: only {which} {odd[0]!r}"
            raise RunError("weights-mismatch", message, hint="restore the code and the files that the run had")
    pairs = [(ours, theirs) for ours in source.names for theirs in own.names[ours]]
    files = write_tensors(out, source, pairs, max_file_bytes)
    if own.module:
        say(f"names are those of `{own.module}.load_state_dict`")
    if own.missing:
        more = f", and {len(own.missing) - 1} more" if len(own.missing) > 1 else ""
        say(f"its state also has {own.missing[0]!r}{more}, which no layer of the run uses: load with `strict=False`")
    return files


class ModuleNames(NamedTuple):
    """names: the factory's own module's names, by the registry's name, of parameters and buffers. module: its class; empty if
    the model is no part of one module, so that names are those of the registry. missing: names in its state that the model has
    not.
    """

    names: Mapping[str, list[str]]
    module: str
    missing: list[str]


def own_names(plan: Plan) -> ModuleNames:
    """Returns the names that the model's own module has for its weights. Imports and calls the factory, without memory for
    weights.

    Raises what the data and the factory raise.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    from sley_core.assemble import draft_model
    from sley_core.data.dataset import DataContext
    from sley_core.data.factory import open_dataset

    info = open_dataset(plan.data, DataContext(plan.run.seed, "train")).info
    holders: dict[int, nn.Module] = {}

    def note(holder: nn.Module, _name: str, _module: nn.Module | None) -> None:
        holders[id(holder)] = holder

    hook: Any = note
    handle = register_module_module_registration_hook(hook)
    try:
        model = draft_model(plan, info)
    finally:
        handle.remove()
    return _names(model, holders)


def _names(model: Model, holders: Mapping[int, nn.Module]) -> ModuleNames:
    """Returns the names in the one module among `holders` that has all parameters and is in no other such one."""
    from sley_core.engine.registry import ParameterRegistry

    registry = ParameterRegistry([model.layers])
    buffers = dict(_buffers_of(model))
    parameters = {id(param.parameter): param.name for param in registry}
    layers = {id(layer.module) for layer in model.layers}
    whole = [
        module
        for key, module in holders.items()
        if key not in layers and parameters.keys() <= {id(parameter) for parameter in module.parameters()}
    ]
    inner = {id(child) for module in whole for child in module.modules() if child is not module}
    outermost = [module for module in whole if id(module) not in inner]
    if len(outermost) != 1:
        names = {param.name: [param.name, *param.aliases] for param in registry}
        return ModuleNames(names | {name: [name] for name in buffers.values()}, "", [])
    (root,) = outermost
    names = {name: [] for name in (*parameters.values(), *buffers.values())}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if id(parameter) in parameters:
                names[parameters[id(parameter)]].append(f"{prefix}.{attribute}".lstrip("."))
        for attribute in module._buffers:
            if (id(module), attribute) in buffers:
                names[buffers[id(module), attribute]].append(f"{prefix}.{attribute}".lstrip("."))
    known = {name for several in names.values() for name in several}
    return ModuleNames(names, type(root).__name__, [name for name in root.state_dict() if name not in known])


def _buffers_of(model: Model) -> Iterable[tuple[tuple[int, str], str]]:
    """Yields the place, and the registry's name, of each buffer that belongs to the model's state."""
    for layer in model.layers:
        for prefix, module in layer.module.named_modules(prefix=layer.name):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield (id(module), name), f"{prefix}.{name}"
