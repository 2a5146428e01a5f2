"""Every check of this repository, for people and for machines.

    nox -s quickstart       train the example plan on two CPU ranks
    nox -s tests            all tests; `nox -s tests -- -k topology` passes arguments on to pytest
    nox -s readme           what README tells a newcomer to type, in its order
    nox -s floor            the quickstart and all tests, with the oldest torch that the packages allow
    nox -l                  everything else

Packages are found on disk: a new folder under packages/, apps/ or examples/plugins/ gets all sessions.

torch is large, so it is installed into four environments only: `dev` (all packages, editable; used by tests,
typecheck, plans, bench and campaign), `isolated` (wheels), `quickstart` (what a user has) and `floor`. They are kept between
calls: `nox -R` skips installing, `nox --reuse-venv=never` makes them anew. The backend is virtualenv with pip, which
follows the user's own index settings: with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu the small CPU build
of torch comes, where the public index has the CUDA build for Linux.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / ".ci"))
import pages

nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "lint", "typecheck", "isolated", "plans"]
nox.needs_version = ">=2025.2"

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", "constraints.txt")
FOR_TESTS = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
"""A test's ranks share the machine's cores: more threads than cores only make them wait for one another. Programs that
tests start find compiled modules, as those of a user do."""
SIDE_BY_SIDE = ("-n", str((os.cpu_count() or 1) + 1), "--dist", "loadfile")
"""Files of tests at a time, one more than cores: much of a test of ranks is waiting."""


class Package:
    """A folder with a pyproject.toml: `folder` relative to the root, `module` its import name."""

    def __init__(self, pyproject: Path) -> None:
        self.folder = pyproject.parent.relative_to(ROOT).as_posix()
        self.source = f"{self.folder}/src"
        self.tests = f"{self.folder}/tests"
        self.manifest = tomllib.loads(pyproject.read_text("utf-8"))
        self.distribution: str = self.manifest["project"]["name"]
        self.module = next(path.parent.name for path in pyproject.parent.glob("src/*/py.typed"))
        self.is_plugin = self.folder.startswith(("packages/", "examples/")) and self.module != "sley_core"

    def test_requirements(self) -> list[str]:
        """What the package's own tests need: its extra `test`, and its dependency group `tests`."""
        extras = self.manifest["project"].get("optional-dependencies", {})
        return [*extras.get("test", ()), *nox.project.dependency_groups(self.manifest, "tests")]


