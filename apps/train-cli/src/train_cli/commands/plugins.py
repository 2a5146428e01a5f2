"""`train-cli plugins` lists the installed plugins with their records and options. `train-cli env` prints versions and devices.
`train-cli new KIND NAME` writes a plugin package with passing tests, as a starting point.
"""

import re
from collections.abc import Iterator
from enum import StrEnum
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer
from pydantic.fields import FieldInfo

from sley_core.errors import EXIT_OK, EXIT_RUN_FAILED, PlanError, PluginError, UsageError, suggestion
from sley_core.plan.document import to_plain_data
from sley_core.plan.kinds import COMPONENTS, record_type_name
from sley_core.plan.loader import CORE, FIRST_PARTY_PLUGINS, Plugin, PluginLoader, find_plugins
from sley_core.plan.plan import format_value
from sley_core.table import describe_type
from train_cli.console import print_line
from train_cli.environment import describe_machine
from train_cli.main import import_optional


def plugins(
    name: Annotated[
        str | None, typer.Argument(help="A plugin (dp) or a record (dp.bucketed); or `check`, followed by DIST.")
    ] = None,
    dist: Annotated[
        str | None, typer.Argument(help="With `check`: an installed distribution, such as sley-dp.", show_default=False)
    ] = None,
) -> None:
    """List the installed plugins and their records; with NAME, the options, types and defaults of its records.

    `plugins check DIST` runs the contract tests of every record in DIST.
    """
    if name == "check":
        if dist is None:
            hint = "use `train-cli plugins check sley-dp`, for example"
            raise UsageError("plugins", "`plugins check` needs a distribution", hint=hint)
        statuses = []
        for verdict in import_optional("testing", "sley_testing.certify", "`train-cli plugins check`").certify(dist):
            statuses.append(verdict.status)
            typer.echo(verdict)
        if not statuses:
            message = f"`{dist}` is not installed, or has no plugin for Sley"
            raise PluginError("plugin-missing", message, hint="use `train-cli plugins` to list the installed plugins")
        raise typer.Exit(EXIT_RUN_FAILED if "failed" in statuses else EXIT_OK)
    if dist is not None:
        raise UsageError("plugins", f"unexpected argument `{dist}`", hint="use `train-cli plugins check DIST`")
    loader = PluginLoader()
    if name is None:
        lines = [line for plugin in loader.names() for line in _format_plugin(plugin, loader)]
    else:
        plugin_name, _, record_name = name.partition(".")
        lines = list(_format_records(loader.load(plugin_name), record_name))
    typer.echo("\n".join(lines))


def _format_plugin(name: str, loader: PluginLoader) -> Iterator[str]:
    """Yields a line with the plugin's distributions, and a line for each kind of record, or for the error of loading it."""
    yield f"{name}  ({', '.join(f'{dist.dist} {dist.version}' for dist in loader.sources(name))})"
    try:
        records = loader.load(name).records.values()
    except PluginError as error:
        yield f"  broken: {error.diagnostics[0].message}"
        return
    names: dict[str, list[str]] = {}
    for record in records:
        names.setdefault(record_type_name(type(record)), []).append(f"{name}.{record.name}")
    for kind, record_names in names.items():
        yield f"  {f'{kind}:':24} {', '.join(record_names)}"


def _format_records(plugin: Plugin, record_name: str) -> Iterator[str]:
    """Yields lines that describe each record of the plugin and its options. record_name: the name of a record, or "" for all.
    Raises PlanError "unknown-record" if the plugin has no such record.
    """
    records = [record for record in plugin.records.values() if record_name in ("", record.name)]
    if not records:
        names = [f"{plugin.name}.{name}" for name in plugin.records]
        listed = f"use one of {', '.join(f'`{name}`' for name in names)}" if names else None
        hint = suggestion(f"{plugin.name}.{record_name}", names, listed)
        raise PlanError("unknown-record", f"{plugin.label} has no record `{record_name}`", hint=hint)
    tables = {spec.record_type: f", for {spec.header}" for spec in COMPONENTS}
    for record in records:
        yield f"{plugin.name}.{record.name}  ({record_type_name(type(record))}{tables.get(type(record), '')})"
        if summary := " ".join((record.config.__doc__ or "").split()):
            yield f"  {summary}"
        for key, option in record.config.model_fields.items():
            yield f"  {key}: {describe_type(option.annotation, option.metadata)}{_format_default(option)}"
            yield from (f"      {line}" for line in (option.description or "").splitlines())


def _format_default(option: FieldInfo) -> str:
    if option.is_required():
        return " (required)"
    if option.default_factory is not None:
        return " = computed from other options"
    default = to_plain_data(option.default)
    return " (optional)" if default is None else f" = {format_value(default)}"


SLEY_PLUGINS = frozenset({CORE, *FIRST_PARTY_PLUGINS})
"""The names of Sley's plugins, installed or not. Other plugins must not have these names."""


class PluginKind(StrEnum):
    """The argument KIND of `train-cli new`: the kind of record in the new plugin. Each kind has a folder of templates."""

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
    files = make_package_files(kind, name)
    hint = "choose another `--out`"
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UsageError("new-folder", f"`{folder}` exists and is not an empty folder", hint=hint)
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, "utf-8")
            print_line(f"{folder / path}")
    except OSError as error:
        raise UsageError("new-folder", f"cannot write `{folder}`: {error.strerror or error}", hint=hint) from None
    print_line(f"next: cd {folder} && pip install -e . pytest && pytest")


def make_package_files(kind: str, name: str) -> dict[str, str]:
    """Returns the text of each file of a new package with the plugin `name`, by the file's path in the package. kind: a value
    of `PluginKind`. Raises UsageError "plugin-name" for an invalid name. docs/write-a-plugin.md explains the package of a
    gradient handler.
    """
    check_name(name)
    folder = Path(__file__).parents[1] / "templates" / kind
    texts = {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in sorted(folder.rglob("*.in"))}
    return {path.removesuffix(".in").replace("NAME", name): _fill_template(text, name) for path, text in texts.items()}


def check_name(name: str) -> None:
    """Raises UsageError "plugin-name" if `name` is not valid in plans and in Python, or if a plugin or module has this name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or iskeyword(name):
        hint = "use lower-case letters, digits and `_`, begin with a letter, and avoid Python keywords: for example `topk`"
        raise UsageError("plugin-name", f"`{name}` cannot be the name of a plugin", hint=hint)
    if name in SLEY_PLUGINS:
        raise UsageError("plugin-name", f"`{name}` is one of Sley's plugins", hint=f"use another name, such as `my_{name}`")
    dists = find_plugins().get(name)
    if dists or find_spec(f"sley_{name}") is not None:
        owner = dists[0].label if dists else f"the module `sley_{name}`"
        hint = "use another name, or uninstall the package that uses it"
        raise UsageError("plugin-name", f"`{name}` is already used by {owner}", hint=hint)


def _fill_template(text: str, name: str) -> str:
    """Returns the template `text` with the plugin's name in place of `@name@` and `@Name@`, and with sorted imports."""
    class_name = "".join(part.capitalize() for part in name.split("_"))
    text = text.replace("@name@", name).replace("@Name@", class_name)
    # The position of the plugin's own import depends on its name.
    return re.sub(
        r"(?:^from sley_.*\n)+", lambda imports: "".join(sorted(imports[0].splitlines(keepends=True))), text, flags=re.M
    )


def env() -> None:
    """Print versions and devices for a bug report."""
    info = describe_machine()
    typer.echo("\n".join(f"{name:{max(map(len, info))}}  {value}" for name, value in info.items()))
