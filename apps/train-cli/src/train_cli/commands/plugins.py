"""`train-cli plugins` lists the installed plugins, their records and options. `train-cli new KIND NAME` writes a complete
plugin package, which passes its tests, as a starting point.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from enum import StrEnum
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from sley_core.errors import EXIT_OK, EXIT_RUN_FAILED, PlanError, PluginError, UsageError, suggestion
from sley_core.plan.document import to_plain_data
from sley_core.plan.kinds import COMPONENTS, type_name
from sley_core.plan.loader import CORE, FIRST_PARTY, Loader, Plugin, find_plugins
from sley_core.table import describe_type
from train_cli import templates
from train_cli.console import FormatOption, OutputFormat, print_line
from train_cli.main import import_optional


def plugins(
    name: Annotated[
        str | None, typer.Argument(help="A plugin (dp) or a record (dp.bucketed); or `check`, and then DIST.")
    ] = None,
    dist: Annotated[
        str | None, typer.Argument(help="With `check`: an installed distribution, such as sley-dp.", show_default=False)
    ] = None,
    output_format: FormatOption = OutputFormat.text,
) -> None:
    """List the installed plugins and their records; with NAME, the options, types and defaults of its records.

    `plugins check DIST` runs the contract tests of every record in DIST.
    """
    if name == "check":
        raise typer.Exit(_check_distribution(dist, output_format))
    if dist is not None:
        raise UsageError("plugins", f"unexpected argument `{dist}`", hint="use `train-cli plugins check DIST`")
    loader = Loader()
    if name is None:
        content = [_plugin_entry(plugin, loader) for plugin in loader.names()]
        text = _entries_text(content)
    else:
        plugin_name, _, record_name = name.partition(".")
        content = list(_record_descriptions(loader.load(plugin_name), record_name))
        text = _descriptions_text(content)
    typer.echo(json.dumps(content, indent=2) if output_format is OutputFormat.json else text)


def _check_distribution(dist: str | None, output_format: OutputFormat) -> int:
    """Checks every plugin in `dist`, prints the verdicts, and returns the exit code: 0 if no check failed."""
    if dist is None:
        raise UsageError(
            "plugins", "`plugins check` needs a distribution", hint="use `train-cli plugins check sley-dp`, for example"
        )
    certify = import_optional("testing", "sley_testing.certify", "`train-cli plugins check`").certify
    verdicts = []
    for verdict in certify(dist):
        verdicts.append(verdict)
        if output_format is OutputFormat.text:
            typer.echo(verdict)
    if output_format is OutputFormat.json:
        typer.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    if not verdicts:
        message = f"`{dist}` is not installed, or has no plugin for Sley"
        raise PluginError("plugin-missing", message, hint="use `train-cli plugins` to list the installed ones")
    return EXIT_RUN_FAILED if any(verdict.status == "failed" for verdict in verdicts) else EXIT_OK


def _plugin_entry(name: str, loader: Loader) -> dict[str, Any]:
    """Returns the JSON entry of one plugin, with the error if it cannot be loaded."""
    dists = loader.sources(name)
    entry: dict[str, Any] = {
        "name": name,
        "dist": ", ".join(dist.dist for dist in dists),
        "version": ", ".join(dist.version for dist in dists),
        "records": {},
        "error": None,
    }
    try:
        records = loader.load(name).records.values()
    except PluginError as error:
        entry["error"] = error.diagnostics[0].message
    else:
        for record in records:
            entry["records"].setdefault(type_name(type(record)), []).append(f"{name}.{record.name}")
    return entry


def _entries_text(entries: list[dict[str, Any]]) -> str:
    lines = []
    width = max((len(record_type) + 1 for entry in entries for record_type in entry["records"]), default=0)
    for entry in entries:
        lines.append(f"{entry['name']}  ({entry['dist']} {entry['version']})")
        if entry["error"]:
            lines.append(f"  broken: {entry['error']}")
        for record_type, names in entry["records"].items():
            lines.append(f"  {record_type + ':':{width}} {', '.join(names)}")
    return "\n".join(lines)


def _record_descriptions(plugin: Plugin, record_name: str) -> Iterator[dict[str, Any]]:
    """Yields a JSON description of each record of the plugin. record_name: the name of a record, or "" for all. Raises
    PlanError "unknown-record" if there is none.
    """
    records = [record for record in plugin.records.values() if record_name in ("", record.name)]
    if not records:
        names = [f"{plugin.name}.{name}" for name in plugin.records]
        listed = f"use one of {', '.join(f'`{name}`' for name in names)}" if names else None
        hint = suggestion(f"{plugin.name}.{record_name}", names, listed)
        raise PlanError("unknown-record", f"{plugin.label} has no record `{record_name}`", hint=hint)
    headers = {spec.record_type: spec.header for spec in COMPONENTS}
    for record in records:
        yield {
            "name": f"{plugin.name}.{record.name}",
            "kind": type_name(type(record)),
            "table": headers.get(type(record)),
            "summary": " ".join((record.config.__doc__ or "").split()),
            "options": [_option_entry(key, info) for key, info in record.config.model_fields.items()],
        }


def _option_entry(key: str, info: FieldInfo) -> dict[str, Any]:
    """Returns the JSON entry of one option: its name, type, default and description."""
    option: dict[str, Any] = {
        "name": key,
        "takes": describe_type(info.annotation, info.metadata),
        "required": info.is_required(),
    }
    if not info.is_required():
        option["default"] = "computed" if info.default_factory is not None else to_plain_data(info.default)
    return {**option, "description": info.description}


def _descriptions_text(records: list[dict[str, Any]]) -> str:
    lines = []
    for record in records:
        table = f", for {record['table']}" if record["table"] else ""
        lines.append(f"{record['name']}  ({record['kind']}{table})")
        if record["summary"]:
            lines.append(f"  {record['summary']}")
        for option in record["options"]:
            lines.append(f"  {option['name']}: {option['takes']}{_default_text(option)}")
            lines += [f"      {line}" for line in (option["description"] or "").splitlines()]
        lines.append("")
    return "\n".join(lines).rstrip()


def _default_text(option: dict[str, Any]) -> str:
    if option["required"]:
        return " (required)"
    default = option["default"]
    if default == "computed":
        return " = computed from other options"
    # JSON and TOML differ only in tables, and a default table is empty.
    return " (optional)" if default is None else f" = {json.dumps(default)}"


SLEY_PLUGINS = frozenset({CORE, *FIRST_PARTY})
"""Sley's plugins, installed or not. Other plugins must not have these names."""

