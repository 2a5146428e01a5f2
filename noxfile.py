"""Every check of this repository, for people and for machines.

    nox -s quickstart       train the example plan on two CPU ranks
    nox -s tests            all tests; `nox -s tests -- -k topology` passes arguments on to pytest
    nox -s readme           what README tells a newcomer to type, in its order
    nox -s thirdparty       the example plugins from wheels, as an outsider has them
    nox -s floor            the quickstart and all tests, with the oldest torch that the packages allow
    nox -s release          build and check what is not released yet; `nox -s compat` mixes versions
    nox -s gpu              what needs a CUDA device: tests and benchmarks, with one table of figures and targets at the end
    nox -l                  everything else

Packages are found on disk: a new folder under packages/, apps/ or examples/plugins/ gets all sessions.

torch is large, so it is installed into three environments only: `dev` (all packages, editable; used by tests, isolated,
typecheck, plans, bench and campaign), `quickstart` (what a user has) and `floor`. They are kept between
calls: `nox -R` skips installing, `nox --reuse-venv=never` makes them anew. The backend is virtualenv with pip, which
follows the user's own index settings: with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu the small CPU build
of torch comes, where the public index has the CUDA build for Linux.
"""

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
import nox.command

sys.path.insert(0, str(Path(__file__).parent / ".ci"))
import pages
import releases
from alone import Environment, Installed, link
from imports import import_rules
from manifests import (
    BACKENDS,
    PACKAGES,
    Package,
    assert_licensed,
    external_test_requirements,
    selected_packages,
    torch_floor,
    with_dependencies,
    write_facts,
)
from thirdparty import Outside, check

nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "lint", "typecheck", "isolated", "plans"]
nox.needs_version = ">=2025.2"

# Without AMX: on some virtual machines that say they have it, torch's bf16 linears of some widths (7 x 27 x 27) end the process
# with an illegal instruction, or fail with "could not create a primitive".
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Programs that a session starts find compiled modules, as those of a user do: without, each compiles torch anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
ALL_FOLDERS = tuple(package.folder for package in PACKAGES)
CONSTRAINTS = ("-c", "constraints.txt")
FOR_TESTS = {"OMP_NUM_THREADS": "1"}
"""A test's ranks share the machine's cores: more threads than cores only make them wait for one another."""
SIDE_BY_SIDE = ("-n", str(os.cpu_count() or 1), "--dist", "worksteal")
"""One test per core at a time. A process without tests takes some of another's. One process more took 9 % longer on two cores:
each imports all tests, and has a fork server for ranks.
"""


# -- environments ------------------------------------------------------------------------------------------------------


@nox.session(default=False)
def dev(session: nox.Session) -> None:
    """Make .nox/dev: every package editable, with what its tests need. Point an editor here."""
    session.log("installs all packages and what their tests need: minutes at first, mostly for torch; `nox -R` skips it")
    install_editable(session, *external_test_requirements(), "pytest-xdist", "mypy")


def install_editable(
    session: nox.Session, *others: str, folders: Iterable[str] = ALL_FOLDERS, constraints: str = "constraints.txt"
) -> None:
    """Installs packages editable, and `others`. What builds them is installed once, and not for each of them anew."""
    session.install("-c", constraints, *BACKENDS, "editables")
    editable = [argument for folder in folders for argument in ("-e", folder)]
    session.install("--no-build-isolation", "-c", constraints, *editable, *others)


def dev_environment(session: nox.Session) -> Path:
    """Returns the folder of the environment `dev`."""
    return (Path(session.cache_dir).parent / "dev").resolve()


