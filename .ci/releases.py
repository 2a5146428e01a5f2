"""Releases: which version of which package was built from which commit, and wheels of old ones.

releases.toml has a table for each distribution, `"VERSION" = "COMMIT"`, the oldest first, and `baseline`: the commit with which
`nox -s compat` compares while nothing is released.
"""

import shutil
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nox
from manifests import PACKAGES, Package, with_dependencies

FILE = "releases.toml"


def read(root: Path) -> dict[str, dict[str, str]]:
    """The released versions of each distribution, with the commit of each."""
    tables = tomllib.loads((root / FILE).read_text("utf-8"))
    return {name: versions for name, versions in tables.items() if isinstance(versions, dict)}


def baseline(root: Path) -> str:
    """The commit that stands for the last release while there is none."""
    return str(tomllib.loads((root / FILE).read_text("utf-8"))["baseline"])


def add(root: Path, package: Package, commit: str) -> None:
    """Adds the line of a release."""
    released = read(root)
    released.setdefault(package.distribution, {})[package.version] = commit
    head = (root / FILE).read_text("utf-8").partition("\n[")[0].rstrip()  # the comment and the baseline
    tables = [
        "\n".join((f"[{name}]", *(f'"{version}" = "{built}"' for version, built in versions.items())))
        for name, versions in sorted(released.items())
    ]
    (root / FILE).write_text("\n\n".join((head, *tables)) + "\n", "utf-8")


def due(root: Path) -> list[Package]:
    """The packages whose version has no line yet."""
    released = read(root)
    return [
        package
        for package in PACKAGES
        if not package.is_example and package.version not in released.get(package.distribution, {})
    ]


def last_commit(root: Path, distribution: str) -> str:
    """The commit of the newest release of a distribution, or the baseline."""
    versions = read(root).get(distribution)
    return next(reversed(versions.values())) if versions else baseline(root)


def has(session: nox.Session, commit: str) -> bool:
    """Whether this clone has the commit: a shallow one lacks old ones."""
    found = session.run("git", "cat-file", "-t", commit, external=True, silent=True, success_codes=[0, 128])
    return str(found).strip() == "commit"


@contextmanager
def worktree(session: nox.Session, commit: str, folder: Path) -> Iterator[Path]:
    """The tree of a commit in `folder`, which is made and removed."""
    session.run("git", "worktree", "add", "--quiet", "--detach", str(folder), commit, external=True)
    try:
        yield folder
    finally:
        session.run("git", "worktree", "remove", "--force", str(folder), external=True)


def build(session: nox.Session, source: Path, out: Path, *, sdist: bool = False) -> list[Path]:
    """Builds the wheel of the package in `source`, through its sdist if that is wanted too; returns the files in `out`."""
    kinds = () if sdist else ("--wheel",)
    session.run("python", "-m", "build", "-q", "--no-isolation", *kinds, "--outdir", str(out), str(source), silent=True)
    return sorted(out.glob("*"))


def wheels(session: nox.Session, tree: Path, folder: Path, wanted: Iterable[Package] = PACKAGES) -> dict[str, Path]:
    """Builds the wheels of those packages of `wanted` that are in `tree`; returns them by distribution."""
    found: dict[str, Path] = {}
    for package in wanted:
        source = tree / package.folder
        if not (source / "pyproject.toml").exists():
            continue
        out = folder / package.distribution
        shutil.rmtree(out, ignore_errors=True)
        (found[package.distribution],) = (file for file in build(session, source, out) if file.suffix == ".whl")
    return found


def installed_alone(session: nox.Session, made: dict[str, Path], package: Package, *, tests: bool = True) -> None:
    """Installs the wheels of a package and of what it needs, and its tests if they are asked for, in place of all others of
    this repository.
    """
    others = (other.distribution for other in PACKAGES)
    session.run("pip", "uninstall", "-q", "-y", *others, silent=True)
    needed = sorted(str(made[one.distribution]) for one in with_dependencies(package, tests=tests))
    session.run("python", "-m", "pip", "install", "-q", "-c", "constraints.txt", *needed)
