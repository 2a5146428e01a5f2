"""Finds the installed plugins and their requirements on core. Reads only metadata; imports nothing."""

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

UPDATE_CORE = "update sley-core (`git pull` in the clone of Sley's repository from which it is installed)"
"""The hint that tells how to update core."""


@dataclass(frozen=True)
class PluginSource:
    """A plugin's metadata. entry_point: None if `module` is set. requires: the `Requires-Dist` lines."""

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
    """Returns all plugins on `sys.path` by name. As in an import, the first copy of a distribution wins."""
    plugins_by_name: dict[str, list[PluginSource]] = {}
    dists: set[str] = set()
    for entry in map(Path, sys.path):  # an empty entry is the current folder
        changed = entry.stat().st_mtime_ns if entry.exists() else 0
        for name, plugins in _read_distributions(str(entry.absolute()), changed):
            if name not in dists:
                dists.add(name)
                for plugin in plugins:
                    plugins_by_name.setdefault(plugin.name, []).append(plugin)
    return plugins_by_name


@cache
def _read_distributions(entry: str, changed: int) -> list[tuple[str, list[PluginSource]]]:
    """Returns the canonical name and plugins of each distribution at one entry of `sys.path`. Cached until the folder's
    modification time `changed` changes, since a call takes 4 ms.
    """
    dists = []
    for dist in distributions(path=[entry]):
        text = ""
        with suppress(OSError, ValueError):  # an unreadable plugin is reported as missing if a plan names it
            text = dist.read_text("entry_points.txt") or ""
        if GROUP not in text:
            continue
        metadata = dist.metadata  # every access parses the file
        name, number = (str((metadata.get_all(key) or ["?"])[0]) for key in ("Name", "Version"))
        # An egg-info has its requirements in a separate file, which `dist.requires` reads.
        requires = tuple(metadata.get_all("Requires-Dist") or dist.requires or ())
        points = [EntryPoint(key, value, GROUP) for key, value in _parse_entry_points(text)]
        dists.append((_canonical_name(name), [PluginSource(point.name, name, number, point, requires) for point in points]))
    return dists


def install_hint(name: str, extra: str = "") -> str:
    """Returns the hint that tells how to install a Sley package from a clone, since package indexes do not have it."""
    suffix, folder = (f"[{extra}]", f'"{package_folder(name, extra)}"') if extra else ("", package_folder(name))
    return f"install sley-{name}{suffix}; in a clone of Sley's repository, run `pip install -e {folder}`"


def package_folder(name: str, extra: str = "") -> str:
    """Returns the folder of a Sley package in a clone of the repository; appends the extra in pip's syntax."""
    folder = f"examples/plugins/sley-{name}" if name in EXAMPLES else f"packages/{name}"
    return f"{folder}[{extra}]" if extra else folder


_NAME = re.compile(r"[^\W_](?:[\w.-]*[^\W_])?")
"""The name at the beginning of a `Requires-Dist` line."""


@cache
def core_version() -> str:
    """Returns the installed version of core, or "0" if core is not installed as a distribution."""
    try:
        return version(CORE_DIST)
    except PackageNotFoundError:
        return "0"


def unmet_requirement(plugin: PluginSource) -> str | None:
    """Returns the plugin's requirement on core if the installed core does not meet it, else None."""
    if not plugin.requires or plugin.name == CORE or core_version() == "0":
        return None
    # This import takes 15 ms, and only third-party plugins need it.
    from packaging.requirements import InvalidRequirement, Requirement

    for line in plugin.requires:
        match = _NAME.match(line.strip())
        if match is None or _canonical_name(match[0]) != CORE_DIST:  # cheaper than parsing the line
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
    """Returns the `name = value` lines of Sley's section. importlib rejects the whole file if any line is invalid."""
    section = re.search(rf"^\[\s*{re.escape(GROUP)}\s*\]\s*$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    lines = section[1].splitlines() if section else []
    pairs = [line.split("#")[0].partition("=") for line in lines]
    return [(key.strip(), value.strip()) for key, equals, value in pairs if equals]


def _canonical_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
