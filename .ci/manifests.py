"""Reads the packages of this repository from their manifests, and checks their wheels."""

import json
import re
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import nox

ROOT = Path(__file__).parent.parent


CORE = "sley-core"


class Package:
    """Holds the manifest of a package. folder: relative to the root. module: the import name.

    is_tool: whether the package may import all of core; its manifest then pins core to the package's version. is_plugin:
    whether the package imports only public modules of core.
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
        """Returns the requirements of the build backend, without which `build` fails."""
        return list(self.manifest["build-system"]["requires"])

    def requirements(self) -> list[str]:
        """Returns the requirements of the package itself."""
        return list(self.manifest["project"].get("dependencies", ()))

    def test_requirements(self) -> list[str]:
        """Returns the requirements of the package's tests: its dependency group `tests`."""
        return list(nox.project.dependency_groups(self.manifest, "tests"))

    def sley_requirements(self, *, tests: bool) -> set[str]:
        """Returns the distributions of this repository that the package requires directly. tests: whether to add those of its
        tests.
        """
        needs = [*self.requirements(), *(self.test_requirements() if tests else ())]
        return {match[0] for need in needs if (match := re.match(r"sley-[a-z0-9-]*[a-z0-9]", need))}


def find_packages() -> list[Package]:
    """Returns all packages. Core is the first, since the others require it."""
    patterns = ("packages/*/pyproject.toml", "apps/*/pyproject.toml", "examples/plugins/*/pyproject.toml")
    packages = [Package(path) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return sorted(packages, key=lambda package: package.module != "sley_core")


PACKAGES = find_packages()
BACKENDS = sorted({need for package in PACKAGES for need in package.build_requirements()})
"""The requirements of all build backends."""


def external_requirements(requirements: Iterable[str]) -> list[str]:
    """Returns the requirements that are not packages of this repository."""
    distributions = tuple(package.distribution for package in PACKAGES)
    return [requirement for requirement in dict.fromkeys(requirements) if not requirement.startswith(distributions)]


def external_test_requirements() -> list[str]:
    """Returns the requirements of all tests that are not packages of this repository."""
    return external_requirements(requirement for package in PACKAGES for requirement in package.test_requirements())


def selected_packages(arguments: Iterable[str]) -> list[Package]:
    """Returns the packages whose folders are among the arguments."""
    folders = {argument.rstrip("/") for argument in arguments}
    return [package for package in PACKAGES if package.folder in folders]


def with_dependencies(package: Package, *, tests: bool = True) -> list[Package]:
    """Returns the package and all packages of this repository that it requires, directly or not. tests: whether to add those of
    its tests.
    """
    by_name = {other.distribution: other for other in PACKAGES}
    required = {package.distribution}
    pending = sorted(package.sley_requirements(tests=tests))
    while pending:
        if (name := pending.pop()) not in required:
            required.add(name)
            pending += by_name[name].sley_requirements(tests=False)
    return [other for other in PACKAGES if other.distribution in required]


LOWEST_TORCH = re.compile(r"torch>=([0-9.]+)$")


def torch_floor() -> str:
    """Returns the lowest version of torch that core allows, as three numbers."""
    (core,) = (package for package in PACKAGES if package.module == "sley_core")
    requirements = core.manifest["project"]["dependencies"]
    (lowest,) = (match[1] for requirement in requirements if (match := LOWEST_TORCH.match(requirement)))
    return lowest if lowest.count(".") == 2 else f"{lowest}.0"


def assert_licensed(package: Package, archives: Path) -> None:
    """Asserts that both archives of the package in the folder `archives` contain the licence that its metadata name."""
    if "license" not in package.manifest["project"]:
        return
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel, tarfile.open(next(archives.glob("*.tar.gz"))) as sdist:
        for names in (wheel.namelist(), sdist.getnames()):
            assert any(Path(name).name == "LICENSE" for name in names), f"{package.distribution} has no LICENSE: {names}"


def write_facts(package: Package, file: Path) -> Path:
    """Writes the facts with which `check_alone.py` checks the package into `file`, as JSON, and returns `file`.

    absent: the siblings that the package does not require. optional: the modules of its extras.
    """
    required = {other.distribution for other in with_dependencies(package, tests=False)}
    extras = package.manifest["project"].get("optional-dependencies", {}).values()
    root = ROOT / package.source / package.module
    tracked = subprocess.run(["git", "ls-files", "."], cwd=root, check=True, capture_output=True, text=True).stdout
    facts = {
        "module": package.module,
        "is_tool": package.is_tool,
        "files": tracked.splitlines(),
        "absent": [other.module for other in PACKAGES if other.distribution not in required],
        "optional": sorted({re.split(r"\W", requirement)[0] for extra in extras for requirement in extra}),
    }
    file.write_text(json.dumps(facts), "utf-8")
    return file
