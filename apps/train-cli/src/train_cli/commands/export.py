"""`train-cli export`: writes the weights of a run or checkpoint under the names that other programs use.

The registry names a weight by its layer, such as `3.attn.weight` in the fourth layer. If the layers are parts of a module, this
weight may have the name `h.2.attn.weight` in the module. Exports have the names in the module.
"""

import json
import shutil
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sley_core.errors import RunError, UsageError
from sley_core.files import PLAN_FILE, replace_atomically
from sley_core.plan.plan import Plan
from sley_core.records import AdaptersRecord, ModelRecord
from sley_core.table import expand_path
from sley_core.weight_files import read
from train_cli.console import BestOption, format_count, print_line
from train_cli.saved_run import open_weights

if TYPE_CHECKING:
    from torch import nn


class ExportFormat(StrEnum):
    """The value of `--format`, which selects the names and the layout of the exported files."""

    safetensors = "safetensors"
    huggingface = "huggingface"
    peft = "peft"


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run folder, runs/NAME, for its newest weights; or the folder or URL of a checkpoint."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new or empty folder.")],
    export_format: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors: any model, with its state-dict names. huggingface: hf.decoder and models.llama. peft: the "
            "adapters of these models.",
        ),
    ] = ExportFormat.safetensors,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapters of the run into its weights.")] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Load a huggingface export with transformers, and compare its logits.")
    ] = True,
    best: BestOption = False,
) -> None:
    """Write the newest weights of a run, or the weights of a checkpoint, for other programs."""
    plan, source = open_weights(run, best=best)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError("export-folder", f"`{out}` exists and is not an empty folder", hint="choose another `--out`")
    folder = out.absolute()
    if merge and export_format is ExportFormat.peft:
        message = "`--merge` leaves no adapters for `--format peft`"
        raise UsageError("export-adapters", message, hint="use only one of these options")
    if merge:
        source = read.merge_adapters(plan, source)
    elif plan.adapters is not None and export_format is ExportFormat.huggingface:
        hint = "use `--merge` for a whole model, or `--format peft` for the adapters"
        raise UsageError("export-adapters", "the format of a transformers model cannot store adapters", hint=hint)
    if export_format is ExportFormat.peft:
        _export_adapters(plan, source, Path(run), folder)
        print_line(f"the adapters for peft: {out}")
        return
    if export_format is ExportFormat.huggingface:
        num_files = _export_hugging_face(plan, source, folder, check=check)
    else:
        num_files = _export_safetensors(plan, source, folder)
    print_line(f"weights in {format_count(num_files, 'file')}: {out}")


def _export_hugging_face(plan: Plan, source: read.TensorReader, out: Path, *, check: bool) -> int:
    """Writes the weights in `source` as a transformers model into the new folder `out`; returns the number of weight files.
    check: whether to load the model with transformers, and compare its logits with the logits of the run's layers. Raises
    UsageError "export-format" if transformers has no such model, and RunError "export-differs" if the logits differ.
    """
    from sley_core.weight_files.write import MAX_FILE_BYTES, write_tensors

    model = make_hugging_face_model(plan, source)
    if model is None:
        hint = "use `--format safetensors`, which works for any model"
        raise UsageError("export-format", f"`{plan.model.name}` cannot be exported in Hugging Face's format", hint=hint)
    write_others = partial(write_config_files, plan, model)
    names = model.names if model.files is None else {name: name for name in model.files.names}
    files = write_tensors(out, source if model.files is None else model.files, names.items(), MAX_FILE_BYTES, write_others)
    if check and find_spec("sley_hf") is None:
        print_line("the exported model was not checked; install sley-hf for the check")
    elif check:
        import_module("sley_hf.export").check_export(plan, model, source, out)
        print_line("transformers computes the run's logits")
    return len(files)


