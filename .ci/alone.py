"""Environments that hold a few of the installed distributions: those that some requirements name, and what these require."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NOT_LINKED = {"..", "__pycache__"}
"""The first parts of files that are no modules: programs, and the compiled modules of all distributions together."""


class Installed:
    """The distributions in `folders`, which are folders of modules."""

    def __init__(self, folders: Iterable[Path]) -> None:
        found = distributions(path=[str(folder) for folder in folders])
        self._by_name = {canonicalize_name(distribution.name): distribution for distribution in found}

    def required(self, requirements: Iterable[str]) -> list[Distribution]:
        """Returns what `requirements` name, directly or not. Raises AssertionError if it is not installed in that version."""
        result: dict[str, Distribution] = {}
        left = [Requirement(text) for text in requirements]
        seen: set[tuple[str, frozenset[str]]] = set()
        while left:
            requirement = left.pop()
            name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
            if (name, extras) in seen:
                continue
            seen.add((name, extras))
            assert name in self._by_name, f"{requirement} is not installed"
            distribution = result[name] = self._by_name[name]
            assert requirement.specifier.contains(distribution.version, prereleases=True), (
                f"{requirement}: {distribution.version}"
            )
            needs = [Requirement(text) for text in distribution.requires or ()]
            left += [
                need for need in needs if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras | {""})
            ]
        return list(result.values())


class Environment:
    """A virtual environment in `folder`, empty at first, of the interpreter `python`."""

    def __init__(self, python: Path, folder: Path) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        self.modules = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))

    def link(self, wanted: Iterable[Distribution]) -> None:
        """Adds these distributions, as links to where they are installed."""
        for distribution in wanted:
            for name in {file.parts[0] for file in distribution.files or ()} - NOT_LINKED:
                if not (self.modules / name).exists():
                    (self.modules / name).symlink_to(Path(str(distribution.locate_file(name))))
