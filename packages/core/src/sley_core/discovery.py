"""Finds the installed plugins and their requirements on core. Reads only metadata; imports nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
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
    """Returns all plugins on `sys.path` by name. As in an import, the first copy of a distribution wins.

    The result is cached until the modification time of a folder changes, since a search takes 20 ms.
    """
    folders = [Path(entry).absolute() for entry in sys.path]  # an empty entry is the current folder
    return _find_plugins(tuple((str(folder), folder.stat().st_mtime_ns if folder.exists() else 0) for folder in folders))


@cache
def _find_plugins(folders: tuple[tuple[str, int], ...]) -> Mapping[str, list[PluginSource]]:
    """Returns the plugins in `folders`, each given with its modification time."""
    plugins_by_name: dict[str, list[PluginSource]] = {}
    dists: set[str] = set()
    for dist in distributions(path=[folder for folder, _ in folders]):
        try:
            points = dist.entry_points.select(group=GROUP)
            name = _canonical_name(dist.name) if points else ""
        except (KeyError, OSError, TypeError, ValueError):
            continue  # an unreadable plugin is reported as missing if a plan names it
        if not points or name in dists:
            continue
        dists.add(name)
        for point in points:
            source = PluginSource(point.name, dist.name, dist.version, point, tuple(dist.requires or ()))
            plugins_by_name.setdefault(point.name, []).append(source)
    return plugins_by_name


def install_hint(name: str, extra: str = "") -> str:
    """Returns the hint that tells how to install a Sley package from a clone, since package indexes do not have it."""
    suffix, folder = (f"[{extra}]", f'"{package_folder(name, extra)}"') if extra else ("", package_folder(name))
    return f"install sley-{name}{suffix}; in a clone of Sley's repository, run `pip install -e {folder}`"


def package_folder(name: str, extra: str = "") -> str:
    """Returns the folder of a Sley package in a clone of the repository; appends the extra in pip's syntax."""
    folder = f"examples/plugins/sley-{name}" if name in EXAMPLES else f"packages/{name}"
    return f"{folder}[{extra}]" if extra else folder


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
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        has_core = _canonical_name(requirement.name) == CORE_DIST
        is_active = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if has_core and is_active and not requirement.specifier.contains(core_version(), prereleases=True):
            return f"{CORE_DIST}{requirement.specifier}"
    return None


def _canonical_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