def _make_generation_config(plan: Plan, model: read.HuggingFaceModel) -> dict[str, Any]:
    """Returns the content of `generation_config.json`: the initial weights' file, if any, with all end tokens added."""
    content: dict[str, Any] = {}
    folder = read.start_folder(plan)
    if folder is not None and (folder / read.GENERATION_CONFIG_FILE).is_file():
        content = json.loads((folder / read.GENERATION_CONFIG_FILE).read_text("utf-8"))
    content = {key: model.config[key] for key in read.IDS if model.config.get(key) is not None} | content
    ends: list[int] = []
    for value in (content.get("eos_token_id"), model.config.get("eos_token_id"), read.end_token_id(plan)):
        values = value if isinstance(value, list) else [value]
        ends += [token for token in values if token is not None and token not in ends]
    if ends:
        content["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return content


def _find_tokenizer_files(plan: Plan) -> Iterator[tuple[Path, str]]:
    """Yields the files of the data's tokenizer, or else of the initial weights' tokenizer, and their names in an export."""
    data = plan.data.config
    tokenizer, template = getattr(data, "tokenizer", None), getattr(data, "template", None)
    if tokenizer is not None and tokenizer.is_file():
        yield tokenizer, read.TOKENIZER_FILES[0]
    folder = tokenizer or (None if hasattr(data, "tokenizer") else read.start_folder(plan))
    names = [name for name in read.TOKENIZER_FILES if template is None or not name.startswith("chat_template")]
    yield from ((folder / name, name) for name in names if folder is not None and (folder / name).is_file())
    if template is not None:
        yield template, "chat_template.jinja"


def write_config_files(plan: Plan, model: read.HuggingFaceModel, folder: Path) -> None:
    """Writes the config and tokenizer files of the exported `model` into `folder`, with random tokenization turned off."""
    contents = {read.CONFIG_FILE: dict(model.config), read.GENERATION_CONFIG_FILE: _make_generation_config(plan, model)}
    for name, content in contents.items():
        if content:
            with replace_atomically(folder / name) as file:
                file.write(json.dumps(content, indent=2).encode() + b"\n")
    for source, name in _find_tokenizer_files(plan):
        shutil.copyfile(source, folder / name)
    if (path := folder / read.TOKENIZER_FILES[0]).is_file():
        text = path.read_text("utf-8")
        if (new_text := read.deterministic_tokenizer_json(text)) != text:
            with replace_atomically(path) as file:
                file.write(new_text.encode())


def _export_adapters(plan: Plan, source: read.TensorReader, run: Path, out: Path) -> None:
    """Writes the adapters in `source` for peft into the new folder `out`. run: the run folder. Raises UsageError
    "export-adapters" if the run has no peft adapters, and RunError "export-differs" if peft computes different values.
    """
    from sley_core.checkpointing import SavedWeights

    record = None if plan.adapters is None else plan.adapters.record
    model = make_hugging_face_model(plan, read.merge_adapters(plan, source))
    if not isinstance(record, AdaptersRecord) or record.export is None or model is None:
        message = "the run has no adapters that can be exported for peft"
        raise UsageError("export-adapters", message, hint="use `--format safetensors`")
    plan_text = source.saved.description.plan if isinstance(source, SavedWeights) else (run / PLAN_FILE).read_text("utf-8")
    tables = tomllib.loads(plan_text)  # not from `plan`, whose paths lead to copies in the run folder without weights
    weights = tables["model"].get("weights")
    base = None if weights is None else Path(tables.get("source_folder", "."), expand_path(weights))
    record.load(record.export)(plan, source, model.names, base, out)


def make_hugging_face_model(plan: Plan, source: read.TensorReader) -> read.HuggingFaceModel | None:
    """Returns the plan's model as a transformers model with the weights in `source`; None if transformers has no such model."""
    record = plan.model.record
    if not isinstance(record, ModelRecord) or record.hugging_face is None:
        return None
    model: read.HuggingFaceModel = record.load(record.hugging_face)(plan, source)
    return model


def _export_safetensors(plan: Plan, source: read.TensorReader, out: Path) -> int:
    """Writes the weights in `source` into the new folder `out`, and returns the number of files. A tied weight is written under
    each of its names, as in a state dict. If the names are those of a module's state dict, prints the module's class. Raises
    RunError "weights-mismatch" if the factory no longer makes the run's model.
    """
    from sley_core.weight_files.write import MAX_FILE_BYTES, write_tensors

    record = plan.model.record
    if isinstance(record, ModelRecord) and record.uses_layer_names:
        names, module = {name: [name] for name in source.names}, None
    else:
        names, module = _find_module_names(plan)
        if differing_names := sorted(names.keys() ^ set(source.names)):
            owner = "the run's weights have" if differing_names[0] in source.names else "the model now has"
            message = f"the factory no longer returns the run's model: only {owner} {differing_names[0]!r}"
            raise RunError("weights-mismatch", message, hint="restore the code and files of the run")
    files = write_tensors(out, source, [(name, exported) for name in source.names for exported in names[name]], MAX_FILE_BYTES)
    if module is not None:
        print_line(f"the names are the names in the state dict of `{type(module).__name__}`")
    return len(files)


def _find_module_names(plan: Plan) -> "tuple[dict[str, list[str]], nn.Module | None]":
    """Calls the factory on the meta device, and finds the outermost module that contains all of the model's parameters. Returns
    the state-dict names of each weight and persistent buffer in this module, keyed by its name in the run, and the module. A
    tied weight has several names. If no single module has all parameters, returns the names in the registry and None.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    from sley_core.data.batches import open_dataset
    from sley_core.data.dataset import DataContext
    from sley_core.engine.registry import ParameterRegistry
    from sley_trainer.assemble import build_meta_model

    info = open_dataset(plan.data, DataContext(plan.run.seed, "train")).info
    parents: dict[int, nn.Module] = {}

    def record_parent(parent: "nn.Module", _name: str, _child: "nn.Module | None") -> None:
        parents[id(parent)] = parent

    hook: Any = record_parent
    with register_module_module_registration_hook(hook):
        model = build_meta_model(plan, info)
    registry = ParameterRegistry([model.layers])
    weights = {id(param.parameter): param.name for param in registry}
    buffers = {
        (id(module), name): f"{prefix}.{name}"
        for layer in model.layers
        for prefix, module in layer.module.named_modules(prefix=layer.name)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    layers = {id(layer.module) for layer in model.layers}
    candidates = [
        module
        for key, module in parents.items()
        if key not in layers and weights.keys() <= {id(parameter) for parameter in module.parameters()}
    ]
    inner = {id(child) for module in candidates for child in module.modules() if child is not module}
    outermost = [module for module in candidates if id(module) not in inner]
    if len(outermost) != 1:
        names = {param.name: [param.name, *param.aliases] for param in registry}
        return names | {name: [name] for name in buffers.values()}, None
    (root,) = outermost
    names = {name: [] for name in (*weights.values(), *buffers.values())}
    for prefix, module in root.named_modules(remove_duplicate=False):
        registered = {name: weights.get(id(parameter)) for name, parameter in module._parameters.items()}
        registered |= {name: buffers.get((id(module), name)) for name in module._buffers}
        for name, weight in registered.items():
            if weight is not None:
                names[weight].append(f"{prefix}.{name}".lstrip("."))
    return names, root
