"""`train-cli needs`: what to install for a plan, on a machine where it is not installed yet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from sley_core.discovery import to_install
from sley_core.errors import Diagnostic, KeyPath, PluginError
from sley_core.loader import FIRST_PARTY, Loader
from sley_core.plan.document import Document
from sley_core.plan.read import read_file
from train_cli.console import say
from train_cli.options import PlanArgument, SetOption
from train_cli.versions import sley_versions

_RECORD = re.compile(r"([A-Za-z_]\w*)\.[A-Za-z_]\w*")


def needs(plan: PlanArgument, overrides: SetOption = None) -> None:
    """Print a requirement line for each package that the plan needs: pip install $(train-cli needs plan.toml)"""
    document = read_file(plan, overrides or [])
    loader = Loader()
    versions = sley_versions()
    extra = "[tokenizers]" if "tokenizer" in _table(document, "data") else ""
    lines = {"core": _pinned("sley-core", versions.get("sley-core"), extra)}
    lines["train-cli"] = _pinned("sley-train-cli", versions.get("sley-train-cli"))
    unknown: list[Diagnostic] = []
    for name, path in _named_plugins(document, loader):
        if name in lines:
            continue
        try:
            lines[name] = _requirement(name, loader)
        except PluginError as error:
            lines[name] = ""
            unknown += [document.diagnostic(each.code, each.message, path, each.hint) for each in error.diagnostics]
    if unknown:
        raise PluginError.many(unknown)
    for line in lines.values():
        typer.echo(line)
    for name in lines.keys() & set(FIRST_PARTY):
        if not loader.found(name):
            say(f"{lines[name]} is on no index: {to_install(name)}")


def _requirement(name: str, loader: Loader) -> str:
    match loader.found(name):
        case [one]:
            return _pinned(one.dist, one.version)
        case [] if name in FIRST_PARTY:
            return f"sley-{name}"
    loader.load(name)
    raise AssertionError(f"plugin {name} was neither found nor missing")


def _named_plugins(document: Document, loader: Loader) -> Iterator[tuple[str, KeyPath]]:
    """The plugins of the records that the plan names, and where.

    What a field other than `use` means is known to its plugin alone, which may not be here: there a value counts if it
    looks like a record of a plugin that is known.
    """
    known = {*FIRST_PARTY, *loader.names()}
    for path, value in _strings(document.tables):
        match = _RECORD.fullmatch(value)
        if match and (path[-1] == "use" or match[1] in known):
            yield match[1], path


def _strings(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every string of the plan that is the value of a key; an array of strings holds files, and options are the user's."""
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


def _pinned(dist: str, version: str | None, extra: str = "") -> str:
    return f"{dist}{extra}=={version}" if version and version != "0" else f"{dist}{extra}"
