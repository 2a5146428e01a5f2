"""Every key of any TOML document is located at text that spells it, and its value at text that spells the value."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, time
from typing import Any

import tomli
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sley_core.errors import KeyPath
from sley_core.plan.document import TextSpan, index

NASTY = '''# a comment = "with a value"
title = "x = 1"   # [no.header]

"quoted.key" = """
[not.a.header]
key = "not a key" \\""" quotes """""
'literal\\key' = \'\'\'
[[neither]]
'\'\'\'
dotted . "inner part" . last = [ 1, [2, "]"], # ] a comment
  {a = 1, "b c".d = 'x'}, ]

[ table . "sub table" ]   # a header
when = 1979-05-27 07:32:00Z
deep = { "x" = { y.z = [ { q = 1 } ] } }

[[list]]
name = "first"
[list.inner]
key = true
[[list.again]]
[[list]]
[[list.again]]
here = -inf
[[list.again]]
here = """a\\
   b"""
3.14 = "two parts"
'''


def paths_of(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield (*path, key), inner
        yield from paths_of(inner, (*path, key))


def text_at(lines: list[str], span: TextSpan) -> str:
    line = lines[span.line - 1]
    assert span.column - 1 + span.length <= max(1, len(line)), (span, line)
    return line[span.column - 1 : span.column - 1 + span.length]


def check(text: str) -> None:
    spots = index(text)
    lines = text.split("\n")
    document = tomli.loads(text)
    known = dict(paths_of(document))
    assert known.keys() == spots.keys()
    for path, value in known.items():
        if isinstance(path[-1], str):
            spelled = text_at(lines, spots[path].key)
            assert tomli.loads(f"{spelled} = 0") == {path[-1]: 0}, path
        else:
            assert text_at(lines, spots[path].key).strip(), path
        if not isinstance(value, dict | list) and "\n" not in text_at(lines, spots[path].value):
            check_value(text_at(lines, spots[path].value), value)


def check_value(spelled: str, value: Any) -> None:
    if spelled.startswith(('"""', "'''")):
        return  # the span ends with the line, the value may not
    found = tomli.loads(f"value = {spelled}")["value"]
    assert found == value or (found != found and value != value)


def test_a_nasty_document() -> None:
    check(NASTY)
    spots = index(NASTY)
    assert spots["quoted.key",].key == (4, 1, 12)
    assert spots["dotted", "inner part", "last"].key == (10, 25, 4)
    assert spots["dotted", "inner part", "last", 2, "b c", "d"].value == (11, 21, 3)
    assert spots["table",].key == (13, 3, 5)
    assert spots["table", "sub table"].value == (13, 1, 23)
    assert spots["list", 1, "again", 1, "here"].key == (26, 1, 4)
    assert spots["list", 1, "again", 1, "3", "14"].key == (28, 3, 2)


KEYS = st.one_of(
    st.sampled_from(["a", "b", "use", "a.b", "", "x y", "[t]", "1", "=", '"', "'", "#", "é"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
STRINGS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["[header]", "\n[[header]]\nkey = 1\n", '"""', "'''", "# no comment", "a\\", "}", "]", ","]),
)
SCALARS = st.one_of(
    STRINGS,
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.datetimes(min_value=datetime(1900, 1, 1)),
    st.dates(min_value=date(1900, 1, 1)),
    st.times(min_value=time(1)),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)), max_leaves=12
)
TREES = st.dictionaries(KEYS, VALUES, max_size=6)


def spelled_key(draw: Any, key: str) -> str:
    plain = tomli_w.dumps({key: 0}).removesuffix(" = 0\n")
    if not plain.startswith('"') and draw(st.booleans()):
        plain = f'"{plain}"'
    if draw(st.booleans()) and "'" not in key and key.isprintable():
        return f"'{key}'"
    return plain


def fits_literal(value: str) -> bool:
    if "'''" in value or value.endswith("'") or value.startswith("\n"):
        return False
    return all(char.isprintable() or char == "\n" for char in value)


def spelled_value(draw: Any, value: Any) -> str:
    gap = draw(st.sampled_from(["", " ", "\n", " # ] } [c]\n\t"]))
    if isinstance(value, list):
        inner = [spelled_value(draw, item) for item in value]
        return f"[{gap}{f',{gap}'.join(inner)}{gap}{',' if inner and draw(st.booleans()) else ''}{gap}]"
    if isinstance(value, dict):
        pairs = [f"{spelled_key(draw, key)} = {spelled_value(draw, item)}" for key, item in value.items()]
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, str) and draw(st.booleans()) and fits_literal(value):
        return f"'''{value}'''"
    if isinstance(value, str) and draw(st.booleans()):
        return tomli_w.dumps({"x": value}, multiline_strings=True).removeprefix("x = ").removesuffix("\n")
    return tomli_w.dumps({"x": value}).removeprefix("x = ").removesuffix("\n")


def spelled(draw: Any, table: dict[str, Any], prefix: tuple[str, ...]) -> str:
    """The body of a table: values and inline tables first, then tables under headers of their own."""
    body, sections = [], []
    for key, value in table.items():
        dotted = ".".join((*prefix, spelled_key(draw, key)))
        is_tables = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
        choice = draw(st.sampled_from(["inline", "dotted", "header"]))
        if isinstance(value, dict) and choice == "header":
            header = draw(st.sampled_from(["[{}]", "[ {} ] # [x]", "\n\t[{}]"])).format(dotted)
            sections.append(f"{header}\n{spelled(draw, value, (dotted,))}")
        elif is_tables and choice == "header":
            sections += [f"[[{dotted}]]\n{spelled(draw, item, (dotted,))}" for item in value]
        elif isinstance(value, dict) and value and choice == "dotted":
            body += [
                f"{spelled_key(draw, key)} . {spelled_key(draw, inner)}={spelled_value(draw, item)}\n"
                for inner, item in value.items()
            ]
        else:
            body.append(f"{spelled_key(draw, key)} = {spelled_value(draw, value)}\n")
    return "".join((*body, *sections))


@st.composite
def documents(draw: Any) -> str:
    return spelled(draw, draw(TREES), ())


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=50, deadline=None, suppress_health_check=SLOW)
@given(documents())
def test_any_document(text: str) -> None:
    check(text)
