import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sley_core.api.plan import DataConfig
from sley_core.data.dataset import IGNORE_INDEX, DataContext
from sley_core.errors import PlanError
from sley_core.weight_files.read import deterministic_tokenizer_json
from sley_data.datasets import TokenDataset
from sley_data.plugin import TextConfig, TokensConfig
from sley_data.tokenizer import Tokenizer as OurTokenizer
from sley_data.tokenizer import load_text_ids

WORDS = ["<end>", "the", "shuttle", "carries", "weft", "é"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def dataset(folder: Path, *texts: bytes, **more: Any) -> TokenDataset:
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text)
    options: dict[str, Any] = {"sequence": 3, "held_out": 0.0, "documents": "pad", **more}
    return TokenDataset(TextConfig(files=(folder / "*.txt",), **options), DataContext())


@pytest.mark.parametrize(("before", "after"), [([], []), ([0, 3], []), ([], [0]), ([0], [0, 3])])
def test_special_tokens_of_the_settings_surround_each_document(tokenizer: Path, before: list[int], after: list[int]) -> None:
    made = Tokenizer.from_file(str(tokenizer))
    single = " ".join([*(WORDS[token] for token in before), "$A", *(WORDS[token] for token in after)])
    made.post_processor = processors.TemplateProcessing(single, special_tokens=[(WORDS[token], token) for token in (0, 3)])
    made.save(str(tokenizer))
    ids, lengths = OurTokenizer(tokenizer, None).encode([("a", b"the weft"), ("b", b"weft")])
    assert ids.tolist() == [*before, 1, 4, *after, *before, 4, *after]
    assert lengths.tolist() == [len(before) + 2 + len(after), len(before) + 1 + len(after)]


def test_tokens_are_those_of_the_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    texts = ("the shuttle carries the é".encode(), b"weft the weft")
    data = dataset(tmp_path, *texts, tokenizer=tokenizer, end_of_document="<end>")
    assert data.info.vocab_size == len(WORDS)
    assert [data[index]["tokens"].tolist() for index in range(len(data))] == [[1, 2, 3], [1, 5, 0], [4, 1, 4]]
    labels = torch.cat([data[index]["labels"] for index in range(len(data))])
    assert labels[labels != IGNORE_INDEX].tolist() == [2, 3, 1, 5, 0, 1, 4, 0]


def test_more_than_65536_tokens_take_four_bytes(tmp_path: Path) -> None:
    large = Tokenizer(models.WordLevel({f"w{number}": number for number in range(70000)}, unk_token="w0"))
    large.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    large.save(str(tmp_path / "large.json"))
    data = dataset(tmp_path, b"w69999 w1 w65536 w2", tokenizer=tmp_path / "large.json")
    assert data[0]["tokens"].tolist() == [69999, 1, 65536]


def test_text_that_is_not_utf8_is_an_error_and_not_replaced(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(PlanError, match=r"`1.txt` is not UTF-8: invalid start byte at byte 4") as caught:
        len(dataset(tmp_path, b"the", b"the \xff", tokenizer=tokenizer))
    assert caught.value.diagnostics[0].code == "data-encoding"


EMPTY = Tokenizer(models.WordLevel({}, unk_token="<end>")).to_str()


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"model": 1}), EMPTY])
def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(PlanError, match="has no voc" if content == EMPTY else "is not a Hugging Face tokenizer") as caught:
        len(dataset(tmp_path, b"the", tokenizer=tmp_path / "tokenizer.json"))
    assert caught.value.diagnostics[0].code == "tokenizer-invalid"


def test_a_tokenizer_is_named_by_its_folder_too(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "tok").mkdir()
    with pytest.raises(PlanError, match=r"has no `tokenizer\.json`"):
        len(dataset(tmp_path, b"the weft", tokenizer=tmp_path / "tok"))
    tokenizer.rename(tmp_path / "tok" / "tokenizer.json")
    assert dataset(tmp_path, b"weft the weft", tokenizer=tmp_path / "tok").info.vocab_size == len(WORDS)


def unigram() -> Tokenizer:
    return Tokenizer(
        models.Unigram([("<unk>", 0.0), *((letter, -2.0) for letter in "weft the"), ("we", -3.0), ("th", -3.0)], 0)
    )


def bpe() -> Tokenizer:
    letters = {letter: number for number, letter in enumerate("weft h")}
    merges = [("w", "e"), ("t", "h"), ("we", "f")]
    return Tokenizer(models.BPE(letters | {"we": 6, "th": 7, "wef": 8}, merges))


@pytest.mark.parametrize("make", [bpe, unigram])
@pytest.mark.parametrize("setting", ["truncation", "padding", "dropout", "all"])
def test_settings_that_drop_add_or_draw_tokens_do_not_count(tmp_path: Path, make: Any, setting: str) -> None:
    texts = [("a", b"weft the weft" * 9), ("b", b"the")] * 20
    plain = make()
    plain.save(str(tmp_path / "plain.json"))
    if setting in ("truncation", "all"):
        plain.enable_truncation(4)
    if setting in ("padding", "all"):
        plain.enable_padding(length=64)
    plain.save(str(tmp_path / "set.json"))
    if setting in ("dropout", "all"):
        content = json.loads((tmp_path / "set.json").read_text())
        content["model"] |= {"dropout": 0.5} if make is bpe else {"alpha": 0.1, "nbest_size": 64}
        (tmp_path / "set.json").write_text(json.dumps(content))
    wanted = OurTokenizer(tmp_path / "plain.json", None).encode(texts)
    for _ in range(2):
        assert OurTokenizer(tmp_path / "set.json", None).encode(texts) == wanted
    assert deterministic_tokenizer_json((tmp_path / "plain.json").read_text()) == (tmp_path / "plain.json").read_text()


@pytest.mark.parametrize(("beside", "end"), [({"eos_token": "<end>"}, 0), ({"eos_token": {"content": "<end>"}}, 0), ([], None)])
def test_a_given_tokenizer_says_where_a_document_ends(tmp_path: Path, beside: Any, end: int | None) -> None:
    """Otherwise `sample` goes on behind the end of the document."""
    model = models.WordLevel({"<end>": 0, "the": 1, "?": 2}, unk_token="?")
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside), "utf-8")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_text_ids(DataConfig(), path).end == end
    tokens = TokensConfig(files=(tmp_path / "t.bin",), vocab_size=3, sequence=4, end_of_document=2)
    assert load_text_ids(tokens, tmp_path).end == 2