def in_dev(session: nox.Session, *command: str, success_codes: tuple[int, ...] = (0,), **env: str) -> None:
    """Run a command of the environment `dev`; another exit code than `success_codes` ends the session."""
    bin_dir = dev_environment(session) / ("Scripts" if os.name == "nt" else "bin")
    path = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
    changes = {"PATH": path, **env}
    session.run(str(bin_dir / command[0]), *command[1:], external=True, success_codes=success_codes, env=changes)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train examples/plans/quickstart.toml as a user would; an earlier run of it is overwritten."""
    session.log("installs torch and four packages: minutes at first; `nox -R` skips it")
    install_editable(
        session, folders=("packages/core", "packages/trainer", "packages/data", "packages/models", "apps/train-cli")
    )
    session.run("train-cli", "run", "examples/plans/quickstart.toml", "--overwrite", *session.posargs)


# -- checks ------------------------------------------------------------------------------------------------------------


@nox.session(venv_backend="none", requires=["dev"])
def tests(session: nox.Session) -> None:
    """All tests of all packages in one environment; with the folder of a package those of that package, with only
    what they need installed.

    `nox -s tests -- packages/dp -k parity`: in an environment of its own, as in the session `isolated`.
    """
    if selected_packages(session.posargs):
        session.notify("isolated", session.posargs)
        return
    in_dev(session, "python", "-m", "pytest", *SIDE_BY_SIDE, *session.posargs, **FOR_TESTS)


@nox.session
def lint(session: nox.Session) -> None:
    """Style (ruff), who may import whom (import-linter), and whether docs/errors.md has what the sources say."""
    session.install(*CONSTRAINTS, "ruff", "import-linter")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("python", ".ci/error_codes.py", "--check")
    sources = os.pathsep.join(package.source for package in PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "imports.toml")
        config.write_text("\n".join(import_rules()), "utf-8")
        session.run("lint-imports", "--config", str(config), env={"PYTHONPATH": sources})


@nox.session(venv_backend="none", requires=["dev"])
def typecheck(session: nox.Session) -> None:
    """Run mypy --strict over all packages and the benchmarks."""
    in_dev(session, "mypy", *(package.source for package in PACKAGES), "benchmarks")


@nox.session(requires=["dev"])
def isolated(session: nox.Session) -> None:
    """Each package from its wheel, made from its sdist: the wheel has all files, and the package and its tests can be imported
    with nothing beside them but what they require. With folders of packages, runs their tests; other arguments go to pytest.
    The example plugins are otherwise those of `thirdparty`.

    Each package gets an environment of links: to the wheels that it requires, and to other distributions in `dev`.
    """
    chosen = selected_packages(session.posargs)
    folders = [package.folder for package in chosen]
    options = [argument for argument in session.posargs if argument.rstrip("/") not in folders]
    if options and not chosen:
        session.error(f"name the folders of packages, such as packages/dp, before {' '.join(options)}")
    packages = chosen or [package for package in PACKAGES if not package.is_example]
    session.install(*CONSTRAINTS, "build", *BACKENDS)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as lanes:
        needed = list({other.module: other for package in packages for other in with_dependencies(package)}.values())
        wheels = list(lanes.map(lambda package: checked_wheel(session, package, Path(folder, package.module)), needed))
        together = Path(folder, "site-packages")  # a folder of this name holds no user's code
        session.run("python", "-m", "pip", "install", "-q", "--no-deps", "--target", str(together), *wheels)
        python = Path(session.bin, "python")
        of_dev = sysconfig.get_path("purelib", "venv", {"base": str(dev_environment(session))})
        installed = Installed([Path(of_dev), together])  # the wheels of `together` take the place of editable packages

        def passes(package: Package) -> bool:
            """Whether the package and its tests can be imported, and the tests pass if it is `chosen`."""
            environment = Environment(python, Path(folder, f"env-{package.module}"))
            link(installed.required([package.distribution]), environment.modules)
            for_tests = Path(folder, f"tests-{package.module}", "site-packages")
            link(installed.required([*package.test_requirements(), "pytest-xdist"]), for_tests)
            facts = write_facts(package, Path(folder, f"{package.module}.json"))
            check = (".ci/check_alone.py", str(facts), str(for_tests), package.tests)
            tests = ("-m", "pytest", *(SIDE_BY_SIDE if len(packages) == 1 else ()), *options, package.tests)
            path = f"{environment.python.parent}{os.pathsep}{os.environ['PATH']}"
            env = {**FOR_TESTS, "PATH": path, "PYTHONPATH": str(for_tests)}
            beside_others = len(packages) > 1  # then the reports of pytest are shown one after another
            try:
                session.run(str(environment.python), "-P", *check, external=True, silent=True)
                if chosen:
                    report = session.run(str(environment.python), "-P", *tests, env=env, external=True, silent=beside_others)
            except nox.command.CommandFailed:
                return False
            verb = "passes its tests" if chosen else "can be imported"
            session.log(f"{package.distribution} {verb} alone with what it needs")
            if chosen and beside_others:
                session.log(report)
            return True

        largest_first = sorted(packages, key=lambda package: -len(list(Path(package.tests).rglob("*.py"))))
        verdicts = lanes.map(passes, largest_first)
        failed = [package.folder for package, passed in zip(largest_first, verdicts, strict=True) if not passed]
    if failed:
        session.error(f"alone, these fail: {', '.join(failed)}")


def checked_wheel(session: nox.Session, package: Package, out: Path) -> str:
    """Builds the package's wheel from its sdist in the folder `out`; returns the wheel's path."""
    files = releases.build(session, ROOT / package.folder, out, sdist=True)
    assert_licensed(package, out)
    (wheel,) = (str(file) for file in files if file.suffix == ".whl")
    return wheel


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build the packages whose version is not released yet into dist/, check them, and note them in releases.toml.

    Every archive passes `twine check`, and each package its contract tests, alone with what it needs. Uploads nothing: prints
    the tags to set and the files to upload (docs/releasing.md). Commit releases.toml afterwards.
    """
    dirty = str(session.run("git", "status", "--porcelain", external=True, silent=True)).strip()
    if dirty:
        session.error(f"commit first: a release is a commit, and these files are not in it\n{dirty}")
    commit = str(session.run("git", "rev-parse", "HEAD", external=True, silent=True)).strip()
    packages = releases.due(ROOT)
    if not packages:
        session.log("nothing to release: raise a version in its pyproject.toml first")
        return
    session.install(*CONSTRAINTS, "torch", "build", "twine", *BACKENDS)
    with tempfile.TemporaryDirectory() as folder:
        made = releases.wheels(session, ROOT, Path(folder))
        dist = ROOT / "dist"
        for package in packages:
            out = dist / f"{package.distribution}-{package.version}"
            shutil.rmtree(out, ignore_errors=True)
            files = releases.build(session, ROOT / package.folder, out, sdist=True)
            session.run("twine", "check", "--strict", *map(str, files))
            assert_licensed(package, out)
            (made[package.distribution],) = (file for file in files if file.suffix == ".whl")
        for package in packages:
            releases.installed_alone(session, made, package, tests=False)
            facts = write_facts(package, Path(folder, f"{package.module}.json"))
            session.run("python", "-P", str(ROOT / ".ci" / "check_alone.py"), str(facts))
            releases.installed_alone(session, made, package)
            check_contracts(session, package)
    for package in packages:
        releases.add(ROOT, package, commit)
    session.log("released; commit releases.toml, then set these tags and upload these files:")
    for package in packages:
        session.log(f"  git tag {package.distribution}-{package.version} {commit}")
    for package in packages:
        session.log(f"  dist/{package.distribution}-{package.version}/*")


