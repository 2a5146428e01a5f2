"""What a check says of a plan's data before a run, and tables that mean nothing."""

import sys
import sysconfig
from array import array
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models

from sley_core.data.dataset import DataConfig
from sley_core.errors import KeyPath
from sley_core.table import Table
from sley_data.datasets import check_token_dataset
from sley_data.plugin import ChatConfig, TextConfig, TokensConfig


def found(config: DataConfig, *, evaluates: bool = False) -> list[tuple[KeyPath, str]]:
    return [(problem.path, problem.code) for problem in check_token_dataset(config, evaluates=evaluates)]


def text(*files: Path, **more: Any) -> TextConfig:
    return TextConfig(files=files, **{"sequence": 4, "held_out": 0.0, **more})


def tokens(*files: Path, **more: Any) -> TokensConfig:
    return TokensConfig(files=files, **{"sequence": 4, "vocab_size": 100, **more})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "five.txt").write_bytes(b"12345")
    (tmp_path / "other.txt").write_bytes(b"23456")
    (tmp_path / "other.bin").write_bytes(array("H", [9, 8, 7, 6, 5]).tobytes())
    (tmp_path / "one.txt").write_bytes(b"1")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "five.bin").write_bytes(array("H", [1, 2, 3, 4, 5]).tobytes())
    (tmp_path / "odd.bin").write_bytes(b"123")
    return tmp_path


def test_token_files(folder: Path) -> None:
    assert found(tokens(folder / "none.bin", held_out_files=(folder / "odd.bin",))) == [
        (("data", "files", 0), "data-missing"),
        (("data", "held_out_files"), "data-size"),
    ]
    assert found(tokens(folder / "odd.bin")) == [(("data", "files"), "data-size")]
    for documents in ("pack", "pad"):
        wanted = [(("data", "end_of_document"), "data-documents")]
        assert found(tokens(folder / "five.bin", documents=documents)) == wanted
    (folder / "saved.npy").write_bytes(b"\x93NUMPY\x01\x00" + bytes(120))
    assert found(tokens(folder / "saved.npy")) == [(("data", "files"), "data-format")]


def test_shorter_than_one_sample(folder: Path) -> None:
    short = [(("data", "sequence"), "data-short")]
    assert found(text(folder / "five.txt", sequence=5)) == short
    assert found(tokens(folder / "five.bin", sequence=5)) == short
    assert found(text(folder / "one.txt", documents="pad")) == short
    assert found(text(folder / "five.txt", separator="3", documents="pack")) == short
    assert found(text(folder / "five.txt", separator="3", documents="pad")) == []


def test_held_out_data_is_needed_only_to_evaluate(folder: Path) -> None:
    missing = [(("evaluation",), "held-out")]
    for config in (
        text(folder / "five.txt"),
        text(folder / "five.txt", held_out=0.0001),
        text(folder / "five.txt", held_out_files=(folder / "one.txt",)),
        tokens(folder / "five.bin"),
        tokens(folder / "five.bin", documents="pad", end_of_document=0),
        tokens(folder / "five.bin", held_out_files=(folder / "other.bin",), sequence=4, documents="cut"),
    ):
        assert found(config, evaluates=False) == []
        is_there = isinstance(config, TokensConfig) and config.held_out_files
        assert found(config, evaluates=True) == ([] if is_there else missing)


@pytest.mark.parametrize(("share", "key"), [(0.0001, "evaluation"), (0.9999, "data")])
def test_a_file_that_is_one_document_is_in_one_split(folder: Path, share: float, key: str) -> None:
    (problem,) = check_token_dataset(text(folder / "five.txt", held_out=share), evaluates=True)
    assert problem.path[0] == key
    assert '`separator = "\\n\\n"`' in str(problem.hint)


def test_a_tokenizer_must_be_there_be_one_and_be_readable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "tokenizer.json"
    config = text(folder / "five.txt", tokenizer=path)
    assert found(config) == [(("data", "tokenizer"), "tokenizer-missing")]
    path.write_text("{")
    assert found(config) == [(("data", "tokenizer"), "tokenizer-invalid")]
    Tokenizer(models.WordLevel({"12345": 0}, unk_token="12345")).save(str(path))
    assert found(config) == [(("data", "sequence"), "data-short")]
    wrong_end = text(folder / "five.txt", tokenizer=path, end_of_document="<end>")
    assert found(wrong_end) == [(("data", "end_of_document"), "tokenizer-invalid")]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert found(config) == [(("data", "tokenizer"), "tokenizers-missing")]
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(folder))
    assert found(TextConfig(source="python-stdlib", sequence=4)) == [(("data", "source"), "data-missing")]


def test_a_plan_made_for_other_data_is_refused(folder: Path) -> None:
    assert found(text(folder / "five.txt", samples_per_epoch=1)) == []
    assert found(text(folder / "five.txt", samples_per_epoch=2)) == [(("data", "samples_per_epoch"), "data-changed")]


def test_a_model_with_fewer_rows_than_the_data_has_ids_is_found(folder: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "b": 6}, unk_token="a")).save(str(folder / "tokenizer.json"))
    tables = {
        256: text(folder / "five.txt"),
        7: text(folder / "five.txt", sequence=1, tokenizer=folder / "tokenizer.json"),
        100: tokens(folder / "five.bin"),
    }
    for count, config in tables.items():
        for rows, codes in ((None, []), (count, []), (count - 1, ["model-vocabulary"])):
            problems = check_token_dataset(config, evaluates=False, vocab_size=rows)
            assert [problem.code for problem in problems if problem.path[0] == "model"] == codes, (count, rows)


# -- tables ------------------------------------------------------------------------------------------------------------


TABLES: dict[type[Table], dict[str, Any]] = {
    TextConfig: {},
    TokensConfig: {"files": ["a"], "vocab_size": 100},
    ChatConfig: {"files": ["a"], "tokenizer": "b"},
}


@pytest.mark.parametrize(
    ("model", "table", "message"),
    [
        (TextConfig, {}, "set `source` or `files`"),
        (TextConfig, {"files": []}, "set `source` or `files`"),
        (TextConfig, {"files": ["a"], "source": "python-stdlib"}, "only one of `source` and `files`"),
        (TextConfig, {"files": ["a"], "end_of_document": "<end>"}, "bytes have no such token"),
        (TextConfig, {"files": ["a"], "held_out": 0.1, "held_out_files": ["b"]}, "only one of `held_out` and `held_out_files`"),
        (TextConfig, {"files": ["a"], "field": "text", "separator": "|"}, "`field`"),
        (TextConfig, {"source": "python-stdlib", "field": "text"}, "`field`"),
        (TokensConfig, {"files": []}, "must not be empty"),
        (TokensConfig, {"end_of_document": 100}, "must be less than `vocab_size`"),
        (TokensConfig, {"vocab_size": 65537}, "uint16 is too narrow"),
        (ChatConfig, {"files": []}, "must not be empty"),
    ],
)
def test_tables_that_mean_nothing_are_refused(model: type[Table], table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        model.model_validate({"sequence": 4, **TABLES[model], **table})


def test_held_out_files_leave_no_share_to_hold_out() -> None:
    assert TextConfig(source="python-stdlib", sequence=1).held_out == 0.02
    files = TextConfig(source="python-stdlib", sequence=1, held_out_files=(Path("b"),))
    assert files.held_out == 0
    assert TextConfig.model_validate(files.model_dump()) == files
