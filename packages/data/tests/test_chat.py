"""Rows of `data.chat`: every conversation once and whole, with its labels; packed tightly; what is left out is counted."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chat_templates import save_tokenizer, template_of
from hypothesis import given
from hypothesis import strategies as st

from sley_core.data.dataset import IGNORE_INDEX, DataContext
from sley_core.errors import PlanError
from sley_data import documents as documents_module
from sley_data import streams
from sley_data.chat import CUT_REASON, NO_LABEL_REASON, TOO_LONG_REASON, ChatDataset, check_chat, pack_best_fit
from sley_data.chat_template import ChatTemplate
from sley_data.documents import describe_overlap
from sley_data.plugin import ChatConfig


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), template_of("chatml", blocks=False))


@pytest.fixture
def table(tmp_path: Path, tokenizer: Path) -> Any:
    """A function that writes rows to a file, and returns the table of a dataset of it."""

    def make(rows: list[Any], **more: Any) -> ChatConfig:
        (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
        values = {"files": [str(tmp_path / "chats.jsonl")], "tokenizer": str(tokenizer), "sequence": 64, "held_out": 0.0}
        return ChatConfig.model_validate(values | more)

    return make


def load(config: ChatConfig, split: Any = "train") -> ChatDataset:
    dataset = ChatDataset(config, DataContext(split=split))
    assert len(dataset)
    return dataset


def row_of(rows: ChatDataset, index: int) -> dict[str, list[int]]:
    return {name: values.tolist() for name, values in rows.read_sample(index).items()}


def documents(rows: ChatDataset) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of each conversation in the rows; of the padding nothing but that it is none."""
    pieces = []
    for number in range(len(rows)):
        row = row_of(rows, number)
        assert {name: len(row[name]) for name in ("tokens", "labels", "positions")} == dict.fromkeys(
            ("tokens", "labels", "positions"), rows.config.sequence
        )
        assert len(row["cu_seqlens"]) == rows.max_documents + 1
        for start, stop in pairwise(row["cu_seqlens"]):
            assert row["positions"][start:stop] == list(range(stop - start))
            if stop > start and any(label != IGNORE_INDEX for label in row["labels"][start:stop]):
                pieces.append((row["tokens"][start:stop], row["labels"][start:stop]))
            else:
                assert not any(row["tokens"][start:stop])
    return pieces


def test_every_conversation_comes_once_with_the_labels_of_its_answers(table: Any) -> None:
    random = Random(0)
    texts = [["q" * random.randint(0, 9), "a" * random.randint(0, 20)] * random.randint(1, 2) for _ in range(40)]
    rows = load(table([chat(*each) for each in texts], sequence=160))
    pieces = documents(rows)
    decoded = Counter()
    for tokens, labels in pieces:
        whole = [*tokens, labels[-1]]
        text = rows.template.tokenizer.decode([token for token in whole if token >= 0])
        answers = rows.template.tokenizer.decode([label for label in labels if label != IGNORE_INDEX])
        assert all(label in (IGNORE_INDEX, token) for token, label in zip(whole[1:], labels, strict=True))
        said = [part.partition("<|im_end|>")[0] + "<|im_end|>" for part in text.split("assistant\n")[1:]]
        assert answers == "".join(said)
        decoded[answers] += 1
    assert decoded == Counter("".join(f"{text}<|im_end|>" for text in each[1::2]) for each in texts)
    assert rows.stats.documents == len(pieces) == 40
    assert rows.stats.trained == sum(label != IGNORE_INDEX for _, labels in pieces for label in labels)


def test_the_dataset_is_the_rows_as_tensors(table: Any) -> None:
    config = table([chat("a", "b"), chat("c", "d")])
    dataset, rows = ChatDataset(config, DataContext()), load(config)
    assert len(dataset) == len(rows) == 1
    assert {name: value.tolist() for name, value in dataset[0].items()} == row_of(rows, 0)
    assert {name: str(value.dtype) for name, value in dataset[0].items()} == {
        name: f"torch.{field.dtype}" for name, field in dataset.info.fields.items()
    }
    digests = {ChatDataset(table(each), DataContext()).data_digest for each in ([chat("a", "b")], [chat("a", "c")])}
    assert len(digests) == 2
    assert dataset.data_digest == ChatDataset(table([chat("a", "b"), chat("c", "d")]), DataContext()).data_digest
    with pytest.raises(IndexError):
        dataset[1]


@pytest.mark.parametrize(
    ("more", "count", "fate", "num_samples"),
    [({}, 1, TOO_LONG_REASON, 1), ({"too_long": "cut"}, 2, CUT_REASON, 2), ({"sequence": 256}, 2, None, 2)],
)
def test_what_is_too_long(table: Any, more: dict[str, Any], count: int, fate: str | None, num_samples: int) -> None:
    rows = load(table([chat("a", "b"), chat("a", "z" * 100)], **more))
    assert rows.stats.samples == num_samples
    assert rows.stats.dropped == (Counter({fate: 1}) if fate else Counter())
    assert len(documents(rows)) == count
    assert all("chats.jsonl#2" in note for note in rows.data_notes)
    if fate == TOO_LONG_REASON:
        with pytest.raises(PlanError, match=r"chats.jsonl#2.* tokens, which is more than `sequence` allows"):
            load(rows.config.model_copy(update={"too_long": "refuse"}))