def check_contracts(session: nox.Session, package: Package) -> None:
    """Runs the contracts of what a package offers to plans, where it offers anything and the test kit is installed."""
    if "sley.plugins" not in package.manifest["project"].get("entry-points", {}) or package.is_core:
        return
    session.run("python", "-m", "sley_testing.certify", package.distribution, env=FOR_TESTS)


@nox.session(default=False)
def compat(session: nox.Session) -> None:
    """Both ways in which versions meet: each plugin as it is here on the last released core, and core as it is here under the
    last released plugins and the example plugins. Each passes its contracts.

    Old ones are built from their commits; one whose commit this clone lacks is skipped. Before the first release the baseline
    of releases.toml stands for it.
    """
    session.install(*CONSTRAINTS, "torch", "build", *BACKENDS)
    plugins = [package for package in PACKAGES if package.is_plugin and package.distribution != "sley-cma"]
    with tempfile.TemporaryDirectory() as folder:
        here = releases.wheels(session, ROOT, Path(folder, "here"))
        for package in plugins:
            # Core's commit has the tools that are pinned to it.
            old = {} if package.is_example else old_wheels(session, "sley-core", Path(folder))
            if old:
                session.log(f"{package.distribution} as it is here, on the last released core")
                releases.installed_alone(session, {**here, **old, package.distribution: here[package.distribution]}, package)
                check_contracts(session, package)
            own = here if package.is_example else old_wheels(session, package.distribution, Path(folder))
            if package.distribution in own:
                session.log(f"core as it is here, under the last released {package.distribution}")
                releases.installed_alone(session, {**here, package.distribution: own[package.distribution]}, package)
                check_contracts(session, package)


