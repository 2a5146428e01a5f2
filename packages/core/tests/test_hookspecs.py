"""The hooks are documented in one form, and docs/hooks.md is what they say."""

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import reference_pages

from sley_core import hookspecs
from sley_core.errors import PluginError
from sley_testing.plans import loader_of

PAGE = Path(__file__).parents[3] / "docs" / "hooks.md"
HOOKS = [name for name in vars(hookspecs) if name.startswith("sley_")]


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_has_the_fixed_lines_and_its_example_implements_it(name: str) -> None:
    function = getattr(hookspecs, name)
    text = reference_pages.read_hook(name, function)
    assert text.lines["Since"].startswith("core ")
    assert text.lines["May communicate"].split(",")[0] in ("yes", "no")
    tree = ast.parse(text.lines["Example"])
    (implementation,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert implementation.name == name
    assert [ast.unparse(decorator) for decorator in implementation.decorator_list] == ["hookimpl"]
    assert {argument.arg for argument in implementation.args.args} <= set(inspect.signature(function).parameters)


def test_a_hook_whose_mark_was_forgotten_is_refused() -> None:
    """pluggy would pass it over, and the plan would run without its check."""
    plugin = SimpleNamespace(sley_check_plan=lambda plan: ())
    with pytest.raises(PluginError) as caught:
        loader_of({"all": plugin}).load("all")
    (found,) = caught.value.diagnostics
    assert found.code == "plugin-hook"
    assert found.message.endswith("its `sley_check_plan` would never be called, because it is not marked as a hook")
    assert found.hint == "add `@hookimpl` from `sley_core.hookspecs` above the function"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of the sdist")
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == reference_pages.hooks_page(), "run `python .ci/reference_pages.py hooks > docs/hooks.md`"
