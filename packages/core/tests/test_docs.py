"""What the pages of docs/ show is what is there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from sley_core.loader import Loader
from sley_core.plan.load import load_plan

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PACKAGES = [
    path.parent for pattern in ("packages/*", "apps/*") for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
]
EXAMPLE = ROOT / "examples" / "plugins" / "sley-narrow"

pytestmark = pytest.mark.skipif(not PAGES, reason="the documentation is not part of the sdist")


def test_the_plugin_of_the_page_is_the_example() -> None:
    text = (ROOT / "docs" / "write-a-plugin.md").read_text("utf-8")
    shown = dict(re.findall(r"^\*\*(\S+)\*\*\n\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert {"pyproject.toml", "src/sley_narrow/plugin.py", "src/sley_narrow/handler.py"} <= shown.keys()
    for path, code in shown.items():
        assert code == (EXAMPLE / path).read_text("utf-8"), path


@pytest.mark.parametrize(
    "page", [page for page in PAGES if ">>> " in page.read_text("utf-8")], ids=lambda page: page.name
)
def test_the_examples_of_a_page_give_what_it_says(page: Path) -> None:
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_stands_alone(package: Path) -> None:
    """Its folder is what an archive holds: the licence is in it, and its page, leads nowhere outside."""
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    page = (package / "README.md").read_text("utf-8")
    assert not [target for target in re.findall(r"\]\(([^)\s]+)\)", page) if not target.startswith("https://")]


def test_the_example_of_set_in_the_reference_changes_a_plan_that_names_another_record() -> None:
    said = re.findall(r"`--set '?(.*?)'?`", (ROOT / "docs" / "plan.md").read_text("utf-8"))
    assert len(said) == 2
    plan = load_plan(
        ROOT / "examples" / "plans" / "quickstart.toml", ['gradient_handlers.0.use="odd.one"', *said], loader=Loader({})
    )
    assert [handler.name for handler in plan.gradient_handlers] == ["core.each"]
    assert plan.batch.micro_size == 4