def old_wheels(session: nox.Session, distribution: str, folder: Path) -> dict[str, Path]:
    """The wheels of the commit of a distribution's last release; none where this clone lacks it."""
    commit = releases.last_commit(ROOT, distribution)
    out = folder / commit
    if not out.exists():
        if not releases.has(session, commit):
            session.warn(f"skipped: this clone does not have {commit[:12]}, the last release of {distribution}")
            return {}
        with releases.worktree(session, commit, folder / f"tree-{commit}") as tree:
            releases.wheels(session, tree, out)
    return {file.parent.name: file for file in out.glob("*/*.whl")}


@nox.session(venv_backend="none", default=False)
def thirdparty(session: nox.Session) -> None:
    """The example plugins as an outsider has them: their wheels, in an environment outside the repository.

    Each has its plan refused before it is installed, trained then, refused again beside another package of its name, and passes
    its tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        outside = Outside(session, Path(folder), Path("constraints.txt"))
        for package in PACKAGES:
            if package.is_example and package.distribution in (session.posargs or [package.distribution]):
                check(session, outside, package)


@nox.session(default=False)
def floor(session: nox.Session) -> None:
    """The quickstart and all tests with the oldest torch that core's requirements allow; the other tools are the same."""
    oldest = torch_floor()
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        pinned = Path("constraints.txt").read_text("utf-8")
        constraints.write_text(re.sub(r"^torch==.*$", f"torch=={oldest}", pinned, flags=re.MULTILINE), "utf-8")
        install_editable(session, *external_test_requirements(), "pytest-xdist", constraints=str(constraints))
        session.run("python", "-c", f"import torch; assert torch.__version__.startswith('{oldest}'), torch.__version__")
        run = ("train-cli", "run", "examples/plans/quickstart.toml", "--set", "run.steps=3", "--set", "parallel.dp=2")
        session.run(*run, "--set", f'run.folder="{Path(folder).as_posix()}"')
    session.run("python", "-m", "pytest", *SIDE_BY_SIDE, *session.posargs, env=FOR_TESTS)


@nox.session(venv_backend="none", requires=["dev"])
def plans(session: nox.Session) -> None:
    """Check every example plan and every plan in the documentation; train each example for three steps.

    The first is run as a user runs it, the others on ranks that are forked (.ci/train_plans.py).
    """
    examples = sorted((ROOT / "examples" / "plans").glob("*.toml"))
    assert examples, "no example plans"
    with tempfile.TemporaryDirectory() as folder:
        written = list(pages.write_plans(ROOT, examples[0], Path(folder)))
        in_dev(session, "train-cli", "check", *map(str, (*examples, *written)))
        runs = Path(folder, "runs")
        changes = ("--set", "run.steps=3", "--set", f'run.folder="{runs.as_posix()}"')
        in_dev(session, "train-cli", "run", str(examples[0]), *changes)
        in_dev(session, "python", ".ci/train_plans.py", str(runs), *map(str, examples), **FOR_TESTS)