_SUFFIX = ".in"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class PluginKind(StrEnum):
    """The kind of record that the new plugin has."""

    handler = "handler"
    hook = "hook"
    schedule = "schedule"
    writer = "writer"
    model = "model"


def new(
    kind: Annotated[
        PluginKind,
        typer.Argument(
            help="handler: a gradient handler. hook: called around every action. schedule: a learning-rate schedule. "
            "writer: a metrics writer. model: a list of layers.",
            show_default=False,
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the plugin in plans.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="A new or empty folder; default: sley-NAME.")] = None,
) -> None:
    """Write a plugin package with a record, a table, a class and passing tests."""
    folder = out or Path(f"sley-{name.replace('_', '-')}")
    files = package_files(kind, name)
    write_package(files, folder)
    for path in files:
        print_line(f"{folder / path}")
    print_line(f"next: cd {folder} && pip install -e . pytest && pytest")


def package_files(plugin_kind: str, name: str) -> dict[str, str]:
    """Returns the text of each file of a plugin package, by its path. Raises the same errors as `check_name`.

    docs/write-a-plugin.md explains the package of a gradient handler; examples/plugins/sley-narrow is the same package.
    """
    folder = Path(templates.__file__).parent / plugin_kind
    paths = sorted(path for path in folder.rglob(f"*{_SUFFIX}") if path.is_file())
    files = {path.relative_to(folder).as_posix().removesuffix(_SUFFIX): path.read_text("utf-8") for path in paths}
    check_name(name)
    return {path.replace("NAME", name): _fill_template(text, name) for path, text in files.items()}


def write_package(files: Mapping[str, str], out: Path) -> None:
    """Writes the files into the folder `out`. Raises UsageError "new-folder" if `out` is not empty or cannot be written."""
    hint = "choose another `--out`"
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UsageError("new-folder", f"`{out}` exists and is not an empty folder", hint=hint)
    try:
        for path, text in files.items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_text(text, "utf-8")
    except OSError as error:
        raise UsageError("new-folder", f"cannot write `{out}`: {error.strerror or error}", hint=hint) from None


def check_name(name: str) -> None:
    """Raises UsageError "plugin-name" if the name is not valid in plans and in Python, or is used by a plugin or a module."""
    if not _NAME.fullmatch(name) or iskeyword(name):
        message = (
            f"the plugin name `{name}` must consist of lower-case letters, digits and `_`, start with a "
            "letter, and not be a Python keyword"
        )
        raise UsageError("plugin-name", message, hint="use a name such as `topk`")
    if name in SLEY_PLUGINS:
        raise UsageError("plugin-name", f"`{name}` is one of Sley's plugins", hint=f"use another name, such as `my_{name}`")
    dists = find_plugins().get(name)
    if dists or find_spec(f"sley_{name}") is not None:
        owner = dists[0].label if dists else f"the module `sley_{name}`"
        raise UsageError(
            "plugin-name", f"`{name}` is already used by {owner}", hint="use another name, or uninstall that package"
        )


def _fill_template(text: str, name: str) -> str:
    class_name = "".join(part.capitalize() for part in name.split("_"))
    text = text.replace("@name@", name).replace("@Name@", class_name)
    # The position of the module's import depends on its name.
    return re.sub(
        r"(?:^from sley_.*\n)+", lambda imports: "".join(sorted(imports[0].splitlines(keepends=True))), text, flags=re.M
    )
