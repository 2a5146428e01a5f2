"""Checks a package in an environment that contains only this package and its requirements.

    python -P .ci/check_alone.py FACTS [MODULES TESTS]    # the file of manifests.write_facts

The package comes from a wheel with all files of its sources, all its modules can be imported, no sibling that it does not
require can be imported, and each import of its sources, also in functions, names an installed module. A module may fail to
import a requirement of an extra, and a module of a tool may fail to import another tool. Imports may also fail in a `try`, or
if the file tests whether the module is installed.

TESTS, the folder of the package's tests, is checked in the same way, and pytest collects its tests. MODULES is a folder with
the modules that only the tests require.
"""

import ast
import importlib
import importlib.util
import json
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTED = re.compile(r"(?:importorskip|find_spec)\(\"(\w+)")  # modules that a file imports only if they are installed
CONDITIONS = re.compile(r"\bTYPE_CHECKING\b|\bsys\.version_info\b")


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Yields the first parts of the names of all modules that `node` imports, except in a `try` or under `CONDITIONS`."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]
    elif not isinstance(node, ast.Try) and not (isinstance(node, ast.If) and CONDITIONS.search(ast.unparse(node.test))):
        for child in ast.iter_child_nodes(node):
            yield from imported_modules(child)


def check_imports(folder: Path, allowed: Iterable[str]) -> None:
    """Asserts that each import in the files of `folder` names an installed module, one of the folder, or one of `allowed`."""
    files = list(folder.rglob("*.py"))
    known = {*allowed, *(file.stem for file in files), *(file.parent.name for file in files)}
    for file in files:
        text = file.read_text("utf-8")
        for name in set(imported_modules(ast.parse(text))) - known - set(TESTED.findall(text)):
            assert importlib.util.find_spec(name), f"{file} imports {name}, which is not required"


def check_package(name: str, files: list[str], absent: list[str], allowed: set[str]) -> None:
    """Asserts what the module's docstring says. files: the package's files. absent: its siblings without those it requires."""
    package = importlib.import_module(name)
    root = Path(str(package.__file__)).parent
    assert "site-packages" in root.parts, root
    missing = [file for file in files if not (root / file).exists()]
    assert not missing, f"the wheel lacks {missing}"
    # A folder in which pip left compiled modules has no origin.
    siblings = [sibling for sibling in absent if (spec := importlib.util.find_spec(sibling)) and spec.origin]
    assert not siblings, f"siblings can be imported: {siblings}"
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in allowed:
                    raise
    check_imports(root, allowed)


facts = json.loads(Path(sys.argv[1]).read_text("utf-8"))
allowed = {*facts["optional"], *(facts["absent"] if facts["is_tool"] else ())}
check_package(facts["module"], facts["files"], facts["absent"], allowed)
if sys.argv[2:]:
    modules, tests = sys.argv[2:]
    sys.path.append(modules)
    importlib.invalidate_caches()
    ours = {file.stem for file in Path(__file__).parent.glob("*.py")}  # pytest's `pythonpath` option makes them modules
    check_imports(Path(tests), allowed | ours)
    pytest = importlib.import_module("pytest")
    # The modules of the package are imported already, so that pytest cannot rewrite the `assert` statements of the test kit.
    sys.exit(pytest.main(["--collect-only", "-q", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", tests]))
