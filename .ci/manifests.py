"""The packages of this repository, as their own manifests say, and what a wheel of one must be."""

from __future__ import annotations

import re
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import nox

ROOT = Path(__file__).parent.parent


CORE = "sley-core"


class Package:
    """A folder with a pyproject.toml: `folder` relative to the root, `module` its import name.

    is_tool: whether it may import all of core, which it says by pinning core to its own version. is_plugin: whether it imports
    only what core makes public.
    """

    def __init__(self, pyproject: Path) -> None:
        self.folder = pyproject.parent.relative_to(ROOT).as_posix()
        self.source = f"{self.folder}/src"
        self.tests = f"{self.folder}/tests"
        self.manifest = tomllib.loads(pyproject.read_text("utf-8"))
        self.distribution: str = self.manifest["project"]["name"]
        self.version: str = self.manifest["project"]["version"]
        self.module = next(path.parent.name for path in pyproject.parent.glob("src/*/py.typed"))
        self.is_example = self.folder.startswith("examples/")
        self.is_core = self.module == "sley_core"
        self.is_tool = f"{CORE}=={self.manifest['project']['version']}" in self.manifest["project"].get("dependencies", ())
        self.is_plugin = not self.is_core and not self.is_tool

    def build_requirements(self) -> list[str]:
        """What makes its archives; `build` refuses to where one is missing."""
        return list(self.manifest["build-system"]["requires"])

    def requirements(self) -> list[str]:
        """What the package itself requires."""
        return list(self.manifest["project"].get("dependencies", ()))

    def test_requirements(self) -> list[str]:
        """What the package's own tests need: its dependency group `tests`."""
        return list(nox.project.dependency_groups(self.manifest, "tests"))

    def sley_requirements(self, *, tests: bool) -> set[str]:
        """Which of the distributions of this repository the package needs, directly; and its tests, if they are asked for."""
        needs = [*self.requirements(), *(self.test_requirements() if tests else ())]
        return {match[0] for need in needs if (match := re.match(r"sley-[a-z0-9-]*[a-z0-9]", need))}


def find_packages() -> list[Package]:
    """All packages, core first: the others need it."""
    patterns = ("packages/*/pyproject.toml", "apps/*/pyproject.toml", "examples/plugins/*/pyproject.toml")
    found = [Package(path) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return sorted(found, key=lambda package: package.module != "sley_core")


PACKAGES = find_packages()
BACKENDS = sorted({need for package in PACKAGES for need in package.build_requirements()})
"""What builds the packages."""


def third_party(needs: Iterable[str]) -> list[str]:
    """Those of `needs` that are no packages of this repository."""
    own = tuple(one.distribution for one in PACKAGES)
    return [need for need in dict.fromkeys(needs) if not need.startswith(own)]


def needed_by_tests() -> list[str]:
    """What all tests need beyond the packages of this repository, which pip looks for on the index where it is named."""
    return third_party(need for package in PACKAGES for need in package.test_requirements())


def named(arguments: Iterable[str]) -> list[Package]:
    """The packages whose folders are among the arguments."""
    folders = {argument.rstrip("/") for argument in arguments}
    return [package for package in PACKAGES if package.folder in folders]


def with_needs(package: Package, *, tests: bool = True) -> list[Package]:
    """The package and all of this repository that it needs, and its tests if they are asked for, directly or not."""
    by_name = {one.distribution: one for one in PACKAGES}
    found = {package.distribution}
    left = sorted(package.sley_requirements(tests=tests))
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += by_name[name].sley_requirements(tests=False)
    return [one for one in PACKAGES if one.distribution in found]


LOWEST_TORCH = re.compile(r"torch>=([0-9.]+)$")


def torch_floor() -> str:
    """The version of torch from which core's requirements begin, with all three numbers."""
    (core,) = (package for package in PACKAGES if package.module == "sley_core")
    (lowest,) = (found[1] for need in core.manifest["project"]["dependencies"] if (found := LOWEST_TORCH.match(need)))
    return lowest if lowest.count(".") == 2 else f"{lowest}.0"


def assert_licensed(package: Package, archives: Path) -> None:
    """Both archives of the package, in the folder `archives`, have the licence that its metadata name."""
    if "license" not in package.manifest["project"]:
        return
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel, tarfile.open(next(archives.glob("*.tar.gz"))) as sdist:
        for names in (wheel.namelist(), sdist.getnames()):
            assert any(Path(name).name == "LICENSE" for name in names), f"{package.distribution} has no LICENSE: {names}"


def alone_program(package: Package) -> str:
    """A program that fails unless `package` comes from a wheel, all of it imports, and no sibling can be imported but
    those that it requires.

    A module may lack what an extra of the package brings; a module of a tool may lack another tool, as `verify` does the test
    kit.
    """
    beside = {one.distribution for one in with_needs(package, tests=False)}
    absent = [other.module for other in PACKAGES if other.distribution not in beside]
    extras = package.manifest["project"].get("optional-dependencies", {}).values()
    optional = sorted({re.split(r"\W", requirement)[0] for extra in extras for requirement in extra})
    return f"""
import importlib, importlib.util, pkgutil
import {package.module} as package
assert "site-packages" in package.__file__, package.__file__
# A folder in which pip left what pytest had compiled has no origin.
found = [name for name in {absent} if (spec := importlib.util.find_spec(name)) and spec.origin]
assert not found, f"siblings can be imported: {{found}}"
for module in pkgutil.walk_packages(package.__path__, "{package.module}."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            if error.name not in {optional} and not ({package.is_tool} and name in {absent}):
                raise
"""
