"""Makes docs/hooks.md from core's hookspecs, and docs/plan.md from the models of the tables.

    python .ci/reference_pages.py hooks > docs/hooks.md
    python .ci/reference_pages.py plan > docs/plan.md

A hook's docstring is a sentence or two, then fixed lines; tests check the lines and that the pages are up to date.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from textwrap import dedent
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from sley_core import hookspecs
from sley_core.plan.document import to_plain_data
from sley_core.plan.kinds import COMPONENTS, record_type_name
from sley_core.plan.loader import CORE, PluginLoader
from sley_core.plan.plan import format_value
from sley_core.plan.tables import FORMAT, OPTIONAL_TABLES, SOURCE_FOLDER, TABLES
from sley_core.records import ScheduleRecord
from sley_core.table import Table, describe_type

HEADINGS = ("Called", "Ranks", "May communicate", "Returns", "Since", "Example")
"""The fixed lines of a hook's docstring, in their order."""

_INTRODUCTION = """\
# Hooks

This page is generated from `sley_core/hookspecs.py` by `python .ci/reference_pages.py hooks`.

A plugin is an installed distribution with an entry point in the `sley.plugins` group. Plans use the name of the entry
point: `narrow.reducer` is the `reducer` record of the plugin `narrow`. The module of the entry point marks its functions with
the decorator `hookimpl` from `sley_core.hookspecs`. An implementation may omit arguments that it does not need. An argument
with a default value is not passed.

Core calls hooks while it assembles a run, and never in the step loop. It indexes the returned records by name and follows the
order of the plan, not the order in which plugins were loaded. `sley_core/records.py` describes the records, and
`sley_core/protocols` the methods of the objects. [Write a plugin](write-a-plugin.md) shows how to write one.

| Hook | Summary |
|---|---|
"""


class HookText(NamedTuple):
    """Holds one hook's docstring in parts: `lines` has a text for each of HEADINGS; the one of `Example` is code."""

    name: str
    signature: str
    description: str
    lines: Mapping[str, str]


def hooks() -> Iterator[HookText]:
    """Yields every hook in the order of the file. Raises ValueError with the hook's name where its docstring lacks one of the
    fixed lines or has them in another order.
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


def hooks_page() -> str:
    """Returns the content of docs/hooks.md."""
    index, sections = [], []
    for hook in hooks():
        summary = hook.description.split("\n\n")[0].split(". ")[0].replace("\n", " ").rstrip(".:")
        index.append(f"| [`{hook.name}`](#{hook.name}) | {summary} |\n")
        table = "".join(f"| {heading} | {line} |\n" for heading, line in hook.lines.items() if heading != "Example")
        sections.append(
            f"\n## {hook.name}\n\n```python\n{hook.signature}\n```\n\n{hook.description}\n\n"
            f"| | |\n|---|---|\n{table}\n```python\n{hook.lines['Example']}\n```\n"
        )
    return "".join([_INTRODUCTION, *index, *sections])


INTRODUCTION = f"""\
# Plan reference

<!-- Written by `python .ci/reference_pages.py plan` from the models of the tables; do not edit. -->

A plan is strict TOML. An unknown key, a wrong type or an impossible layout raises an error with file, line and column. This
page lists core's tables and records. `train-cli plugins NAME` lists the records of any installed plugin.

`--set` changes any value from the command line: `--set batch.micro_size=4`,
`--set 'gradient_handlers=[{{use="core.each"}}]'`. To use another record, set the whole table or list; otherwise the keys of
the previous record remain, and the new record may not have them.

Two keys come before all tables:

| Key | Value | Default | Meaning |
|---|---|---|---|
| `plan` | {FORMAT} | {FORMAT} | The format of the plan. |
| `source_folder` | a string | the folder of the file | {SOURCE_FOLDER} |