def find_packages() -> list[Package]:
    """All packages, core first: the others need it."""
    patterns = ("packages/*/pyproject.toml", "apps/*/pyproject.toml", "examples/plugins/*/pyproject.toml")
    found = [Package(path) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return sorted(found, key=lambda package: package.module != "sley_core")


PACKAGES = find_packages()
LOWEST_TORCH = re.compile(r"torch>=([0-9.]+)$")


# -- environments ------------------------------------------------------------------------------------------------------


@nox.session(default=False)
def dev(session: nox.Session) -> None:
    """Make .nox/dev: every package editable, with what its tests need. Point an editor here."""
    editable = [argument for package in PACKAGES for argument in ("-e", package.folder)]
    tests = [requirement for package in PACKAGES for requirement in package.test_requirements()]
    session.install(*CONSTRAINTS, *editable, *tests, "pytest-xdist", "mypy")


def in_dev(session: nox.Session, *command: str, **env: str) -> None:
    """Run a command of the environment `dev`."""
    bin_dir = Path(session.cache_dir).parent / "dev" / ("Scripts" if os.name == "nt" else "bin")
    path = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
    session.run(str(bin_dir / command[0]), *command[1:], external=True, env={"PATH": path, **env})


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train examples/plans/quickstart.toml as a user would; an earlier run of it is overwritten."""
    session.install(*CONSTRAINTS, "-e", "packages/core", "-e", "apps/train-cli")
    session.run("train-cli", "run", "examples/plans/quickstart.toml", "--overwrite", *session.posargs)


# -- checks ------------------------------------------------------------------------------------------------------------


@nox.session(venv_backend="none", requires=["dev"])
def tests(session: nox.Session) -> None:
    """All tests of all packages in one environment."""
    in_dev(session, "python", "-m", "pytest", *SIDE_BY_SIDE, *session.posargs, **FOR_TESTS)


@nox.session
def lint(session: nox.Session) -> None:
    """Style (ruff), and who may import whom (import-linter)."""
    session.install(*CONSTRAINTS, "ruff", "import-linter")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    sources = os.pathsep.join(package.source for package in PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "imports.toml")
        config.write_text("\n".join(import_rules()), "utf-8")
        session.run("lint-imports", "--config", str(config), env={"PYTHONPATH": sources})


@nox.session(venv_backend="none", requires=["dev"])
def typecheck(session: nox.Session) -> None:
    """Run mypy --strict, one package at a time."""
    for package in PACKAGES:
        in_dev(session, "mypy", package.source)


@nox.session
def isolated(session: nox.Session) -> None:
    """Each package passes its tests with nothing of Sley but core beside it, from wheels that its sdist makes.

    Of a test with parameters, the first case: what a wheel lacks, it lacks for all. With arguments, what these say.
    """
    session.install(*CONSTRAINTS, "torch", "pytest-xdist", "build")
    with tempfile.TemporaryDirectory() as folder:
        wheels: dict[str, Path] = {}
        for package in PACKAGES:
            made = Path(folder, package.module)
            session.run("python", "-m", "build", "-q", "--outdir", str(made), package.folder, silent=True)
            (wheels[package.module],) = made.glob("*.whl")
            assert_licensed(package, made)
        for package in PACKAGES:
            session.log(f"{package.distribution}, alone with core")
            session.run("pip", "uninstall", "-q", "-y", *(other.distribution for other in PACKAGES), silent=True)
            both = sorted({str(wheels["sley_core"]), str(wheels[package.module])})
            install = ("python", "-m", "pip", "install", "-q", *CONSTRAINTS, *both)  # a wheel swaps under `nox -R` too
            session.run(*install)
            program = Path(folder, f"{package.module}_is_alone.py")
            program.write_text(alone_program(package), "utf-8")
            session.run("python", "-P", str(program))
            session.run(*install, *package.test_requirements())
            pytest = ("python", "-P", "-m", "pytest")
            chosen = session.posargs
            if not chosen:
                listed = session.run(*pytest, package.tests, "--collect-only", "-q", silent=True, env=FOR_TESTS)
                names = Path(folder, f"{package.module}_tests.txt")
                names.write_text("\n".join(first_cases(str(listed))), "utf-8")
                chosen = [f"@{names}"]
            session.run(*pytest, *SIDE_BY_SIDE, *chosen, env=FOR_TESTS)


@nox.session(default=False)
def floor(session: nox.Session) -> None:
    """The quickstart and all tests with the oldest torch that core's requirements allow; the other tools are the same."""
    oldest = torch_floor()
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        pinned = Path("constraints.txt").read_text("utf-8")
        constraints.write_text(re.sub(r"^torch==.*$", f"torch=={oldest}", pinned, flags=re.MULTILINE), "utf-8")
        editable = [argument for package in PACKAGES for argument in ("-e", package.folder)]
        tests = [requirement for package in PACKAGES for requirement in package.test_requirements()]
        session.install("-c", str(constraints), *editable, *tests, "pytest-xdist")
        session.run("python", "-c", f"import torch; assert torch.__version__.startswith('{oldest}'), torch.__version__")
        run = ("train-cli", "run", "examples/plans/quickstart.toml", "--set", "run.steps=3", "--set", "parallel.dp=2")
        session.run(*run, "--set", f'run.folder="{Path(folder).as_posix()}"')
    session.run("python", "-m", "pytest", *SIDE_BY_SIDE, *session.posargs, env=FOR_TESTS)


@nox.session(venv_backend="none", requires=["dev"])
def plans(session: nox.Session) -> None:
    """Check every example plan and every plan in the documentation; train each example for three steps."""
    examples = sorted((ROOT / "examples" / "plans").glob("*.toml"))
    assert examples, "no example plans"
    with tempfile.TemporaryDirectory() as folder:
        written = list(pages.write_plans(ROOT, examples[0], Path(folder)))
        in_dev(session, "train-cli", "check", *map(str, (*examples, *written)))
        for example in examples:
            override = ("--set", "run.steps=3", "--set", f'run.folder="{Path(folder, "runs").as_posix()}"')
            in_dev(session, "train-cli", "run", str(example), "--overwrite", *override)


@nox.session(reuse_venv=False, default=False)
def readme(session: nox.Session) -> None:
    """README's commands, all of them in their order, in a clone of what is committed and a fresh environment.

    One is left out, `nox -s tests`: that is the session of this name, and takes minutes. Of commands that do the same,
    the first: README marks the others (`sh alternative`).
    """
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "sley")
        session.run("git", "clone", "--quiet", str(ROOT), str(clone), external=True)
        session.chdir(clone)
        for step in pages.steps(Path("README.md").read_text("utf-8")):
            if isinstance(step, pages.Plan):
                Path("plan.toml").write_text(step.text, "utf-8")
            elif step.command != "python -m nox -s tests":
                session.run("bash", "-ec", step.command, external=True, env={"NOX_ENVDIR": None, "PIP_NO_COMPILE": "1"})