def test_a_mask_of_zeros_or_ones_is_refused_with_the_first_conversation(table: Any) -> None:
    for rows in ([chat("only the user speaks")], [{"messages": [{"role": "Assistant", "content": "only the user speaks"}]}]):
        with pytest.raises(PlanError, match=r"no token of a conversation has a label.*only the user speaks"):
            load(table(rows))
    everything = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    config = table([chat("a", "only this")])
    template = config.files[0].with_name("template.jinja")
    template.write_text(everything, "utf-8")
    with pytest.raises(PlanError, match=r"every token has a label.*only this"):
        load(config.model_copy(update={"template": template}))
    template.write_text("{{ raise_exception('no such role') }}", "utf-8")
    with pytest.raises(PlanError, match=r"no token of a conversation has a label \(1: .*no such role\); .*no such role"):
        load(config.model_copy(update={"template": template}))
    assert load(table([chat("a", "b")], train_on="all")).stats.trained > 0


def test_a_conversation_without_an_answer_is_left_out_and_said(table: Any) -> None:
    rows = load(table([chat("a"), chat("a", "b")]))
    assert rows.data_notes == [f"1 samples are dropped, the first in `chats.jsonl#1`: {NO_LABEL_REASON}"]


def test_held_out_conversations_are_not_trained_on(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [chat(f"question {number % 100}", "b") for number in range(200)]
    config = table(rows, held_out=0.2)
    assert describe_overlap(config, config) == ""
    assert "trained on" in describe_overlap(config.model_copy(update={"held_out": 0.0}), config)
    absent = config.model_copy(update={"files": (tmp_path / "absent",)})
    assert describe_overlap(config, absent) == ""
    assert "not known whether the run was trained on" in describe_overlap(absent, config)
    monkeypatch.setattr(documents_module, "_MAX_COMPARE_BYTES", 10)
    assert "is not read for this comparison" in describe_overlap(config, config)
    (tmp_path / "evaluated.jsonl").write_text(json.dumps(chat("question 7", "b")), "utf-8")
    config = table(rows, held_out=0.0, held_out_files=[str(tmp_path / "evaluated.jsonl")])
    assert load(config).data_notes == ["2 of 200 documents in `files` are also in `held_out_files`: training excludes them"]
    assert load(config, "held_out").stats.documents == 1


def test_kept_tokens_give_the_same_rows(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(streams, "MIN_PART_BYTES", 1500)
    rows = [chat("a" * number, "b" * (3 * number)) for number in range(40)]
    wanted = load(table(rows, cache="none"))
    assert wanted.stats.dropped
    config = table(rows, cache=str(tmp_path / "kept"))
    for _ in range(2):
        kept = load(config)
        assert [row_of(kept, at) for at in range(len(kept))] == [row_of(wanted, at) for at in range(len(wanted))]
        assert (kept.stats, kept.data_notes, kept.data_digest) == (wanted.stats, wanted.data_notes, wanted.data_digest)
        monkeypatch.setattr(ChatTemplate, "encode", lambda *_: pytest.fail("the second time nothing is tokenized"))
    monkeypatch.undo()
    monkeypatch.setattr(streams, "MIN_CACHED_BYTES", 0)
    load(config.model_copy(update={"too_long": "cut"}))
    load(config.model_copy(update={"train_on": "last"}))
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_check_of_large_files_sees_masks_and_splits(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sley_data.chat.MAX_CHECK_BYTES", 10)
    assert list(check_chat(table([chat("a", "b")]), evaluates=False)) == []
    assert [problem.code for problem in check_chat(table([chat("a")]), evaluates=True)] == ["chat-mask", "held-out"]


def test_check_says_what_a_run_would(table: Any, tmp_path: Path) -> None:
    for code, rows, share in (
        ("data-json", [{"text": "a"}], 0),
        ("chat-mask", [chat("a")], 0),
        ("data-short", [chat("a")], 0.99),
    ):
        assert [problem.code for problem in check_chat(table(rows, held_out=share), evaluates=False)] == [code]
    config = table([chat("a", "b")])
    assert list(check_chat(config, evaluates=False)) == []
    absent = {"tokenizer-missing": {"tokenizer": tmp_path / "a"}, "data-missing": {"held_out_files": (tmp_path / "a.jsonl",)}}
    for code, change in absent.items():
        assert [problem.code for problem in check_chat(config.model_copy(update=change), evaluates=False)] == [code]
    (problem,) = check_chat(config, evaluates=False, vocab_size=100)
    assert (problem.code, problem.path) == ("model-vocabulary", ("model", "vocab_size"))
    (problem,) = check_chat(config, evaluates=True)
    assert problem.code == "held-out"


@given(st.lists(st.integers(1, 40), max_size=60), st.just(40))
def test_bins_are_full_and_none_is_above_its_size(lengths: list[int], size: int) -> None:
    bins = pack_best_fit(lengths, size)
    assert sorted(number for each in bins for number in each) == list(range(len(lengths)))
    loads = [sum(lengths[number] for number in each) for each in bins]
    assert all(load <= size for load in loads)
    assert sum(load <= size // 2 for load in loads) <= 1, "two of them would have fitted together"


def test_padding_of_chat_sets_is_at_most_two_percent() -> None:
    random = Random(1)
    for median, sigma, size in ((250, 0.9, 2048), (600, 1.0, 4096), (120, 0.7, 1024)):  # log-normal, as of public chat sets
        lengths = [min(size, max(8, round(median * 2.718 ** random.gauss(0, sigma)))) for _ in range(20_000)]
        bins = pack_best_fit(lengths, size)
        assert 1 - sum(lengths) / (len(bins) * size) < 0.02
