"""The hooks are documented in one form, and docs/hooks.md is what they say."""

from __future__ import annotations

import ast
import builtins
import inspect
from pathlib import Path
from typing import get_args

import pytest

from sley_core import hook_reference, hookspecs, records
from sley_core.table import RecordKind

PAGE = Path(__file__).parents[3] / "docs" / "hooks.md"
HOOKS = [name for name in vars(hookspecs) if name.startswith("sley_")]
NOTIFICATIONS = {"sley_run_started", "sley_step_finished", "sley_run_finished"}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_has_the_fixed_lines_and_its_example_implements_it(name: str) -> None:
    function = getattr(hookspecs, name)
    text = hook_reference.read_hook(name, function)
    assert text.lines["Since"].startswith("core ")
    assert text.lines["May communicate"].split(",")[0] in ("yes", "no")
    tree = ast.parse(text.lines["Example"])
    (implementation,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert implementation.name == name
    assert [ast.unparse(decorator) for decorator in implementation.decorator_list] == ["hookimpl"]
    assert {argument.arg for argument in implementation.args.args} <= set(inspect.signature(function).parameters)


def test_the_records_of_an_example_exist_with_those_fields() -> None:
    for hook in hook_reference.hooks():
        for call in ast.walk(ast.parse(hook.lines["Example"])):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id in vars(builtins):
                continue
            record = getattr(records, call.func.id)
            inspect.signature(record).bind(*call.args, **{str(keyword.arg): None for keyword in call.keywords})


def test_only_notifications_run_after_the_start_and_may_communicate() -> None:
    for hook in hook_reference.hooks():
        if hook.name not in NOTIFICATIONS:
            assert hook.lines["May communicate"] == "no", hook.name
            assert "->" in hook.signature
            assert not hook.signature.endswith("None"), hook.name


def test_every_kind_of_record_has_its_hook() -> None:
    assert {f"sley_{kind}" for kind in get_args(RecordKind)} <= set(HOOKS)


@pytest.mark.parametrize(
    ("docstring", "complaint"),
    [
        (None, "no line `Called:`"),
        (
            "One line.\n\nCalled: now\nReturns: x\nRanks: all\nMay communicate: no\nSince: 1\nExample:\n    f()",
            "`Returns:`",
        ),
        ("One line.\n\nCalled:\nRanks: all\nMay communicate: no\nReturns: x\nSince: 1\nExample:\n    f()", "`Called:`"),
    ],
)
def test_a_docstring_out_of_form_is_named(docstring: str | None, complaint: str) -> None:
    def sley_example() -> None: ...

    sley_example.__doc__ = docstring
    with pytest.raises(ValueError, match=f"sley_example: .*{complaint}"):
        hook_reference.read_hook("sley_example", sley_example)


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of the sdist")
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == hook_reference.page(), "run `python -m sley_core.hook_reference > docs/hooks.md`"
