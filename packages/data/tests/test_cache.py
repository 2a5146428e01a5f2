"""Tokens that are kept: the same samples, tokenized once, by one process, and gone on with after one that was killed."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chat_templates import save_tokenizer

from sley_core.data.dataset import DataContext
from sley_data import streams
from sley_data.datasets import TokenDataset
from sley_data.files import find_cache_home
from sley_data.plugin import TextConfig
from sley_data.streams import load_text_stream
from sley_data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), None)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of documents in each call of the tokenizer; small texts are kept, and parts are small."""
    monkeypatch.setattr(streams, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(streams, "MIN_PART_BYTES", 200)
    monkeypatch.setattr(streams, "_REPORT_INTERVAL_S", 0.0)
    calls: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, documents: Any) -> Any:
        taken = list(documents)
        calls.append(len(taken))
        return encode(self, taken)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    return calls


@pytest.fixture
def table(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> TextConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    paragraphs = [f"it is the name of {number} files " * (number % 5) for number in range(60)]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs), "utf-8")
    (tmp_path / "b.txt").write_text("what does it do?\n\n" * 30, "utf-8")
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    return TextConfig(files=files, sequence=16, separator="\n\n", tokenizer=tokenizer, held_out=0.2, end_of_document="</s>")


def samples(config: TextConfig, split: Any = "train") -> list[dict[str, list[int]]]:
    dataset = TokenDataset(config, DataContext(split=split))
    return [{name: value.tolist() for name, value in dataset[at].items()} for at in range(len(dataset))]


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("documents", ["pack", "cut", "pad"])
def test_kept_tokens_give_the_same_samples(table: TextConfig, encoded: list[int], split: Any, documents: Any) -> None:
    table = table.model_copy(update={"documents": documents})
    wanted = samples(table.model_copy(update={"cache": "none"}), split)
    digest = TokenDataset(table.model_copy(update={"cache": "none"}), DataContext(split=split)).data_digest
    assert samples(table, split) == wanted
    encoded.clear()
    assert samples(table, split) == wanted
    assert TokenDataset(table, DataContext(split=split)).data_digest == digest
    assert not encoded, "the second time nothing is tokenized"


def test_a_killed_process_leaves_its_parts(table: TextConfig, encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = samples(table.model_copy(update={"cache": "none"}))
    (whole,) = encoded
    encoded.clear()
    encode = Tokenizer.encode

    def killed(self: Tokenizer, documents: Any) -> Any:
        if len(encoded) == 3:
            raise KeyboardInterrupt
        return encode(self, documents)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", killed)
        with pytest.raises(KeyboardInterrupt):
            samples(table)
    assert len(encoded) == 3
    assert samples(table) == wanted
    assert sum(encoded) == whole


def test_little_text_is_not_kept_and_large_bytes_are_mapped_too(table: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    samples(table)
    assert not (table.files[0].parent / "home").exists()
    table = table.model_copy(update={"tokenizer": None, "end_of_document": None})
    expected, digest = samples(table), TokenDataset(table, DataContext()).data_digest
    monkeypatch.setattr(streams, "MAX_BYTES_IN_MEMORY", 0)
    assert samples(table) == expected
    assert TokenDataset(table, DataContext()).data_digest == digest
    assert list((table.files[0].parent / "home").glob("sley/data/*/complete.json"))


def test_two_that_prepare_at_once_do_it_once(
    table: TextConfig, encoded: list[int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = TokenDataset(table.model_copy(update={"cache": "none"}), DataContext()).rows.stream
    (whole,) = encoded
    encoded.clear()
    encode, say, waiting = Tokenizer.encode, streams.print_note, threading.Event()

    def slowly(self: Tokenizer, documents: Any) -> Any:
        assert waiting.wait(30)
        return encode(self, documents)

    monkeypatch.setattr(Tokenizer, "encode", slowly)
    monkeypatch.setattr(streams, "print_note", lambda text: (say(text), waiting.set()))
    with ThreadPoolExecutor(2) as pool:
        tokenizers = [Tokenizer(table.tokenizer, table.end_of_document) for _ in range(2)]
        loaded = [pool.submit(load_text_stream, table, "train", tokenizer, []) for tokenizer in tokenizers]
        results = [each.result(60) for each in loaded]
    assert all(stream.digest == wanted.digest for stream in results)
    assert sum(encoded) == whole
    notes = capfd.readouterr().err
    assert all(note in notes for note in ("waiting for another process on this host", "data: tokenized 0 of 0 MB"))


def test_other_text_or_settings_are_kept_apart(table: TextConfig, encoded: list[int], tmp_path: Path) -> None:
    samples(table)
    num_folders = 1
    text = table.files[1].read_text("utf-8")
    for change in ({"separator": "e"}, {"end_of_document": "<s>"}, {"held_out": 0.4}, {}):
        if not change:
            stat = table.files[1].stat()
            table.files[1].write_text(text.replace("what", "that"), "utf-8")  # of the same size
            os.utime(table.files[1], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        changed = table.model_copy(update=change)
        assert samples(changed) == samples(changed.model_copy(update={"cache": "none"}))
        num_folders += 1
        assert len(list((tmp_path / "home" / "sley" / "data").iterdir())) == num_folders
    for separator in ("\n\n", "e"):  # decides which documents another source of a mixture holds out
        update = {"held_out": 0.0, "held_out_files": table.files[:1], "separator": separator}
        mixed = table.with_siblings([table.model_copy(update=update)])
        assert samples(mixed) == samples(mixed.model_copy(update={"cache": "none"}))
    samples(table.model_copy(update={"cache": tmp_path / "mine"}))
    assert len(list((tmp_path / "mine").iterdir())) == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["00001.tokens", "00001.lengths", "offsets", "complete.json"])
@pytest.mark.parametrize("damage", ["gone", "empty", "short", "odd"])
def test_a_damaged_part_is_made_again(table: TextConfig, encoded: list[int], tmp_path: Path, name: str, damage: str) -> None:
    wanted = samples(table)
    (folder,) = (tmp_path / "home" / "sley" / "data").iterdir()
    content = (folder / name).read_bytes()
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes({"empty": b"", "short": content[:-16], "odd": content[:-1]}[damage])
    assert samples(table) == wanted
    encoded.clear()
    assert samples(table) == wanted
    assert not encoded


def test_a_change_in_the_middle_of_a_file_is_seen(table: TextConfig, encoded: list[int]) -> None:
    """Though the time of change is kept, as tar and rsync keep it."""
    old, stat = samples(table), table.files[1].stat()
    text = table.files[1].read_text("utf-8")
    table.files[1].write_text(text[:250] + "XXXXX" + text[255:], "utf-8")
    os.utime(table.files[1], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert samples(table) == samples(table.model_copy(update={"cache": "none"})) != old


def test_a_folder_that_cannot_be_written_is_said(
    table: TextConfig, encoded: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    dataset = TokenDataset(table.model_copy(update={"cache": tmp_path / "file"}), DataContext())
    assert len(dataset) == len(samples(table.model_copy(update={"cache": "none"})))
    (note,) = dataset.data_notes
    assert "cannot be cached in" in note
    monkeypatch.setenv("XDG_CACHE_HOME", "~no-such-user/cache")
    assert find_cache_home() is None
