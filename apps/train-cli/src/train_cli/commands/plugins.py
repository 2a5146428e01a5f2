"""`train-cli plugins`: what is installed and what a plan can name; with a name, every option of its records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from sley_core.errors import PlanError, PluginError
from sley_core.loader import Loader, Plugin
from sley_core.plan.descriptions import description
from sley_core.plan.document import plain
from sley_core.plan.kinds import COMPONENTS, words
from sley_core.plan.words import suggestion, takes
from sley_core.records import Record
from sley_core.table import Table
from train_cli.completion import plugin_ids
from train_cli.options import FormatOption, OutputFormat


def _complete_plugin(incomplete: str) -> list[str]:
    names = plugin_ids() if "." in incomplete else Loader().names()
    return [name for name in names if name.startswith(incomplete)]


def plugins(
    name: Annotated[
        str | None,
        typer.Argument(help="A plugin (dp) or a record (dp.bucketed).", autocompletion=_complete_plugin),
    ] = None,
    form: FormatOption = OutputFormat.text,
) -> None:
    """List the installed plugins and their records; with NAME, the options, types and defaults of its records."""
    loader = Loader()
    if name is None:
        found = [_overview(each, loader) for each in loader.names()]
        text = _overview_text(found)
    else:
        plugin_name, _, record_name = name.partition(".")
        found = list(_described(loader.load(plugin_name), record_name))
        text = _described_text(found)
    typer.echo(json.dumps(found, indent=2) if form is OutputFormat.json else text)


def _overview(name: str, loader: Loader) -> dict[str, Any]:
    """Returns the entry of one plugin; a broken one has its error."""
    dists = loader.found(name)
    entry: dict[str, Any] = {
        "name": name,
        "dist": ", ".join(each.dist for each in dists),
        "version": ", ".join(each.version for each in dists),
        "records": {},
        "error": None,
    }
    try:
        records = loader.load(name).records
    except PluginError as error:
        entry["error"] = error.diagnostics[0].message
    else:
        entry["records"] = {kind: [f"{name}.{each}" for each in named] for kind, named in records.items() if named}
    return entry


def _overview_text(found: list[dict[str, Any]]) -> str:
    """Returns the entries as text."""
    lines = []
    width = max((len(words(kind)) + 1 for entry in found for kind in entry["records"]), default=0)
    for entry in found:
        lines.append(f"{entry['name']}  ({entry['dist']} {entry['version']})")
        if entry["error"]:
            lines.append(f"  broken: {entry['error']}")
        for kind, names in entry["records"].items():
            lines.append(f"  {words(kind) + ':':{width}} {', '.join(names)}")
    return "\n".join(lines)


def _described(plugin: Plugin, record_name: str) -> Iterator[dict[str, Any]]:
    """Yields every record of the plugin, or those named `record_name` (several kinds may have one)."""
    every = [(kind, record) for kind, named in plugin.records.items() for record in named.values()]
    chosen = [(kind, record) for kind, record in every if record_name in ("", record.name)]
    if not chosen:
        raise _no_record(plugin, record_name, [record for _, record in every])
    headers = {spec.kind: spec.header for spec in COMPONENTS}
    for kind, record in chosen:
        yield {
            "name": f"{plugin.name}.{record.name}",
            "kind": words(kind),
            "table": headers.get(kind),
            "summary": record.summary or _first_line(record.config.__doc__),
            "options": [_option(record.config, key, info) for key, info in record.config.model_fields.items()],
        }


def _no_record(plugin: Plugin, name: str, records: list[Record]) -> PlanError:
    """Returns the PlanError "unknown-record" for a record name that the plugin does not have."""
    names = list(dict.fromkeys(f"{plugin.name}.{record.name}" for record in records))
    listed = f"it has {', '.join(f'`{each}`' for each in names)}" if names else None
    hint = suggestion(f"{plugin.name}.{name}", names, listed)
    return PlanError("unknown-record", f"{plugin.label} has no record `{name}`", hint=hint)


def _option(model: type[Table], key: str, info: FieldInfo) -> dict[str, Any]:
    """Returns name, type, default and description of one option."""
    option: dict[str, Any] = {"name": key, "takes": takes(info.annotation, info.metadata), "required": False}
    if info.is_required():
        option["required"] = True
    elif info.default_factory is not None:
        option["default"] = "computed"
    else:
        option["default"] = plain(info.default)
    return {**option, "description": description(model, key)}


def _described_text(found: list[dict[str, Any]]) -> str:
    """Returns the records as text."""
    lines = []
    for record in found:
        where = f", for {record['table']}" if record["table"] else ""
        lines.append(f"{record['name']}  ({record['kind']}{where})")
        if record["summary"]:
            lines.append(f"  {record['summary']}")
        for option in record["options"]:
            lines.append(f"  {option['name']}: {option['takes']}{_default(option)}")
            lines += [f"      {line}" for line in (option["description"] or "").splitlines()]
        lines.append("")
    return "\n".join(lines).rstrip()


def _default(option: dict[str, Any]) -> str:
    """Returns in words an option's default, for the end of its line."""
    if option["required"]:
        return " (required)"
    default = option["default"]
    return " (may be left out)" if default is None else f" = {_toml(default)}"


def _toml(value: Any) -> str:
    if value == "computed":
        return "computed from the others"
    # Of what a default can be, JSON and TOML write only tables differently, and those are empty.
    return json.dumps(value)


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0]
