"""Makes docs/hooks.md from `sley_core.hookspecs`: `python -m sley_testing.hook_reference > docs/hooks.md`.

A hook's docstring is a sentence or two, then fixed lines; a test checks the lines and that the page is up to date.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from textwrap import dedent

from sley_core import hookspecs

HEADINGS = ("Called", "Ranks", "May communicate", "Returns", "Since", "Example")
"""The fixed lines of a hook's docstring, in their order."""

_INTRODUCTION = """\
# Hooks

This page is generated from `sley_core/hookspecs.py` by `python -m sley_testing.hook_reference`.

A plugin is an installed distribution with an entry point in the group `sley.plugins`; plans use the name of the entry
point (`narrow.reducer` is the record `reducer` of the plugin `narrow`). The module behind it marks functions with
`from sley_core.hookspecs import hookimpl`. An implementation may leave out arguments that it does not need; an argument
with a default value is not passed at all.

Hooks assemble a run; none is called in the step loop. Core indexes the records that they return by name and follows the
order of the plan, never the order in which plugins were found. `sley_core/records.py` describes the records, and
`sley_core/protocols` what the objects must do. [Write a plugin](write-a-plugin.md) makes one from start to end.

| Hook | In one line |
|---|---|
"""


@dataclass(frozen=True)
class HookText:
    """Holds one hook's docstring in parts: `lines` has a text for each of HEADINGS; the one of `Example` is code."""

    name: str
    signature: str
    description: str
    lines: Mapping[str, str]

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return self.description.split("\n\n")[0].split(". ")[0].replace("\n", " ").rstrip(".:")


def hooks() -> Iterator[HookText]:
    """Yields every hook in the order of the file.

    Raises ValueError with the hook's name where its docstring lacks one of the fixed lines or has them in another
    order.
    """
    for name, value in vars(hookspecs).items():
        if name.startswith("sley_"):
            yield read_hook(name, value)


def read_hook(name: str, function: Callable[..., object]) -> HookText:
    """Returns one hook's docstring in parts; raises ValueError as `hooks` does."""
    text = inspect.cleandoc(function.__doc__ or "")
    parts: list[str] = []
    for heading in HEADINGS:
        before, found, text = text.partition(f"\n{heading}:")
        if not found:
            raise ValueError(f"{name}: no line `{heading}:` after the ones before it ({', '.join(HEADINGS)})")
        parts.append(before.strip())
    description, *texts = parts
    lines = dict(zip(HEADINGS, [*texts, dedent(text).strip("\n")], strict=True))
    for heading, line in lines.items():
        if not line:
            raise ValueError(f"{name}: nothing after `{heading}:`")
    return HookText(name, f"{name}{inspect.signature(function)}".replace("'", ""), description, lines)


def page() -> str:
    """Returns the content of docs/hooks.md."""
    found = list(hooks())
    index = [f"| [`{hook.name}`](#{hook.name}) | {hook.summary} |\n" for hook in found]
    return _INTRODUCTION + "".join(index) + "".join(map(_section, found))


def _section(hook: HookText) -> str:
    table = "".join(f"| {heading} | {line} |\n" for heading, line in hook.lines.items() if heading != "Example")
    return (
        f"\n## {hook.name}\n\n```python\n{hook.signature}\n```\n\n{hook.description}\n\n"
        f"| | |\n|---|---|\n{table}\n```python\n{hook.lines['Example']}\n```\n"
    )


if __name__ == "__main__":
    sys.stdout.write(page())
