"""Rows of tables and lists: of every format the same; what is damaged or none is named with its file and row."""

import gzip
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from sley_core.errors import PlanError, PluginError
from sley_data.documents import Conversation, read_conversations, read_documents
from sley_data.files import build_plan_error, find_document_files
from sley_data.formats import read_rows
from sley_data.plugin import ChatConfig, TextConfig

CALL = {"type": "function", "function": {"name": "area", "arguments": {"r": 2}}}
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "schön"}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
]


def write_arrow(path: Path, rows: list[Any], open_writer: Any = pa.ipc.new_stream) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, open_writer(file, table.schema) as writer:
        writer.write_table(table)


def write_saved(path: Path, rows: list[Any]) -> None:
    path.mkdir()
    write_arrow(path / "data-00000-of-00001.arrow", rows)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}), "utf-8")


def lines(rows: list[Any]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


FORMATS: dict[str, Callable[[Path, list[Any]], Any]] = {
    "a.jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "bom.jsonl": lambda path, rows: path.write_bytes(b"\xef\xbb\xbf" + lines(rows).replace(b"\n", b"\r\n\r\n")),
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "a.json": lambda path, rows: path.write_text(json.dumps(rows, indent=2), "utf-8"),
    "a.parquet": lambda path, rows: parquet.write_table(pa.Table.from_pylist(rows), path),
    "a.arrow": partial(write_arrow, open_writer=pa.ipc.new_file),
    "stream.arrow": write_arrow,
    "saved": write_saved,
}


def written(path: Path, rows: list[Any]) -> Path:
    FORMATS[path.name](path, rows)
    return path


def chat_table(path: Path) -> ChatConfig:
    return ChatConfig(files=(path,), tokenizer=path, sequence=8)


def read(path: Path, field: str | None = None) -> list[Conversation]:
    files, problems = find_document_files(chat_table(path), "train")
    if problems:
        raise build_plan_error(problems)
    return [each for file in files for each in read_conversations(file, field)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_conversations(tmp_path: Path, name: str) -> None:
    found = read(written(tmp_path / name, ROWS))
    assert [list(each.messages) for each in found] == [row["messages"] for row in ROWS]
    assert all(str(number) in each.name for number, each in enumerate(found, start=1) if name != "bom.jsonl")


@pytest.mark.parametrize(
    ("row", "roles", "first_trained"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "ua", 0),
        ({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "ua", 0),
        ({"prompt": "a", "completion": "b"}, "ua", 1),
        ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
          "completion": [{"role": "assistant", "content": "b"}]}, "sua", 2),
        ({"messages": json.dumps(ROWS[0]["messages"])}, "ua", 0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}, "u", 0),
    ],
)  # fmt: skip
def test_forms_of_a_conversation(tmp_path: Path, row: dict[str, Any], roles: str, first_trained: int) -> None:
    (found,) = read(written(tmp_path / "a.jsonl", [row]))
    assert "".join(message["role"][0] for message in found.messages) == roles
    assert found.first_trained_index == first_trained


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "a"}, "has no `messages`, `conversations`, or `prompt` and `completion`; its keys are `text`"),
        ({"messages": {"role": "user"}}, "`messages` that is not a list"),
        ({"messages": "hello"}, "`messages` that is not a list"),
        ({"messages": ["hello"]}, "message 1 that is not an object"),
        ({"messages": [{"content": "a"}]}, "no `role` in message 1"),
        ({"messages": [{"role": "user", "content": 3}]}, "no text in the field `content` of message 1"),
        ({"messages": [{"role": "user"}]}, "no text in the field `content` of message 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part of type 'image' in message 1"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "`from` 'narrator'"),
        ({"messages": [], "tools": {"a": 1}}, "`tools` that are not a list"),
        ({"prompt": "a"}, "has no `messages`"),
        ({"messages": [{"role": "user", "content": "x\ud83dy"}]}, "surrogates not allowed"),
        ({"messages": "[" * 100_000}, "recursion"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(written(tmp_path / "a.jsonl", [ROWS[0], row]))
    assert f"row 2 of `{tmp_path / 'a.jsonl'}`" in str(caught.value)
    assert why in str(caught.value)


def test_keys_that_users_have(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "area", "arguments": '{"r": 2}'}}
    rows = [
        {"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call], "name": None}], "tools": '[{"type": "f"}]'},
        {"messages": [{"role": "assistant", "content": "a", "weight": 0}, {"role": "assistant", "content": "b", "weight": 1}]},
    ]
    system, called, weighed = read(written(tmp_path / "a.jsonl", rows))
    assert [message["content"] for message in system.messages] == ["s", "a", "b"]
    assert called.messages == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert called.tools == [{"type": "f"}]
    assert weighed.trained_turns == [1]


ODD = ["a\0b", "\ufeffc", "d\r\ne", " ", "\u2028", "x" * 70_000, "\N{PILE OF POO}"]


def texts(path: Path, field: str = "text") -> list[str]:
    """The documents of a column of texts."""
    config = TextConfig(files=(path,), field=field, sequence=4, held_out=0.0)
    files, _ = find_document_files(config, "train")
    return [text.decode() for _, text in read_documents(files, config, "train")]


@pytest.mark.parametrize("name", FORMATS)
def test_odd_texts_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    rows = [{"text": text, "nested": {"a": None, "b": [None, {"c": number or None}]}} for number, text in enumerate(ODD)]
    assert texts(written(tmp_path / name, rows)) == ODD
    with pytest.raises(PlanError, match=r"row 1 of .* has no `body`"):
        texts(tmp_path / name, "body")


@pytest.mark.parametrize("name", FORMATS)
def test_a_column_of_something_else_is_named(tmp_path: Path, name: str) -> None:
    for number, value in enumerate([["a"], {"a": "b"}, 3, [None]]):
        (tmp_path / str(number)).mkdir()
        path = written(tmp_path / str(number) / name, [{"text": value}] * 2)
        with pytest.raises(PlanError, match=rf"row 1 of `{path}.*has no text in the field `text`"):
            texts(path)


def damaged(content: bytes, random: Random) -> bytes:
    """Cuts the content, flips a bit, puts in others, or repeats a part."""
    place = random.randrange(len(content))
    before, after = content[:place], content[place:]
    flipped = bytes([after[0] ^ 1 << random.randrange(8)]) + after[1:]
    others = random.choice([b"\0", b"\r", b"\xff\xfe", b"[" * 3000, b'"'])
    return random.choice([before, before + flipped, before + others + after, before + content[place // 2 :], after])


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_named(tmp_path: Path, name: str, count: int) -> None:
    """Reads damaged files: an error that names the file, or conversations."""
    path = written(tmp_path / name, ROWS * 3)
    path = path / "data-00000-of-00001.arrow" if path.is_dir() else path
    content, random = path.read_bytes(), Random(name)
    messages = []
    for _ in range(count):
        path.write_bytes(damaged(content, random) or b"\n")
        try:
            assert all(message["role"] for each in read(path) for message in each.messages)
        except PlanError as error:
            messages.append(str(error))
    assert len(messages) > count // 8
    assert all(path.name in message for message in messages), messages


def test_mixed_and_odd_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dict").mkdir()
    for name, message in (("dataset_dict.json", "name its splits"), ("state.json", "does not name the files of the dataset")):
        (tmp_path / "dict" / name).write_text('{"splits": ["train"]}', "utf-8")
        with pytest.raises(PlanError, match=message):
            read(tmp_path / "dict")
    odd = tmp_path / "odd.parquet"
    parquet.write_table(pa.table({"messages": pa.array([None, None], pa.null())}), odd)
    with pytest.raises(PlanError, match=r"row 1 of .*odd.parquet"):
        read(odd)
    nested = {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "user", "content": "a"}]}
    parquet.write_table(pa.Table.from_pylist([nested, ROWS[0]]), odd)
    assert [list(each.messages) for each in read(odd)][1] == ROWS[0]["messages"], "no key of another row, as null"
    long = tmp_path / "long.jsonl"
    long.write_bytes(lines([{"messages": [{"role": "user", "content": "x" * 5_000_000}]}]))
    assert len(read(long)[0].messages[0]["content"]) == 5_000_000
    files, _ = find_document_files(chat_table(odd), "train")
    assert [number for number, _ in read_rows(files[0])] == [1, 2]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PluginError, match="needs `pyarrow`"):
        read(odd)
