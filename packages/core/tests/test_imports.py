"""Who names whom, annotations included: what import-linter, which looks at what runs, does not see."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def modules() -> dict[str, ast.Module]:
    """The modules of sley_core, parsed, by name."""
    files = {file.relative_to(SOURCE).with_suffix(""): file for file in (SOURCE / "sley_core").rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): ast.parse(file.read_text("utf-8")) for name, file in files.items()}


def statements(node: ast.AST, *, annotations: bool) -> Iterator[ast.AST]:
    """All statements within `node`, without a look at what they compute: no import is in there.

    annotations: whether those under `if TYPE_CHECKING` are among them.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            if not annotations and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child
            yield from statements(child, annotations=annotations)


def named(tree: ast.Module, *, annotations: bool) -> Iterator[str]:
    """The modules, or things in them, that imports of `tree` name."""
    for node in statements(tree, annotations=annotations):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


@cache
def graph(*, annotations: bool = True) -> dict[str, set[str]]:
    """By module, the modules that it imports; unless told otherwise, those for annotations too."""
    trees = modules()
    found: dict[str, set[str]] = {}
    for name, tree in trees.items():
        targets = {target if target in trees else target.rpartition(".")[0] for target in named(tree, annotations=annotations)}
        found[name] = {target for target in targets if target in trees and target != name}
    return found


def reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """What `start` imports, and what that imports, and so on."""
    seen: set[str] = set()
    left = list(edges[start])
    while left:
        if (name := left.pop()) not in seen:
            seen.add(name)
            left += edges[name]
    return seen


def test_no_modules_import_each_other():
    edges = graph(annotations=False)
    assert len(edges) > 60
    assert not [name for name in edges if name in reached(name, edges)]


def test_folders_are_layers():
    """A folder, or a module beside them, imports only what is below it; names in annotations do not count."""

    def place(module: str) -> str:
        parts = module.split(".")
        return parts[1] if len(parts) > 1 else ""

    folders: dict[str, set[str]] = {}
    for name, targets in graph(annotations=False).items():
        folders.setdefault(place(name), set()).update(place(target) for target in targets)
    edges = {name: targets - {name, ""} for name, targets in folders.items()}
    circles = {name: sorted(reached(name, edges)) for name in edges if name in reached(name, edges)}
    assert not circles, circles


ABOVE = ("sley_core.assemble",)


def test_nothing_below_the_run_names_it():
    """Plugins are given `Parts`; whoever needs a run is above it."""
    names = {name for name, targets in graph().items() if "sley_core.run" in targets}
    below = {name for name in names if not name.startswith(ABOVE)}
    assert below - {"sley_core"} == set()


REPOSITORY = Path(__file__).parents[3]
TOOLS = ("estimate", "testing", "doctor")
SIMULATION = re.compile(r"\bis_(fake|real|silent)\b|\bsimulation (is|else)\b|\bif (not )?\S*simulation\b")


def test_few_places_ask_whether_a_world_is_real():
    """Plugins never do: groups, devices and tensors of a fake world behave so that they need not."""
    asking = [
        (package.name, f"{file.relative_to(REPOSITORY)}:{number}: {line.strip()}")
        for package in (REPOSITORY / "packages").iterdir()
        if package.name not in TOOLS
        for file in (package / "src").rglob("*.py")
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if SIMULATION.search(line)
    ]
    assert [place for name, place in asking if name != "core"] == []
    assert len(asking) <= 5, "\n".join(place for _, place in asking)
