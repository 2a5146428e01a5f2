"""What the pages of docs/ show is what is there."""

import doctest
import re
from pathlib import Path

import pytest

from sley_core.plan.load import load_plan
from sley_testing.plans import loader_of

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PACKAGES = [path.parent for pattern in ("packages/*", "apps/*") for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))]
PICKLES = "packages/testing/tests/outsider/own/sley_pickles/checkpointer.py"
EXAMPLE = ROOT / "examples" / "plugins" / "sley-narrow"


pytestmark = pytest.mark.skipif(not PAGES, reason="the documentation is not part of the sdist")


def shown_files(page: str) -> dict[str, str]:
    """Code by the path that stands above it."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return dict(re.findall(r"^\*\*(\S+)\*\*\n\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("write-a-plugin.md", ["pyproject.toml", "src/sley_narrow/plugin.py", "src/sley_narrow/handler.py", PICKLES]),
        ("testing-plugins.md", ["tests/test_runs.py", "packages/testing/tests/outsider/test_schedules.py"]),
    ],
)
def test_what_a_page_shows_of_a_file_is_there(page: str, files: list[str]) -> None:
    """The whole file of the example plugin, which its tests import, or a part of another file of tests."""
    shown = shown_files(page)
    assert set(files) <= shown.keys()
    for path, code in shown.items():
        if (EXAMPLE / path).exists():
            assert code == (EXAMPLE / path).read_text("utf-8"), path
        else:
            assert code in (ROOT / path).read_text("utf-8"), path


@pytest.mark.parametrize("page", [page for page in PAGES if ">>> " in page.read_text("utf-8")], ids=lambda page: page.name)
def test_the_examples_of_a_page_give_what_it_says(page: Path) -> None:
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, place in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if place:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert place in anchors, f"{page.name} links to {target}#{place}"


def test_the_modules_that_internals_names_are_there() -> None:
    """Paths are below core's source, or below that of another package."""
    text = (ROOT / "docs" / "internals.md").read_text("utf-8")
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+(?:\.py)?)`", text))
    named |= set(re.findall(r"`([a-z_]+\.py)`", text)) - {"config.py"}  # of the examples
    roots = [ROOT, ROOT / "packages/core/src/sley_core", *sorted(ROOT.glob("packages/*/src")), ROOT / "apps/train-cli/src"]
    assert named
    assert not [path for path in sorted(named) if not any((root / path).exists() for root in roots)]


def test_the_tour_names_what_its_files_have() -> None:
    text = (ROOT / "docs" / "tour.md").read_text("utf-8")
    stops = re.findall(r"\]\(([^)]+)\)\*\*\s+\((\d+)\s+lines\)(.*?)\n\n", text, re.DOTALL)
    assert len(stops) == 7
    for path, lines, words in stops:
        code = (ROOT / "docs" / path).read_text("utf-8")
        count = len(code.splitlines())
        assert abs(int(lines) - count) <= count // 10, f"{path} has {count} lines"
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", words):
            assert re.search(rf"\b{name}\b", code), f"{path} has no {name}"


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
        ROOT / "examples" / "plans" / "quickstart.toml", ['gradient_handlers.0.use="odd.one"', *said], loader=loader_of({})
    )
    assert [handler.name for handler in plan.gradient_handlers] == ["core.each"]
    assert plan.batch.micro_size == 4
