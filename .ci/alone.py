"""Creates environments with some of the installed distributions: those of given requirements, and their dependencies."""

import subprocess
import sysconfig
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NOT_LINKED = {"..", "__pycache__"}
"""The first parts of paths that are not modules: programs and compiled modules."""


class Installed:
    """Holds the distributions in `folders`, which are folders of modules."""

    def __init__(self, folders: Iterable[Path]) -> None:
        installed = distributions(path=[str(folder) for folder in folders])
        self._by_name = {canonicalize_name(distribution.name): distribution for distribution in installed}

    def required(self, requirements: Iterable[str]) -> list[Distribution]:
        """Returns the distributions of `requirements` and their dependencies. Raises AssertionError if one is not installed in
        a matching version.
        """
        result: dict[str, Distribution] = {}
        pending = [Requirement(text) for text in requirements]
        visited: set[tuple[str, frozenset[str]]] = set()
        while pending:
            requirement = pending.pop()
            name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
            if (name, extras) in visited:
                continue
            visited.add((name, extras))
            assert name in self._by_name, f"{requirement} is not installed"
            distribution = result[name] = self._by_name[name]
            assert requirement.specifier.contains(distribution.version, prereleases=True), (
                f"{requirement}: {distribution.version}"
            )
            needs = [Requirement(text) for text in distribution.requires or ()]
            pending += [
                need for need in needs if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras | {""})
            ]
        return list(result.values())


class Environment:
    """Creates an empty virtual environment of the interpreter `python` in `folder`."""

    def __init__(self, python: Path, folder: Path) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        self.modules = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))


def link(distributions: Iterable[Distribution], folder: Path) -> None:
    """Creates links to the modules of installed distributions in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for distribution in distributions:
        for name in {file.parts[0] for file in distribution.files or ()} - NOT_LINKED:
            if not (folder / name).exists():
                (folder / name).symlink_to(Path(str(distribution.locate_file(name))))
