"""Mixtures: one sequence for every layout and interruption, with the shares of the plan; sources that fit each other."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.data.batches import open_dataset
from sley_core.data.dataset import DataContext, Split
from sley_core.data.feed import Feed
from sley_core.errors import PlanError, RunError, SleyError, UsageError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict, plan_from_text
from sley_data.documents import read_documents
from sley_data.files import find_document_files
from sley_data.mixture import Interleaving, to_integer_shares
from sley_data.sources import build_source_component, describe_overlap, load_text_ids
from sley_testing.data_contract import DatasetContract
from sley_testing.plans import small_plan

OWN = Path(__file__).parent / "own"
APART = 1_000_000
"""The first id of a source, times its number."""


def mixture(sources: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    named = [{"name": f"s{number}", **source} for number, source in enumerate(sources)]
    return {"use": "data.mixture", "sources": named, **more}


def numbered(count: int, number: int = 0, **more: Any) -> dict[str, Any]:
    options = {"count": count, "first": number * APART}
    return {"factory": "numbered_rows:Numbered", "options": options, **more}


def opened(table: dict[str, Any], folder: Path = OWN, split: Split = "train", **more: Any) -> Any:
    return open_dataset(resolved(json.dumps(table), folder), DataContext(7, split, **more))


@lru_cache
def resolved(table: str, folder: Path) -> Any:
    return plan_from_dict(small_plan(data=json.loads(table)), folder).data


def ids(table: dict[str, Any], sizes: Sequence[int], dp: int = 1, after: Sequence[int] = ()) -> list[list[int]]:
    """The ids of each global batch, of these sizes, as `dp` ranks read them. after: interrupted after these batches; another
    dataset, of a process that goes on, reads the next ones. A change of size is an interruption too.
    """
    parts = [list(rows(table, sizes, dp, rank, after)) for rank in range(dp)]
    return [[one for part in batch for one in part] for batch in zip(*parts, strict=True)]


def rows(table: dict[str, Any], sizes: Sequence[int], dp: int, rank: int, after: Sequence[int]) -> Iterator[list[int]]:
    state: dict[str, Any] = {"samples": 0}
    feed = None
    for number, size in enumerate(sizes):
        if feed is None or number in after or size != sizes[number - 1]:
            if feed is not None:
                feed.close()
            own = range(rank * size // dp, (rank + 1) * size // dp)
            feed = Feed(opened(table), seed=7, batch_size=size, rows=own, timeout_s=60)
            feed.restore(state)
        yield feed.next()["id"].tolist()
        state = feed.state()
    if feed is not None:
        feed.close()


@st.composite
def drawn(draw: Callable[..., Any]) -> dict[str, Any]:
    """A mixture of one to five sources of 1 to 40 samples each."""
    has_epochs = draw(st.booleans())
    amounts = st.sampled_from([0.5, 1, 2.25, 3]) if has_epochs else st.floats(0.01, 100, allow_nan=False)
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    key = "epochs" if has_epochs else "weight"
    sources = [numbered(length, number, **{key: draw(amounts)}) for number, length in enumerate(lengths)]
    more = {} if has_epochs else {"exhausted": draw(st.sampled_from(["repeat", "end"]))}
    return mixture(sources, shuffle=draw(st.booleans()), **more)


def check_sequence(table: dict[str, Any], random: Random) -> None:
    """The sequence is one, in every layout, with interruptions, with other batches; and each source comes in epochs."""
    count = 160
    whole = [one for batch in ids(table, [4] * (count // 4)) for one in batch]
    for dp in (2, 4):
        assert [one for batch in ids(table, [4] * (count // 4), dp) for one in batch] == whole
    after = random.sample(range(1, count // 4), 20)
    assert [one for batch in ids(table, [4] * (count // 4), 2, after) for one in batch] == whole
    changed = [4] * random.randint(1, 19) + [10] * 6
    assert [one for batch in ids(table, changed) for one in batch] == whole[: sum(changed)]
    dataset = opened(table)
    if table.get("exhausted") == "end":
        epochs = [whole[at : at + len(dataset)] for at in range(0, count, len(dataset))]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs), "a source begins again within an epoch"
        return
    for number, source in enumerate(table["sources"]):
        length = source["options"]["count"]
        own = [one - number * APART for one in whole if one // APART == number]
        for at in range(0, len(own) - length + 1, length):
            assert sorted(own[at : at + length]) == list(range(length)), "each sample once in an epoch of its source"


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.campaign)])
def test_there_is_one_sequence(count: int) -> None:
    settings(max_examples=count)(given(table=drawn(), random=st.randoms(use_true_random=False))(check_sequence))()


@settings(max_examples=40)
@given(weights=st.lists(st.floats(0.001, 1000, allow_nan=False), min_size=1, max_size=30), start=st.integers(0, 10**15))
def test_any_thousand_samples_have_the_shares(weights: list[float], start: int) -> None:
    shares = to_integer_shares(weights)
    assert all(
        share * Fraction(str(weights[0])) == shares[0] * Fraction(str(w)) for share, w in zip(shares, weights, strict=True)
    )
    order = Interleaving(shares)
    for source, share in enumerate(shares):
        count = order.count(source, start + 1000) - order.count(source, start)
        assert abs(count - 1000 * share / order.total) <= 10


@settings(max_examples=15)
@given(shares=st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_counts_are_those_of_the_choices(shares: list[int]) -> None:
    order = Interleaving(shares)
    places: list[list[int]] = [[] for _ in shares]
    for number in range(order.total):
        source, place = order[number]
        assert order.count(source, number) == place == len(places[source]), "numbers of a source come one after the other"
        places[source].append(number)
    assert [len(each) for each in places] == shares
    for source, each in enumerate(places):
        for count, number in enumerate(each):
            assert order.shortest_prefix(source, count + 1) == number + 1
            assert order.longest_prefix(source, count) == number


def test_epochs_say_how_often_a_source_is_seen() -> None:
    table = mixture([numbered(8, 0, epochs=2), numbered(10, 1, epochs=0.5), numbered(3, 2, epochs=1)])
    dataset = opened(table)
    assert len(dataset) == 16 + 5 + 3
    with pytest.raises(IndexError):
        dataset[24]
    (first, second) = ids(table, [24, 24])
    for epoch in (first, second):
        assert Counter(one // APART for one in epoch) == {0: 16, 1: 5, 2: 3}
        assert Counter(one for one in epoch if one < APART) == dict.fromkeys(range(8), 2)
    assert len({one for one in first + second if one // APART == 1}) == 10, "the other half in the next epoch"


def test_exhausted_sources_end_the_epoch_or_are_refused() -> None:
    sources = [numbered(30, 0, weight=0.5), numbered(7, 1, weight=0.5)]
    assert len(opened(mixture(sources))) in (59, 60)
    dataset = opened(mixture(sources, exhausted="end"))
    size = len(dataset)
    assert size in (14, 15)
    first, second = ids(mixture(sources, exhausted="end"), [size, size])
    assert Counter(one // APART for one in first)[1] == 7
    assert sorted(one for one in first if one >= APART) == sorted(one for one in second if one >= APART)
    with pytest.raises(SleyError, match="`exhausted` has no effect with `epochs`"):
        opened(mixture([numbered(30, 0, epochs=1)], exhausted="end"))
    refused = mixture(sources, exhausted="refuse")
    assert len(opened(refused, num_samples=size)) == size
    with pytest.raises(PlanError, match=f"needs {size + 1} samples, but the source `s1` is exhausted after {size}"):
        len(opened(refused, num_samples=size + 1))
    with pytest.raises(RunError, match="data-exhausted"):
        ids(refused, [size, size])
    assert len(opened(refused, split="held_out", num_samples=size + 1)) >= 59, "an evaluation may repeat what it has"


def test_sources_are_told_their_own_epochs_and_keep_their_order() -> None:
    table = mixture([numbered(4, 0, weight=1, shuffle=False), numbered(12, 1, weight=1)])
    dataset = opened(table)
    samples = [dataset[index] for index in range(len(dataset))]
    assert [int(one["id"]) for one in samples if not one["source"]] == [0, 1, 2, 3] * 3
    assert [source.dataset.epochs for source in dataset._sources] == [[0, 1, 2], [0]]


def test_samples_that_draw_are_the_same_in_every_layout() -> None:
    def source(number: int, weight: float) -> dict[str, Any]:
        return {**numbered(30, number, weight=weight), "options": {"count": 30, "first": 0, "draws": True}}

    table = mixture([source(0, 30), source(1, 1)])  # the second one comes late

    def numbers(dp: int) -> list[float]:
        feeds = [
            Feed(opened(table), seed=7, batch_size=8, rows=range(8)[rank * 8 // dp : (rank + 1) * 8 // dp])
            for rank in range(dp)
        ]
        try:
            batches = [[feed.next() for feed in feeds] for _ in range(8)]
        finally:
            for feed in feeds:
                feed.close()
        return [one for batch in batches for part in batch for one in part["drawn"].tolist()]

    assert numbers(1) == numbers(2) == numbers(4)
    assert len(set(numbers(1))) == 64


@pytest.mark.parametrize("draws", [False, True])
def test_sources_that_draw_are_read_only_within_next(draws: bool) -> None:
    sources = [numbered(30, number, weight=2 - number) for number in range(2)]
    dataset = opened(mixture([{**source, "options": {"count": 30, "draws": draws}} for source in sources]))
    seen = [dataset.draws_random]
    for index in range(12):
        dataset[index]
        seen.append(dataset.draws_random)
    assert all(seen[:10]), "the run observes the first four reads of each source, and nine reads have three of the second"
    assert seen[12] is draws


def text(folder: Path, name: str, documents: Sequence[str]) -> dict[str, Any]:
    (folder / f"{name}.txt").write_text("\n\n".join(documents))
    return {"use": "data.text", "files": [f"{name}.txt"], "separator": "\n\n", "weight": 1, "sequence": 8}


def words(count: int, seed: int) -> list[str]:
    random = Random(seed)
    return [" ".join(random.choices(["weft", "warp", "sley", "reed"], k=random.randint(2, 30))) for _ in range(count)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"held_out": 0.3}, {"held_out": 0.0}),
        ({"held_out_files": ["kept.txt"]}, {"held_out": 0.1}),
        ({"held_out": 0.4}, {"held_out": 0.1}),
    ],
)
def test_what_one_source_holds_out_none_trains_on(tmp_path: Path, first: Any, second: Any) -> None:
    shared = words(60, 1)
    (tmp_path / "kept.txt").write_text("\n\n".join(shared[:20]))
    sources = [
        {**text(tmp_path, "a", [*shared, *words(30, 2)]), **first},
        {**text(tmp_path, "b", [*shared, *words(30, 3)]), **second},
    ]
    config = plan_from_dict(small_plan(data=mixture(sources)), tmp_path).data.config

    def documents(split: Split) -> list[set[bytes]]:
        tables = [build_source_component(config, number).config for number in range(2)]
        return [{each for _, each in read_documents(find_document_files(table, split)[0], table, split)} for table in tables]

    trained, held_out = documents("train"), documents("held_out")
    assert held_out[0]
    assert not (trained[0] | trained[1]) & (held_out[0] | held_out[1])
    assert all(len(each) > 30 for each in trained)
    alone = plan_from_dict(small_plan(data={key: value for key, value in sources[1].items() if key != "weight"}), tmp_path)
    files = find_document_files(alone.data.config, "train")[0]
    assert {each for _, each in read_documents(files, alone.data.config, "train")} & held_out[0], "alone it would train on some"
    assert describe_overlap(config, config) == ""
    sources = [{**source, "held_out": 0.0, "held_out_files": []} for source in sources]
    sources.append({"use": "data.tokens", "files": ["kept.txt"], "vocab_size": 256, "sequence": 8, "weight": 1})
    other = plan_from_dict(small_plan(data=mixture(sources)), tmp_path).data.config
    count = len(held_out[0] & {each.encode() for each in shared})
    assert f"`s0` in `s1`: the run was trained on {count} of the {len(held_out[0])} held-out" in describe_overlap(other, config)
    assert describe_overlap(config, other) == ""
    assert load_text_ids(config, None).size == 256
    with pytest.raises(UsageError, match="no source of the mixture has a tokenizer"):
        load_text_ids(plan_from_dict(small_plan(data=mixture(sources[2:])), tmp_path).data.config, None)


def test_held_out_samples_come_from_sources_that_have_some(tmp_path: Path) -> None:
    sources = [{**text(tmp_path, "a", words(90, 1)), "held_out": 0.0}, {**text(tmp_path, "b", words(90, 2)), "held_out": 0.3}]
    dataset = opened(mixture(sources), tmp_path, "held_out")
    assert dataset.sources == ("s1",)
    assert len(dataset)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([None, 8, 16]), st.lists(st.sampled_from([None, 8, 16]), min_size=1, max_size=3))
def test_a_resolved_plan_has_the_sequence_of_each_source(outer: int | None, inner: list[int | None]) -> None:
    def table(sequence: int | None) -> dict[str, int]:
        return {} if sequence is None else {"sequence": sequence}

    source = {"use": "data.text", "files": ["a.txt"], "weight": 1}
    expected = [sequence or outer for sequence in inner]
    if None in expected:
        return
    plan = plan_from_dict(small_plan(data=mixture([source | table(sequence) for sequence in inner], **table(outer))), Path())
    again = plan_from_text(plan.to_toml())
    configs: list[Any] = [plan.data.config, again.data.config]
    for config in configs:
        assert [part.component.config.sequence for part in config.sources] == expected
        assert config.sequence == (expected[0] if len(set(expected)) == 1 else outer)
    assert (again.to_toml(), again.digest) == (plan.to_toml(), plan.digest)


def test_tables_of_sources_are_checked_at_their_place(tmp_path: Path) -> None:
    def problems(**changes: Any) -> list[tuple[str, str]]:
        sources = [text(tmp_path, "a", words(90, 1)), text(tmp_path, "b", words(90, 2))]
        for source in sources:
            del source["sequence"]
        sources[1] |= changes
        table = mixture(sources, sequence=8)
        try:
            plan = plan_from_dict(small_plan(data=table, evaluation={"every": 1}), tmp_path)
        except SleyError as error:
            found = list(error.diagnostics)
        else:
            found = check_plan(plan, 1)
        return [(one.code, ".".join(map(str, one.path))) for one in found]

    assert problems() == []
    assert problems(files=["none.txt"]) == [("data-missing", "data.sources.1.files.0")]
    assert problems(file=["none.txt"]) == [("unknown-key", "data.sources.1.file")]
    assert problems(use="data.txt") == [("unknown-record", "data.sources.1.use")]
    assert problems(use="datum.text") == [("plugin-unknown", "data.sources.1.use")]
    assert problems(weight=0) == [("out-of-range", "data.sources.1.weight")]
    assert problems(name="s0") == [("wrong-value", "data")]
    assert problems(epochs=1) == [("wrong-value", "data")]
    assert problems(weight=None, epochs=1) == [("wrong-value", "data")]
    assert problems(sequence=16) == [("mixture-sources", "data.sources.1")]
    assert problems(documents="cut") == [("mixture-sources", "data.sources.1")]
    assert problems(held_out=0.001) == [("held-out", "evaluation")]


def test_sources_that_do_not_fit_each_other(tmp_path: Path) -> None:
    bytes_ = {**text(tmp_path, "a", words(90, 1)), "documents": "cut", "held_out": 0.0}
    (tmp_path / "a.bin").write_bytes(bytes(range(200)) * 20)
    tokens = {"use": "data.tokens", "files": ["a.bin"], "vocab_size": 65536, "sequence": 8, "weight": 1}
    with pytest.raises(PlanError, match=r"same `vocab_size`, but `s0` has 256 and `s1` has 65536"):
        raise PlanError.from_diagnostics(check_plan(plan_from_dict(small_plan(data=mixture([bytes_, tokens])), tmp_path), 1))
    with pytest.raises(PlanError, match="same `vocab_size`"):
        _ = opened(mixture([bytes_, tokens]), tmp_path).info
    with pytest.raises(PlanError, match=r"source `s1`: the file `.*none.txt` does not exist") as caught:
        len(opened(mixture([bytes_, {**bytes_, "files": ["none.txt"]}]), tmp_path))
    assert caught.value.diagnostics[0].path == ("data", "sources", 1, "files", 0)
    with pytest.raises(PlanError, match="same `fields`, but `s0` has id and `s1` has id, drawn"):
        _ = opened(
            mixture([numbered(3, 0, weight=1), {**numbered(3, 1, weight=1), "options": {"count": 3, "draws": True}}])
        ).info
    with pytest.raises(PlanError, match="`s1` is a stream"):
        opened(mixture([numbered(3, 0, weight=1), {"factory": "numbered_rows:stream", "weight": 1}]))
    with pytest.raises(PlanError, match="no samples"):
        len(opened(mixture([numbered(3, 0, weight=1), numbered(0, 1, weight=1)])))
    inner = mixture([numbered(3, 0, weight=1)])
    with pytest.raises(PlanError, match="same `fields`"):
        _ = opened(mixture([{**inner, "weight": 1}])).info


def test_tokens_held_out_in_one_source_and_trained_on_in_another(tmp_path: Path) -> None:
    random = Random(0)
    for name in ("a", "b"):
        (tmp_path / f"{name}.bin").write_bytes(random.randbytes(6000))
    source = {"use": "data.tokens", "vocab_size": 65536, "sequence": 8, "weight": 1}
    sources = [{**source, "files": ["a.bin"]}, {**source, "files": ["b.bin"], "held_out_files": ["a.bin"]}]
    (found,) = check_plan(plan_from_dict(small_plan(data=mixture(sources)), tmp_path), 1)
    assert (found.code, found.path) == ("held-out-trained", ("data", "sources", 1, "held_out_files"))
    plan = plan_from_dict(small_plan(data=mixture(sources[:1]), evaluation={"every": 1}), tmp_path)
    assert [(each.code, each.path) for each in check_plan(plan, 1)] == [("held-out", ("evaluation",))]


def test_chats_that_one_source_holds_out_none_trains_on(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": one}, {"role": "assistant", "content": "b"}] for one in words(40, 1)]
    chats = [json.dumps({"messages": each}) for each in turns]
    (tmp_path / "all.jsonl").write_text("\n".join(chats))
    (tmp_path / "kept.jsonl").write_text("\n".join(chats[:9]))
    source = {"use": "data.chat", "files": ["all.jsonl"], "tokenizer": "none", "weight": 1}
    sources = [{**source, "held_out": 0.0}, {**source, "held_out": 0.2}, {**source, "held_out_files": ["kept.jsonl"]}]
    config = plan_from_dict(small_plan(data=mixture(sources, sequence=8)), tmp_path).data.config

    def asked(number: int, split: Split) -> set[str]:
        chats: Any = build_source_component(config, number).config
        chosen = read_documents(find_document_files(chats, split)[0], chats, split)
        return {each.messages[0]["content"] for each in chosen}

    trained, held_out = ([asked(number, split) for number in range(3)] for split in ("train", "held_out"))
    assert trained[0] == trained[1] == trained[2]
    assert [len(each) > 0 for each in held_out] == [False, True, True]
    assert not trained[0] & (held_out[1] | held_out[2])
    assert trained[0] | held_out[1] | held_out[2] == set(words(40, 1))


def test_changed_content_has_another_digest(tmp_path: Path) -> None:
    digests = []
    for seed in (1, 1, 2):
        sources = [text(tmp_path, "a", words(90, 1)), text(tmp_path, "b", words(90, seed))]
        digests.append(opened(mixture(sources), tmp_path).data_digest)
    assert [one == other for one, other in pairwise(digests)] == [True, False]
    assert not hasattr(opened(mixture([numbered(3, 0, weight=1)])), "data_digest"), "one whose source has none is probed"


class TestPackedTexts(DatasetContract):
    """With boundaries, of which one source has more in a sample than the other."""

    data = mixture(
        [
            {"use": "data.text", "files": ["a.txt"], "separator": "\n\n", "held_out": 0.2, "weight": 0.3},
            {"use": "data.text", "files": ["b.txt"], "separator": "\n\n", "held_out": 0.2, "weight": 0.7},
        ],
        sequence=24,
    )
    holds_out = True

    def write_files(self, folder: Path) -> None:
        (folder / "a.txt").write_text("\n\n".join(words(80, 1)))
        (folder / "b.txt").write_text("\n\n".join(f"{number}" for number in range(200)))
