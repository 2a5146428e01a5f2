"""Files are read as what they are: links, hidden names, compressed text, line ends, ids of another width."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import random
import sys
import tarfile
import zipfile
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sley_core.data.dataset import DataContext
from sley_core.errors import PlanError
from sley_data import formats
from sley_data.datasets import TokenDataset, check_token_dataset
from sley_data.documents import read_documents
from sley_data.files import find_document_files, find_files
from sley_data.plugin import TextConfig, TokensConfig

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

KEY = ("data", "files")
PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress, "txt": bytes}


def config(*files: Path, **more: Any) -> TextConfig:
    return TextConfig(files=files, **{"sequence": 4, "held_out": 0.0, **more})


def lines(*files: Path, **more: Any) -> TextConfig:
    return config(*files, **{"documents": "pad", **more})


def texts(table: TextConfig) -> list[bytes]:
    files, problems = find_document_files(table, "train")
    assert not problems
    return [text for _, text in read_documents(files, table, "train")]


def names(*patterns: Path) -> list[str]:
    files, problems = find_files(patterns, KEY)
    assert not problems
    return [file.name for file in files]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt", "a.md", "what?.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "sub/empty.txt").touch()
    return tmp_path


def test_files_are_sorted_within_a_pattern_named_from_where_it_starts_and_taken_once(corpus: Path) -> None:
    assert names(corpus / "**/*.txt") == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt", "what?.txt"]
    assert names(corpus / "sub/**/*.txt", corpus / "a.*") == ["c.txt", "deep/d.txt", "a.md", "a.txt"]
    assert names(corpus / "b.txt", corpus / "*.txt", corpus / "sub/../a.txt") == ["b.txt", "a.txt", "what?.txt"]


@pytest.mark.parametrize(
    ("pattern", "code", "message"),
    [
        ("none.txt", "data-missing", "does not exist"),
        ("none/*.txt", "data-missing", "matches no file"),
        ("*.rst", "data-missing", "matches no file"),
        ("sub", "data-missing", "is a folder"),
        ("", "data-missing", "is a folder"),
        ("sub/empty.txt", "data-empty", "is empty"),
        ("sub/e*.txt", "data-empty", "every file that"),
        ("a.txt/b", "data-missing", "does not exist"),
        ("a\0b", "data-missing", "does not exist"),
        ("**.txt/[", "data-missing", ""),
        ("x" * 5000, "data-missing", "cannot be read"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(corpus: Path, pattern: str, code: str, message: str) -> None:
    files, problems = find_files([corpus / "a.txt", corpus / pattern], KEY)
    assert [file.name for file in files] == ["a.txt"]
    assert [(problem.path, problem.code) for problem in problems] == [((*KEY, 1), code)]
    assert message in problems[0].message


def test_what_is_no_regular_file_or_not_readable_is_refused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(corpus / "pipe")
    monkeypatch.setattr(os, "access", lambda path, _: path != corpus / "a.txt")
    _, (pipe, closed) = find_files([corpus / "pipe", corpus / "a.txt"], KEY)
    assert ("is not a regular file" in pipe.message, "is not readable" in closed.message) == (True, True)


DISK = {
    "a.txt": (b"text", "pathlib.Path.open"),
    "a.bin": (b"text", "pathlib.Path.open"),
    "a.txt.gz": (gzip.compress(b"text"), "gzip.GzipFile.read"),
    "a.parquet": (b"PAR1\x15\x04" + bytes(40), "pyarrow.parquet.ParquetFile"),
}


@pytest.mark.parametrize("name", DISK)
def test_an_error_of_the_disk_does_not_blame_the_content(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, target = DISK[name]
    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(target, Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    tokens = TokensConfig(files=(tmp_path / name,), sequence=4, vocab_size=60000)
    (problem,) = check_token_dataset(tokens if name == "a.bin" else lines(tmp_path / name, field="text"), evaluates=False)
    assert (problem.code, "cannot be read: [Errno 5]" in problem.message) == ("data-missing", True)


def test_links_that_lead_back_end(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    for name in ("b", "c", "in/d", "in/e"):
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "in" / "copy.txt").symlink_to("a.txt")
    assert names(tmp_path / "**/*.txt") == ["in/a.txt"]
    assert names(tmp_path / "b/**/*.txt") == ["in/a.txt"]
    assert len(names(tmp_path / "*/*.txt", tmp_path / "in/*.txt", tmp_path / "in/copy.txt")) == 1


@pytest.mark.parametrize("kind", PACKED)
def test_compressed_text_is_read(tmp_path: Path, kind: str) -> None:
    """By its first bytes, whatever its name."""
    for number, name in enumerate((f"a.txt.{kind}", "b.txt")):
        (tmp_path / name).write_bytes(PACKED[kind](f"some text {number}".encode()))
    table = config(tmp_path / "*")
    assert texts(table) == [b"some text 0", b"some text 1"]
    assert len(TokenDataset(table, DataContext())) == 6
    lines = "".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(3)).encode()
    (tmp_path / f"c.jsonl.{kind}").write_bytes(PACKED[kind](lines))
    table = config(tmp_path / f"c.jsonl.{kind}", field="text", documents="pad")
    assert texts(table) == [b"line 0", b"line 1", b"line 2"]
    assert list(check_token_dataset(table, evaluates=False)) == []
    if kind != "txt":
        (problem,) = check_token_dataset(config(tmp_path / f"c.jsonl.{kind}"), evaluates=False)
        assert problem.code == "data-json"


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("more", [{}, {"separator": "x"}])
def test_compressed_text_that_is_cut_off_is_an_error(tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    whole = PACKED[kind](random.Random(0).randbytes(5000))
    (tmp_path / "a").write_bytes(whole[: len(whole) // 2])
    table = config(tmp_path / "a", **more)
    (problem,) = check_token_dataset(table, evaluates=False)
    assert (problem.code, "damaged or incomplete" in problem.message) == ("data-format", True)
    with pytest.raises(PlanError, match="damaged or incomplete"):
        len(TokenDataset(table, DataContext()))


def test_the_package_for_zstd_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x50\x2a\x4d\x18\2\0\0\0ab" + zstd.compress(b"some text"))  # as pzstd writes
    assert texts(config(tmp_path / "a.txt")) == [b"some text"]
    monkeypatch.delitem(formats._OPENERS, formats._ZSTD_SIGNATURE)
    (problem,) = check_token_dataset(config(tmp_path / "a.txt"), evaluates=False)
    assert "compressed by zstd" in problem.message
    assert "sley-data[zstd]" in str(problem.hint)


def archive(kind: str) -> bytes:
    memory = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(memory, "w") as file:
            file.writestr("a.txt", "text")
    else:
        with tarfile.open(fileobj=memory, mode="w:gz" if kind == "tar.gz" else "w") as file:
            file.addfile(tarfile.TarInfo("a.txt"))
    return memory.getvalue()


REFUSED = {
    "a zip archive": archive("zip"),
    "a tar archive": archive("tar.gz"),
    "compressed by lz4": b"\x04\x22\x4d\x18" + bytes(40),
    "a Parquet table": b"PAR1\x15\x04" + bytes(40),
    "an Arrow table": b"ARROW1\0\0" + bytes(40),
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "a file with attributes for macOS": b"\0\5\x16\7\0\2\0\0Mac OS X",
    "a numpy file": b"\x93NUMPY\1\0" + bytes(120),
}


@pytest.mark.parametrize("kind", [*REFUSED, "tar"])
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.txt").write_bytes(REFUSED.get(kind, archive("tar")))
    (problem,) = check_token_dataset(config(tmp_path / "a.txt"), evaluates=False)
    assert problem.code == "data-format"
    assert (kind if kind in REFUSED else "a tar archive") in problem.message
    with pytest.raises(PlanError, match=r"a\.txt"):
        len(TokenDataset(config(tmp_path / "a.txt"), DataContext()))
    ids = TokensConfig(files=(tmp_path / "a.txt",), sequence=4, vocab_size=60000)
    assert "data-format" in [problem.code for problem in check_token_dataset(ids, evaluates=False)]


CODES = {"uint16": "H", "uint32": "I", "int64": "q"}
CASES = [
    (vocab_size, written, dtype, count)
    for vocab_size in (300, 32000, 50257, 65536, 128000)
    for written in CODES
    for dtype in ("uint16", "uint32")
    for count in (500, 80_000)
    if vocab_size <= 65536 or written != "uint16"
]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("vocab_size", "written", "dtype", "count"), CASES)
def test_ids_of_another_width_are_refused(tmp_path: Path, vocab_size: int, written: str, dtype: Any, count: int) -> None:
    drawn = random.Random(vocab_size)
    ids = [min(vocab_size - 1, int(drawn.paretovariate(0.4))) for _ in range(count)]
    (tmp_path / "a.bin").write_bytes(array(CODES[written], ids).tobytes())
    size = min(vocab_size, 1 << 16) if dtype == "uint16" else vocab_size
    table = TokensConfig(files=(tmp_path / "a.bin",), sequence=4, vocab_size=size, dtype=dtype)
    codes = [problem.code for problem in check_token_dataset(table, evaluates=False)]
    assert codes == ([] if written == dtype else ["data-format"])


def test_ids_that_are_right_are_not_doubted(tmp_path: Path) -> None:
    drawn = random.Random(2)
    cases = {
        "uniform": ([drawn.randrange(65536) for _ in range(50_000)], 65536),
        "one": ([7] * 1000, 8),
        "two": ([0, 1] * 1000, 2),
        "few": ([drawn.randrange(10) for _ in range(1000)], 10),
        "padded": ([5, 6, 7] + [0] * 5000, 10),
        "counting": (list(range(50_000)), 50_000),
        "short": ([4, 0, 5, 0, 6, 0], 50257),
    }
    for name, (ids, vocab_size) in cases.items():
        (tmp_path / f"{name}.bin").write_bytes(array("H", ids).tobytes())
        table = TokensConfig(files=(tmp_path / f"{name}.bin",), sequence=4, vocab_size=vocab_size)
        assert list(check_token_dataset(table, evaluates=False)) == [], name
    assert sys.byteorder == "little"


def test_a_header_of_llm_c_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(array("i", [20240520, 1, 100] + [0] * 253).tobytes() + array("H", range(100)).tobytes())
    (problem,) = check_token_dataset(TokensConfig(files=(tmp_path / "a.bin",), sequence=4, vocab_size=50257), evaluates=False)
    assert "llm.c" in problem.message


# -- JSON lines: a text under a key is a document, and what is none is an error with file and row

LINES = [{"id": 1, "text": 'a "quoted"\nline'}, {"text": ""}, {"text": "schön"}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n", "utf-8")
    return path


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.NDJSON"])
def test_braces_are_no_text_unless_the_plan_says_so(path: Path, name: str) -> None:
    named = path.rename(path.parent / name)
    (problem,) = check_token_dataset(lines(named), evaluates=False)
    assert (problem.code, problem.path) == ("data-json", ("data", "files"))
    assert "`field = " in str(problem.hint)
    with pytest.raises(PlanError, match="JSON lines"):
        len(TokenDataset(lines(named), DataContext()))
    assert list(check_token_dataset(lines(named, separator="\n"), evaluates=False)) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"row 4 of `.*corpus.jsonl` has no `text`"),
        ('{"text": ["x"]}', "row 4 of .* has no text in the field `text`"),
        ('["x"]', "row 4 of .* is not a JSON object"),
        ('{"text": "x"', "row 4 of .* cannot be read"),
        ('{"text": "\\ud800"}', "row 4 of .* cannot be read"),
        ("[" * 5000, "row 4 of .* cannot be read"),
    ],
)
def test_a_line_that_is_no_document_is_named(path: Path, line: str, message: str) -> None:
    with path.open("a") as file:
        file.seek(0)
        file.truncate()
        file.write('{"text": "fine"}\n\n{"text": "fine too"}\n' + line)
    (problem,) = check_token_dataset(lines(path, field="text"), evaluates=False)
    assert problem.code == "data-json"
    with pytest.raises(PlanError, match=message):
        len(TokenDataset(lines(path, field="text"), DataContext()))
