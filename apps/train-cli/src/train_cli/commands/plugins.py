"""`train-cli plugins`: what is installed and what a plan can name; with a name, every option of its records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from sley_core.errors import EXIT_OK, EXIT_RUN_FAILED, PlanError, PluginError, UsageError
from sley_core.plan.document import plain
from sley_core.plan.kinds import COMPONENTS, words
from sley_core.plan.loader import Loader, Plugin
from sley_core.records import Record
from sley_core.words import suggestion, takes
from train_cli.completion import plugin_ids
from train_cli.lazy import module_of
from train_cli.options import FormatOption, OutputFormat


class Level(StrEnum):
    """How far `plugins check` goes (`sley_testing.certify`)."""

    loads = "loads"
    contract = "contract"
    verified = "verified"


def _complete_plugin(incomplete: str) -> list[str]:
    names = plugin_ids() if "." in incomplete else Loader().names()
    return [name for name in names if name.startswith(incomplete)]


def plugins(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A plugin (dp) or a record (dp.bucketed); or `check`, and then DIST.", autocompletion=_complete_plugin
        ),
    ] = None,
    dist: Annotated[
        str | None, typer.Argument(help="With `check`: an installed distribution, such as sley-dp.", show_default=False)
    ] = None,
    level: Annotated[
        Level, typer.Option("--level", help="With `check`: how far to go; each level includes those before it.")
    ] = Level.verified,
    form: FormatOption = OutputFormat.text,
) -> None:
    """List the installed plugins and their records; with NAME, the options, types and defaults of its records.

    `plugins check DIST` runs the contract of everything that DIST offers, and compares it with one process.
    """
    if name == "check":
        raise typer.Exit(_check(dist, level, form))
    if dist is not None:
        raise UsageError("plugins", f"`{dist}` is one name too many", hint="`train-cli plugins check DIST` checks one")
    loader = Loader()
    if name is None:
        found = [_overview(each, loader) for each in loader.names()]
        text = _overview_text(found)
    else:
        plugin_name, _, record_name = name.partition(".")
        found = list(_described(loader.load(plugin_name), record_name))
        text = _described_text(found)
    typer.echo(json.dumps(found, indent=2) if form is OutputFormat.json else text)


def _check(dist: str | None, level: Level, form: OutputFormat) -> int:
    """Checks all that `dist` offers, shows each verdict, and returns the exit code: 0 if nothing failed."""
    if dist is None:
        raise UsageError("plugins", "`plugins check` needs a distribution", hint="`train-cli plugins check sley-dp`")
    certify = module_of("testing", "sley_testing.certify", "`train-cli plugins check`").certify
    verdicts = []
    for verdict in certify(dist, level.value):
        verdicts.append(verdict)
        if form is OutputFormat.text:
            what = f"{verdict.plugin}.{verdict.record}" if verdict.record else verdict.plugin
            why = f": {verdict.why}" if verdict.why else ""
            typer.echo(f"{verdict.level:9} {verdict.status:8} {what}{why}")
    if form is OutputFormat.json:
        typer.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    if not verdicts:
        message = f"no installed distribution `{dist}` has a plugin of Sley"
        raise PluginError("plugin-missing", message, hint="`train-cli plugins` lists those that are installed")
    return EXIT_RUN_FAILED if any(verdict.status == "failed" for verdict in verdicts) else EXIT_OK


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
            "options": [_option(key, info) for key, info in record.config.model_fields.items()],
        }


def _no_record(plugin: Plugin, name: str, records: list[Record]) -> PlanError:
    """Returns the PlanError "unknown-record" for a record name that the plugin does not have."""
    names = list(dict.fromkeys(f"{plugin.name}.{record.name}" for record in records))
    listed = f"it has {', '.join(f'`{each}`' for each in names)}" if names else None
    hint = suggestion(f"{plugin.name}.{name}", names, listed)
    return PlanError("unknown-record", f"{plugin.label} has no record `{name}`", hint=hint)


def _option(key: str, info: FieldInfo) -> dict[str, Any]:
    """Returns name, type, default and description of one option."""
    option: dict[str, Any] = {"name": key, "takes": takes(info.annotation, info.metadata), "required": False}
    if info.is_required():
        option["required"] = True
    elif info.default_factory is not None:
        option["default"] = "computed"
    else:
        option["default"] = plain(info.default)
    return {**option, "description": info.description}


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
