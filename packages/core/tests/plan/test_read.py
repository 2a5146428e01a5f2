"""A plan's text: what cannot be read has its code and place, every key and value is located, and `--set` changes values."""

from collections.abc import Iterator
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.errors import EXIT_PLAN_INVALID, Diagnostic, KeyPath, Place, PlanError
from sley_core.plan.document import apply_override, index_keys, read_file
from sley_core.plan.load import plan_from_text


def problem_of(path: Path) -> Diagnostic:
    with pytest.raises(PlanError) as caught:
        read_file(path)
    assert caught.value.exit_code == EXIT_PLAN_INVALID
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def write(folder: Path, content: bytes) -> Path:
    path = folder / "plan.toml"
    path.write_bytes(content)
    return path


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    not_utf8 = write(tmp_path, "a = 1\n# é".encode() + b"\xff\n")
    for path, reason in ((tmp_path / "plam.toml", "No such file"), (tmp_path, "Is a directory"), (not_utf8, "byte 0xff")):
        diagnostic = problem_of(path)
        assert diagnostic.code == "plan-unreadable"
        assert reason in diagnostic.message


@pytest.mark.parametrize(
    ("content", "line", "column"),
    [
        ("[run\nname = 1", 1, 5),
        ("a = 1\nb = ", 2, 5),
        ("a = 1\na = 2", 2, 6),
        ("[run]\nsteps = 010", 2, 10),
        ("x = '''\n\n", 3, 1),
        ("a = 1\r\nb = 'open", 2, 10),
        ('a = "\\', 1, 7),
    ],
)
def test_syntax(tmp_path: Path, content: str, line: int, column: int) -> None:
    found = problem_of(write(tmp_path, content.encode()))
    assert found.code == "syntax"
    assert found.place
    assert (found.place.line, found.place.column) == (line, column)
    assert found.source_line == content.replace("\r", "").split("\n")[line - 1]
    assert "(at line" not in found.message


@pytest.mark.parametrize(
    "content",
    ["x = 9" + "9" * 5000, "[" * 10, "x = " + "[" * 3000 + "]" * 3000, "d = 2024-13-45", "x = " + "{a=" * 3000],
    ids=["digits", "brackets", "nested", "date", "inline"],
)
def test_what_python_refuses_is_a_syntax_error_too(tmp_path: Path, content: str) -> None:
    assert problem_of(write(tmp_path, content.encode())).code == "syntax"


def test_a_mark_at_the_start_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    document = read_file(write(tmp_path, b"\xef\xbb\xbf[run]\r\nname = 'x'\r\n"))
    assert document.tables == {"run": {"name": "x"}}
    place, line = document.place(("run", "name"))
    assert (place.line, place.column, place.length) == (2, 8, 3)
    assert line == "name = 'x'"


# -- places ------------------------------------------------------------------------------------------------------------


def paths_of(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key), inner
        yield from paths_of(inner, (*path, key))


def text_at(lines: list[str], span: Place) -> str:
    line = lines[span.line - 1]
    assert span.column - 1 + span.length <= max(1, len(line)), (span, line)
    return line[span.column - 1 : span.column - 1 + span.length]


def check_places(text: str) -> None:
    """Every key is located at text that spells it, and its value at text that spells the value."""
    spans = index_keys(text, "plan.toml")
    lines = text.split("\n")
    known = dict(paths_of(tomli.loads(text)))
    assert known.keys() == spans.keys()
    for path, value in known.items():
        spelled = text_at(lines, spans[path].key)
        if isinstance(path[-1], str):
            assert tomli.loads(f"{spelled} = 0") == {path[-1]: 0}, path
        else:
            assert spelled.strip(), path
        spelled = text_at(lines, spans[path].value)
        # The span of a string of several lines ends with its first one.
        if not isinstance(value, dict | list) and not spelled.startswith(('"""', "'''")):
            assert repr(tomli.loads(f"value = {spelled}")["value"]) == repr(value), path


