"""Finds the distributions that announce a plugin, and the core that they need: reads metadata only, imports nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

GROUP = "sley.plugins"
CORE = "core"
CORE_DIST = "sley-core"
EXAMPLES = frozenset({"narrow", "powersgd", "topk", "watch"})
"""Plugins in examples/plugins of Sley's repository."""

NEWER_CORE = "a newer sley-core (`git pull` in the clone of Sley's repository that it is installed from)"
"""How to get a newer core, in words: from a clone, as in `install_hint`."""


@dataclass(frozen=True)
class PluginSource:
    """Holds a plugin's metadata. entry_point: None if `module` is set. requires: the `Requires-Dist` lines."""

    name: str
    dist: str
    version: str
    entry_point: EntryPoint | None = None
    requires: tuple[str, ...] = ()
    module: ModuleType | Any = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        return f"plugin `{self.name}` ({self.dist} {self.version})"


def find_plugins() -> Mapping[str, list[PluginSource]]:
    """Returns all plugins on `sys.path` by name. The first copy of a distribution wins, as in an import."""
    plugins_by_name: dict[str, list[PluginSource]] = {}
    dists: set[str] = set()
    for entry in map(Path, sys.path):  # an empty entry is the current folder
        changed = entry.stat().st_mtime_ns if entry.exists() else 0
        for name, plugins in _read_distributions(str(entry.absolute()), changed):
            if name not in dists:
                dists.add(name)
                for one in plugins:
                    plugins_by_name.setdefault(one.name, []).append(one)
    return plugins_by_name


@cache
def _read_distributions(entry: str, changed: int) -> list[tuple[str, list[PluginSource]]]:
    """Returns the distributions with plugins at one entry of `sys.path`, by canonical name; cached, as that takes 4 ms."""
    dists = []
    for dist in distributions(path=[entry]):
        text = ""
        with suppress(OSError, ValueError):  # unreadable: no plugins, so that it is reported missing if a plan names one
            text = dist.read_text("entry_points.txt") or ""
        if GROUP not in text:
            continue
        metadata = dist.metadata  # parses the file each time it is asked for
        name, number = (str((metadata.get_all(key) or ["?"])[0]) for key in ("Name", "Version"))
        # An egg-info has its requirements in a separate file, which `dist.requires` reads.
        requires = tuple(metadata.get_all("Requires-Dist") or dist.requires or ())
        points = [EntryPoint(key, value, GROUP) for key, value in _parse_entry_points(text)]
        dists.append((_canonical_name(name), [PluginSource(point.name, name, number, point, requires) for point in points]))
    return dists


def install_hint(name: str, extra: str = "") -> str:
    """Returns a hint that says how to install one of Sley's own packages, which are on no index."""
    asked, folder = (f"[{extra}]", f'"{package_folder(name, extra)}"') if extra else ("", package_folder(name))
    return f"install sley-{name}{asked}, in a clone of Sley's repository: `pip install -e {folder}`"


def package_folder(name: str, extra: str = "") -> str:
    """Returns the folder of one of Sley's own packages in a clone of the repository, with the extra in pip's syntax."""
    folder = f"examples/plugins/sley-{name}" if name in EXAMPLES else f"packages/{name}"
    return f"{folder}[{extra}]" if extra else folder


_NAME = re.compile(r"[^\W_](?:[\w.-]*[^\W_])?")
"""The name at the beginning of a `Requires-Dist` line."""


@cache
def core_version() -> str:
    """Returns the installed version of core, or "0" if core runs from a folder that was never installed."""
    try:
        return version(CORE_DIST)
    except PackageNotFoundError:
        return "0"


def unmet_requirement(plugin: PluginSource) -> str | None:
    """Returns the requirement on core that the installed core does not meet, or None."""
    if not plugin.requires or plugin.name == CORE or core_version() == "0":
        return None
    # Only a third party's plugin needs this import, which takes 15 ms.
    from packaging.requirements import InvalidRequirement, Requirement

    for line in plugin.requires:
        named = _NAME.match(line.strip())
        if named is None or _canonical_name(named[0]) != CORE_DIST:  # cheaper than parsing the line
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(core_version(), prereleases=True):
            return f"{CORE_DIST}{requirement.specifier}"
    return None


def _parse_entry_points(text: str) -> list[tuple[str, str]]:
    """Returns the `name = value` lines of our section. Parsed here, because one broken line makes importlib refuse the file."""
    section = re.search(rf"^\[\s*{re.escape(GROUP)}\s*\]\s*$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    lines = section[1].splitlines() if section else []
    pairs = [line.split("#")[0].partition("=") for line in lines]
    return [(key.strip(), value.strip()) for key, equals, value in pairs if equals]


def _canonical_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