@nox.session(reuse_venv=False, default=False)
def readme(session: nox.Session) -> None:
    """All commands of the README, in order, in a clone of what is committed and a fresh environment.

    One is left out, `nox -s tests`: that is the session of this name, and takes minutes. Of commands that do the same,
    the first: README marks the others (`sh alternative`). As README says, commands use the environment of the quickstart once
    there is one; it has what builds packages, so pip builds them there and not in an environment for each. The answer of
    `chat` must have the form of those on which its model was trained.
    """
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "sley")
        session.run("git", "clone", "--quiet", str(ROOT), str(clone), external=True)
        session.chdir(clone)
        activate = f'PATH="{clone}/.nox/quickstart/bin:$PATH"'  # in the shell: nox puts its own environment first
        env = {"NOX_ENVDIR": None, "PIP_NO_COMPILE": "1", "PIP_NO_BUILD_ISOLATION": "0"}
        for step in pages.steps(Path("README.md").read_text("utf-8")):
            if isinstance(step, pages.Plan):
                Path("plan.toml").write_text(step.text, "utf-8")
            elif step.command != "python -m nox -s tests":
                is_chat = "train-cli chat" in step.command
                output = session.run("bash", "-ec", f"{activate}; {step.command}", external=True, silent=is_chat, env=env)
                if is_chat:
                    session.log(output)
                    pages.check_answer(str(output))


@nox.session(venv_backend="none", requires=["dev"], default=False)
def bench(session: nox.Session) -> None:
    """Run every benchmark, or those named: `nox -s bench -- overhead`."""
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        if not session.posargs or script.stem in session.posargs:
            in_dev(session, "python", str(script), **FOR_TESTS)


@nox.session(venv_backend="none", requires=["dev"], default=False)
def gpu(session: nox.Session) -> None:
    """Run all tests that need CUDA, and benchmarks/memory.py, gpu.py and loss.py there. Print one table of figures and targets.

    Takes some fifteen minutes of one device. Tests that may share it run first. The session fails if a test fails or a target
    is missed, after everything has run.
    """
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.txt")
        env = {"SLEY_FIGURES": str(figures)}
        # Few at a time, since the host is busy when each rank starts CUDA.
        in_parallel = ("-n", str(max(2, min(8, (os.cpu_count() or 1) // 2))))
        missed = []
        for selection, options in (("not alone", in_parallel), ("alone", ())):
            arguments = ("-m", f"gpu and {selection}", "-rs", *options, *session.posargs)
            try:
                in_dev(session, "python", "-m", "pytest", *arguments, success_codes=(0, 5), **FOR_TESTS, **env)
            except nox.command.CommandFailed:
                missed.append(f"tests, {selection}")
        memory = ("--device", "cuda", "--rounds", "10", "--part", "between", "park")
        in_dev(session, "python", "benchmarks/memory.py", *memory, success_codes=(0, 1), **FOR_TESTS, **env)
        in_dev(session, "python", "benchmarks/gpu.py", success_codes=(0, 1), **env)
        logits = ("--device", "cuda", "--dtype", "bfloat16", "--tokens", "8192", "--classes", "128256")
        in_dev(session, "python", "benchmarks/loss.py", *logits, **env)
        table = figures.read_text("utf-8") if figures.exists() else ""
        memory_labels = ("a step with states away", "offload", "onload", "device memory given back")
        expected = (*memory_labels, "a, compiled: Sley's MFU", *(f"{part}:" for part in "bcdef"))
        missed += [label for label in expected if not re.search(f"^{label}", table, re.MULTILINE)]
        session.log("\n" + table)
        if missed or "NOT MET" in table:
            session.error(f"a test fails, or a target is not met or not measured: {', '.join(missed)}")


@nox.session(venv_backend="none", requires=["dev"], default=False)
def campaign(session: nox.Session) -> None:
    """The tests that are too long for every change."""
    in_dev(session, "python", "-m", "pytest", "-m", "campaign", *session.posargs, **FOR_TESTS)
