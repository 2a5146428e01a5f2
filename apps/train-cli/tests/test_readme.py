"""README's table of packages has each package, its size, and what it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli

CLONE = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(not (CLONE / "noxfile.py").exists(), reason="an sdist has no README of the repository")


def needs(folder: str) -> list[str]:
    """The names of a package's requirements, without `sley-`; core's own are left out of the others."""
    found = tomli.loads((CLONE / folder / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    names = [re.split(r"[=<>~]", one)[0].removeprefix("sley-") for one in found]
    return names if folder == "packages/core" else [one for one in names if one not in needs("packages/core")]


def test_the_table_has_every_package_with_its_size_and_needs() -> None:
    text = (CLONE / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\S+)\]\(\S+\) \| .* \| ([\d,]+) \| (.+) \|$", text, re.MULTILINE)
    folders = {path.parent.relative_to(CLONE).as_posix() for path in CLONE.glob("*/*/pyproject.toml")}
    assert {folder for folder, _, _ in rows} == {folder for folder in folders if folder.startswith(("packages", "apps"))}
    for folder, size, words in rows:
        assert words.split(", ") == needs(folder), folder
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in (CLONE / folder / "src").rglob("*.py"))
        assert abs(int(size.replace(",", "")) - lines) <= max(500, lines // 10), f"{folder} has {lines} lines"