HEADERS = ["", "", "[t{}]\n", "[ t{} . 'a.b' ] # [x]\n", '\n\t[t{}.""]\n', "[[list]]\n", "[[list.again]]\n", "[list.k{}]\n"]
KEYS = ["k{}", '"k {}"', "'[t{}]'", 'k{} . "b c"', '"\\u00e9{}"."="', "a.'\"'.k{}", "1.{}"]
SCALARS = [
    "1",
    "1979-05-27 07:32:00Z",
    "-0.5e3",
    "inf",
    "nan",
    "false",
    "1979-05-27",
    "07:32:00.5",
    '"x = 1 # no"',
    "'a\\'",
    '"]"',
    '"é\\"\\\\"',
]
TEXTS = ["'''\n[[header]]\nkey = 1\n'''", '"""a\\\n  b \\""" c"""""', '"""#"""', "''''x'''''"]
VALUES = st.recursive(
    st.sampled_from([*SCALARS, *TEXTS]),
    lambda inner: st.one_of(
        st.builds("[{1}{0},{1}{2}{1}, # ] }} [c]\n\t]".format, inner, st.sampled_from(["", " ", "\n"]), inner),
        st.builds("{{ x.y = {}, 'z z'=[{}], z={}}}".format, inner, inner, inner),
        st.sampled_from(["[]", "{}", "[ # none\n]"]),
    ),
    max_leaves=6,
)
LINES = st.lists(st.tuples(st.sampled_from(HEADERS), st.sampled_from(KEYS), VALUES), max_size=8)


@settings(max_examples=50, deadline=None)
@given(LINES)
def test_any_document(lines: list[tuple[str, str, str]]) -> None:
    """Of any headers, keys and values, spelled in every way that TOML has."""
    rows = [f"{header.format(at)}{key.format(at)} = {value}\n" for at, (header, key, value) in enumerate(lines)]
    check_places("[[list]]\n" + "".join(rows))


# -- overrides ---------------------------------------------------------------------------------------------------------

BEFORE: dict[str, Any] = {"run": {"name": "x"}, "gradient_handlers": [{"use": "core.each"}]}


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("run.steps=4", ("run", "steps"), 4),
        (" run.steps = 4 ", ("run", "steps"), 4),
        ('run.name="a=b"', ("run", "name"), "a=b"),
        ("run.name=two words", ("run", "name"), "two words"),
        ("model.factory=a.b:c", ("model", "factory"), "a.b:c"),
        ("data.tokenizer=./a/b-1.json", ("data", "tokenizer"), "./a/b-1.json"),
        ("model.compile=true", ("model", "compile"), True),
        ('run.name="True"', ("run", "name"), "True"),
        ("run.final_weights=none", ("run", "final_weights"), "none"),
        ("optimizer.betas=[0.9, 0.99]", ("optimizer", "betas"), [0.9, 0.99]),
        ("gradient_handlers.0.bucket_mb=50", ("gradient_handlers", 0, "bucket_mb"), 50),
        ("gradient_handlers.1.use=x.y", ("gradient_handlers", 1, "use"), "x.y"),
        ("gradient_handlers=[]", ("gradient_handlers",), []),
        ("metrics.0.use=core.jsonl", ("metrics", 0, "use"), "core.jsonl"),
        ("a.b.c=1", ("a", "b", "c"), 1),
        ("data.when=1979-05-27", ("data", "when"), date(1979, 5, 27)),
    ],
)
def test_a_value_is_set(text: str, path: tuple[str | int, ...], value: Any) -> None:
    tables = deepcopy(BEFORE)
    assert apply_override(tables, text) == path
    for part in path:
        tables = tables[part]  # type: ignore[index]
    assert tables == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "run.steps", "=4", "run..steps=4", "run.steps=", 'run.name="open', "run.steps=[1"),
        *("run.steps=1\nrun.seed=2", "run.steps=1\n[x]", "a\n[b]\nc=1", "run.name.first=x", "gradient_handlers.2.use=x"),
        *("gradient_handlers.use=x", "gradient_handlers.-1.use=x", "run.name='a' 'b'"),
        "a=" + "9" * 5000 + "'",
        *("a=True", "a=False", "a.b= False ", "a=TRUE", "a=None", "a=null"),
    ],
)
def test_what_cannot_be_set(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        apply_override(deepcopy(BEFORE), text)
    assert [found.code for found in caught.value.diagnostics] == ["set-invalid"]


def test_all_bad_overrides_are_reported(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_text(text, overrides=["run", "run.steps=5", "=="])
    assert [str(found.place) for found in caught.value.diagnostics] == ["--set #1", "--set #3"]
