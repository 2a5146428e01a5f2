"""Tests the example plugins as wheels, in an environment and a folder outside the repository."""

import shutil
import sys
from pathlib import Path

import nox
from manifests import BACKENDS, PACKAGES, ROOT, Package

WITH = (
    "sley-core",
    "sley-trainer",
    "sley-data",
    "sley-models",
    "sley-metrics",
    "sley-checkpoint",
    "sley-testing",
    "sley-train-cli",
)
"""The distributions of Sley in the environment of a third party."""

FEW_STEPS = ("--set", "run.steps=3", "--overwrite")


class Outside:
    """Creates an environment in `folder`, outside the repository, with the wheels of `WITH`."""

    def __init__(self, session: nox.Session, folder: Path, constraints: Path) -> None:
        self._session = session
        self._folder = folder
        self._constraints = str(constraints.resolve())
        session.run(sys.executable, "-m", "venv", str(folder / "env"), external=True)
        self.install("torch", *BACKENDS)
        self.install(*(self.wheel(package.folder) for package in PACKAGES if package.distribution in WITH))
        session.chdir(folder)

    def install(self, *requirements: str) -> None:
        """Installs requirements or wheels."""
        self.run("python", "-m", "pip", "install", "-q", "-c", self._constraints, *requirements)

    def wheel(self, source: str | Path) -> str:
        """Builds a package from the folder `source`; returns the wheel's path."""
        out = self._folder / "wheels" / str(len(list(self._folder.glob("wheels/*"))))
        build = ("python", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out))
        self.run(*build, str((ROOT / source).resolve()))
        (wheel,) = out.glob("*.whl")
        return str(wheel)

    def run(self, command: str, *arguments: str, code: int = 0) -> str:
        """Runs a command of the environment and returns its output. The session fails unless the exit code is `code`."""
        program = str(self._folder / "env" / "bin" / command)
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": None}
        output = self._session.run(program, *arguments, env=env, external=True, silent=True, success_codes=[code])
        return str(output)

    def copied(self, source: str, name: str) -> Path:
        """Copies a folder of the repository into this folder as `name`, and returns the copy."""
        return Path(shutil.copytree(ROOT / source, self._folder / name))


def check(session: nox.Session, outside: Outside, package: Package) -> None:
    """Asserts that an example plan is refused before its plugin is installed and trained after it. Runs the plugin's tests."""
    name = package.distribution.removeprefix("sley-")
    session.log(f"{package.distribution}, from its wheel")
    here = outside.copied(package.folder, package.distribution)
    plan = here / "plan.toml"
    if plan.exists():
        output = outside.run("train-cli", "run", str(plan), *FEW_STEPS, code=4)
        assert f"there is no plugin `{name}`" in output, output
        assert f"install its package, usually `{package.distribution}`" in output, output
    outside.install(wheel := outside.wheel(here), *package.test_requirements())
    if plan.exists():
        outside.run("train-cli", "run", str(plan), *FEW_STEPS)
        refuse_two_of_one_name(outside, package, plan)
        outside.install("--no-deps", "--force-reinstall", wheel)  # the other one had modules of the same name
    outside.run("python", "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(here / "tests"))


def refuse_two_of_one_name(outside: Outside, package: Package, plan: Path) -> None:
    """Installs another distribution with the same plugin, and asserts that the plan is refused with the names of both."""
    other = f"other-{package.distribution}"
    copy = outside.copied(package.folder, other)
    manifest = copy / "pyproject.toml"
    manifest.write_text(manifest.read_text("utf-8").replace(f'name = "{package.distribution}"', f'name = "{other}"'))
    outside.install("--no-deps", outside.wheel(copy))
    output = outside.run("train-cli", "run", str(plan), *FEW_STEPS, code=4)
    assert package.distribution in output.replace(other, ""), output
    assert other in output, output
    outside.run("python", "-m", "pip", "uninstall", "-q", "-y", other)