@nox.session(venv_backend="none", requires=["dev"], default=False)
def bench(session: nox.Session) -> None:
    """Run every benchmark, or those named: `nox -s bench -- overhead`."""
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        if not session.posargs or script.stem in session.posargs:
            in_dev(session, "python", str(script), **FOR_TESTS)


@nox.session(venv_backend="none", requires=["dev"], default=False)
def campaign(session: nox.Session) -> None:
    """The tests that are too long for every change."""
    in_dev(session, "python", "-m", "pytest", "-m", "campaign", *session.posargs, **FOR_TESTS)


# -- what the sessions are made of -------------------------------------------------------------------------------------


def torch_floor() -> str:
    """The version of torch from which core's requirements begin, with all three numbers."""
    (core,) = (package for package in PACKAGES if package.module == "sley_core")
    (lowest,) = (found[1] for need in core.manifest["project"]["dependencies"] if (found := LOWEST_TORCH.match(need)))
    return lowest if lowest.count(".") == 2 else f"{lowest}.0"


def import_rules() -> Iterator[str]:
    """The configuration of import-linter: which package may import which, and what must stay free of torch."""
    modules = [package.module for package in PACKAGES]
    plugins = [package.module for package in PACKAGES if package.is_plugin]
    apps = [package.module for package in PACKAGES if package.folder.startswith("apps/")]
    yield "[tool.importlinter]"
    yield f"root_packages = {modules}"
    yield "include_external_packages = true"
    yield "exclude_type_checking_imports = true"

    def contract(name: str, kind: str, **lists: list[str]) -> Iterator[str]:
        yield from ("[[tool.importlinter.contracts]]", f'name = "{name}"', f'type = "{kind}"')
        yield from (f"{key} = {values}" for key, values in lists.items())

    if len(plugins) > 1:
        yield from contract("no plugin imports a sibling", "independence", modules=plugins)
    yield from contract(
        "core imports no plugin and no app", "forbidden", source_modules=["sley_core"], forbidden_modules=modules[1:]
    )
    if plugins:
        yield from contract(
            "an app meets plugins through core only", "forbidden", source_modules=apps, forbidden_modules=plugins
        )
        yield from contract("a plugin imports no app", "forbidden", source_modules=plugins, forbidden_modules=apps)
    yield from contract(
        "plans and plugins are known without torch",
        "forbidden",
        source_modules=sorted(torch_free_modules()),
        forbidden_modules=["torch"],
    )


def torch_free_modules() -> Iterator[str]:
    """What `train-cli check` and `train-cli plugins` may import: a second and a half is too long for a help page."""
    of_core = {"errors", "topology", "records", "hookspecs", "protocols", "loader", "plan", "actions"}
    for package in PACKAGES:
        for path in (ROOT / package.source).rglob("*.py"):
            name = path.relative_to(ROOT / package.source).with_suffix("").as_posix().replace("/", ".")
            first, *rest = name.removesuffix(".__init__").split(".")
            if rest[-1:] in (["config"], ["plugin"]) and "testing" not in rest:
                yield name
            elif first == "sley_core" and len(rest) == 1 and rest[0] in of_core:
                yield f"{first}.{rest[0]}"


def first_cases(listed: str) -> list[str]:
    """Of the names of tests that pytest lists, one a line, the first of each test: the others differ in parameters."""
    names = [line for line in listed.splitlines() if "::" in line]
    return list({name.partition("[")[0]: name for name in reversed(names)}.values())[::-1]


def assert_licensed(package: Package, archives: Path) -> None:
    """Both archives of the package, in the folder `archives`, have the licence that its metadata name."""
    if "license" not in package.manifest["project"]:
        return
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel, tarfile.open(next(archives.glob("*.tar.gz"))) as sdist:
        for names in (wheel.namelist(), sdist.getnames()):
            assert any(Path(name).name == "LICENSE" for name in names), (
                f"{package.distribution} has no LICENSE: {names}"
            )


def alone_program(package: Package) -> str:
    """A program that fails unless `package` comes from a wheel, all of it imports, and no sibling can be imported.

    So what it imports is in its requirements; a module may lack what an extra of the package brings, `test` included.
    """
    absent = [other.module for other in PACKAGES if other.module not in (package.module, "sley_core")]
    extras = package.manifest["project"].get("optional-dependencies", {}).values()
    optional = sorted({re.split(r"\W", requirement)[0] for extra in extras for requirement in extra})
    return f"""
import importlib, importlib.util, pkgutil
import {package.module} as package
assert "site-packages" in package.__file__, package.__file__
found = [name for name in {absent} if importlib.util.find_spec(name)]
assert not found, f"siblings can be imported: {{found}}"
for module in pkgutil.walk_packages(package.__path__, "{package.module}."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in {optional}:
                raise
"""
