"""`train-cli needs`: what to install for a plan, on a machine where it is not installed yet.

Prints Sley's own packages as folders of a clone, since no index has them; plugins of others by name, pinned as here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from sley_core.discovery import CORE, EXAMPLES, folder_of
from sley_core.errors import Diagnostic, KeyPath, PluginError, SleyError
from sley_core.plan.check import timer_package
from sley_core.plan.document import Document
from sley_core.plan.kinds import COMPONENTS
from sley_core.plan.load import resolve
from sley_core.plan.loader import FIRST_PARTY, Loader
from sley_core.plan.read import read_file
from train_cli.console import say
from train_cli.options import PlanArgument, SetOption

_RECORD = re.compile(r"([A-Za-z_]\w*)\.[A-Za-z_]\w*")


def needs(plan: PlanArgument, overrides: SetOption = None) -> None:
    """Print a requirement for each package that the plan needs; in a clone of Sley: pip install $(train-cli needs plan.toml)"""
    document = read_file(plan, overrides or [])
    loader = Loader()
    extras = _extras(document)
    lines = {CORE: f"-e {folder_of(CORE)}", "train-cli": "-e apps/train-cli"}
    named = dict(reversed([*_named_plugins(document, loader)]))  # the first path of each
    timer = ""
    try:
        resolved = resolve(document, loader)
    except SleyError:
        names = [*reversed(named)]
        note = "the plan cannot be resolved here: call this again with these installed, as their records may need more"
    else:  # knows also the plugins that a default or a record names
        names, timer, note = [*resolved.plugins], timer_package(resolved), ""
    unknown: list[Diagnostic] = []
    for name in names:
        if name in lines:
            continue
        try:
            lines[name] = _requirement(name, loader, extras)
        except PluginError as error:
            lines[name] = ""
            unknown += [document.diagnostic(each.code, each.message, named[name], each.hint) for each in error.diagnostics]
    if unknown:
        raise PluginError.many(unknown)
    if timer:
        ours = timer.startswith("sley_")
        lines[timer] = f"-e {folder_of(timer.removeprefix('sley_'))}" if ours else timer
    for line in lines.values():
        typer.echo(line)
    say("Sley's own packages are on no index: give these lines to pip in a clone of its repository")
    if note:
        say(note)


def _extras(document: Document) -> dict[str, str]:
    """Returns the extras that the plan needs, separated by commas, by the plugin that has them."""
    named = {value for _, value in _strings(document.tables.get("metrics"))}
    writers = (writer for writer in ("tensorboard", "wandb") if f"metrics.{writer}" in named)
    return {"metrics": ",".join(writers), "data": "tokenizers" if "tokenizer" in _table(document, "data") else ""}


def _requirement(name: str, loader: Loader, extras: Mapping[str, str]) -> str:
    """Returns the line for pip of plugin `name`; raises PluginError if it is neither ours nor installed."""
    if name in FIRST_PARTY or name in EXAMPLES:
        return f"-e {folder_of(name, extras.get(name, ''))}"
    match loader.found(name):
        case [one]:
            return f"{one.dist}=={one.version}" if one.version != "0" else one.dist
    loader.load(name)
    raise AssertionError(f"plugin {name} was neither found nor missing")


def _named_plugins(document: Document, loader: Loader) -> Iterator[tuple[str, KeyPath]]:
    """Yields the plugins of the records that the plan names, and of the default of each table without `use`, with their paths.

    Which fields beside `use` name records only the plugin knows, and it may not be installed: the values of other fields count
    if they have the form of a record of a known plugin.
    """
    known = {*FIRST_PARTY, *EXAMPLES, *loader.names()}
    known -= {"data", "metrics"}  # only `use` names their records: `data.json` is a file
    for path, value in _strings(document.tables):
        match = _RECORD.fullmatch(value)
        if match and (path[-1] == "use" or match[1] in known):
            yield match[1], path
    for spec in COMPONENTS:
        is_open = not {"use", "factory"} & _table(document, spec.key).keys()
        if spec.default and is_open and (spec.only_with is None or spec.only_with in document.tables):
            yield spec.default.partition(".")[0], (spec.key,)


def _strings(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yields path and value of every string of the plan; strings in arrays (files) and in `options` are skipped."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "options":
                yield from _strings(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            if isinstance(inner, dict):
                yield from _strings(inner, (*path, number))
    elif isinstance(value, str):
        yield path, value


def _table(document: Document, name: str) -> dict[str, Any]:
    found = document.tables.get(name)
    return found if isinstance(found, dict) else {}