In every path, a leading `~` is the home folder, and `$NAME` and `${{NAME}}` are environment variables. An unset variable raises
an error, and `$$` is a dollar sign. In file patterns, `*` matches any part of a name, `**` folders of any depth (including
links), `?` one character, `[ab]` one of these characters, and `[[]` a bracket. As in a shell, only patterns with a leading dot
match names with a leading dot. The path of the plan's own folder is never a pattern.
"""


PLUGINS = (CORE, "data", "models", "checkpoint")  # the plugins whose tables the page has: what most plans use


class Row(NamedTuple):
    """Describes one key of a table; `default` is TOML, or words in brackets."""

    key: str
    takes: str
    default: str
    meaning: str


def rows(model: type[Table], prefix: str = "") -> Iterator[Row]:
    """Yields the keys of `model`, and the keys of tables inside it, with dotted names."""
    for name, info in model.model_fields.items():
        yield Row(f"{prefix}{name}", describe_type(info.annotation, info.metadata), _default(info), info.description or "")
        inner = inner_table(info.annotation)
        if inner:
            yield from rows(inner[0], f"{prefix}{name}{inner[1]}.")


def plan_page() -> str:
    """Returns the text of docs/plan.md."""
    parts = [INTRODUCTION]
    for name, model in {**TABLES, **OPTIONAL_TABLES}.items():
        optional = " (may be left out)" if name in OPTIONAL_TABLES else ""
        parts.append(f"## `[{name}]`{optional}\n\n{_doc(model)}\n\n{_table(rows(model))}")
    plugins = [PluginLoader().load(name) for name in PLUGINS]
    for spec in COMPONENTS:
        name = record_type_name(spec.record_type)
        choice = f"`use` names {'an' if name[0] in 'aeiou' else 'a'} {name}" + (
            " and `factory` your own code" if spec.factory else ""
        )
        if spec.default:
            choice += f'; left out, `use = "{spec.default}"`'
        elif spec.required_table not in (None, spec.key):
            choice += f"; left out, the record that the schedule names, by default `{getattr(ScheduleRecord, spec.key)}`"
        parts.append(f"## `{spec.header}`\n\n{spec.summary} {choice}.")
        for plugin in plugins:
            for record in plugin.records_of(spec.record_type).values():
                parts.append(
                    f'### `use = "{plugin.name}.{record.name}"`\n\n{_doc(record.config)}\n\n{_table(rows(record.config))}'
                )
        if spec.factory:
            parts.append(f"### `factory`\n\n{_doc(spec.factory)}\n\n{_table(rows(spec.factory))}")
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _doc(model: type[Table]) -> str:
    return " ".join((model.__doc__ or "").split())


def _table(found: Iterator[Row]) -> str:
    lines = [f"| `{row.key}` | {_cell(row.takes)} | {_cell(row.default)} | {_cell(row.meaning)} |" for row in found]
    return (
        "\n".join(["| Key | Value | Default | Meaning |", "|---|---|---|---|", *lines]) if lines else "This record has no keys."
    )


def _default(info: FieldInfo) -> str:
    """Returns a field's default as the page shows it."""
    if info.is_required():
        return "(required)"
    if info.default_factory is not None:
        made: Any = info.default_factory
        return "`{}`" if made is dict else "(computed)"
    return "(none)" if info.default is None else f"`{format_value(to_plain_data(info.default))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def inner_table(annotation: Any) -> tuple[type[Table], str] | None:
    """Returns the table inside a field, and how a key path enters it: "" for the table itself, ".N" for one of an array."""
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation, ""
    if origin is Annotated:
        return inner_table(args[0])
    if origin in (Union, UnionType):
        return next((found for arm in args if (found := inner_table(arm))), None)
    if origin in (tuple, dict) and args:
        found = inner_table(args[0] if origin is tuple else args[1])
        return (found[0], (".N" if origin is tuple else ".NAME") + found[1]) if found else None
    return None


if __name__ == "__main__":
    sys.stdout.write({"hooks": hooks_page, "plan": plan_page}[sys.argv[1]]())
