"""A mixture of packed text and chats has the numbers of a plain loop in every layout, with the loss of each source."""

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from chat_folder import documents, loop_of, write_chats
from torch import Tensor

from sley_core.errors import RunError
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import GRADIENTS, WEIGHTS, RunRecord, assert_parity_of_parts, record, running, weights

NUM_STEPS = 2
SOURCES = ("texts", "chats")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, conversations, and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("mixed")
    write_chats(folder)
    random = Random(5)
    texts = (" ".join(random.choices(["weft", "warp", "sley"], k=random.randint(1, 30))) for _ in range(90))
    (folder / "texts.txt").write_text("\n\n".join(texts), "utf-8")
    return folder


TEXT = {"use": "data.text", "files": ["texts.txt"], "separator": "\n\n", "tokenizer": "tokenizer"}
CHAT = {"use": "data.chat", "files": ["chats.jsonl"], "tokenizer": "tokenizer"}


def mixed_plan(**changes: Any) -> Tables:
    sources = [{"name": "texts", "weight": 1, **TEXT}, {"name": "chats", "weight": 2, **CHAT}]
    mixture = {"use": "data.mixture", "sequence": 160, "sources": sources}
    return changed(small_plan(data=mixture, optimizer__eps=1e-3, batch={"global_size": 4, "micro_size": 1}), **changes)


BUCKETS = [{"use": "dp.bucketed", "bucket_mb": 0.002}]
SLICES = {"parallel__sp": 2, "sequence__use": "isp.all_to_all", "gradient_handlers": BUCKETS}
SHARDED = {"parallel__dp": 2, "parallel__wp": 2, "weights__use": "isp.communicator"}
CHUNKS = {"loss": {"use": "core.cross_entropy", "chunk_tokens": 60}}
LAYOUTS: dict[str, Tables] = {
    "sp 2, a loss of full sequences": {**SLICES, "loss": {"factory": "chat_folder:build_loss", "sequence": "whole"}},
    "pp 2": {"parallel__pp": 2, "pipeline__use": "pp.one_f_one_b"},
    "wp 2": SHARDED,
    "wp 2, split logits": {**SHARDED, "weights__head": "vocabulary"},
    "sp 2": SLICES,
    "canonical": {"parallel__dp": 2, "parallel__reduction": "canonical", "gradient_handlers": BUCKETS},
    # Sources differ between ranks, which make the same exchanges for the chunks of each source.
    "wp 2, chunks of logits": {**SHARDED, **CHUNKS},
    "wp 2, chunks of split logits": {**SHARDED, **CHUNKS, "weights__head": "vocabulary"},
}


@pytest.fixture(scope="module")
def reference(folder: Path) -> RunRecord:
    """The steps of a plain loop that processes one document at a time. Rows have the losses and shares of the sources."""
    with running(mixed_plan(), folder) as run:
        first = weights(run)
        batches = [run.feed.next() for _ in range(NUM_STEPS)]
        layers = [(layer.name, layer.module) for layer in run.layers]
    loop = loop_of(layers)
    loop.load(first)
    recorded = RunRecord(initial_weights=first)
    for number, batch in enumerate(batches):
        assert len(set(batch["source"].tolist())) == 2
        by_source: dict[str, list[dict[str, Tensor]]] = {name: [] for name in SOURCES}
        for index, source in enumerate(batch["source"].tolist()):
            by_source[SOURCES[source]] += documents({name: value[index : index + 1] for name, value in batch.items()})
        counts = {name: sum(map(loop.loss.weight, micros)) for name, micros in by_source.items()}
        row = {f"loss/{name}": loop.evaluate(micros) for name, micros in by_source.items()}
        row |= {f"share/{name}": count / sum(counts.values()) for name, count in counts.items()}
        step = loop.step([document for micros in by_source.values() for document in micros])
        row |= {"step": number + 1, "loss": step.loss, "grad_norm": step.grad_norm, "tokens": batch["tokens"].numel()}
        recorded.rows.append(row)
        recorded.gradients.append(step.gradients)
    recorded.weights = first | loop.weights
    return recorded


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixture_trains_like_single_documents(ranks: Any, folder: Path, reference: RunRecord, layout: str) -> None:
    recorded = ranks(2)(record, mixed_plan(**LAYOUTS[layout]), NUM_STEPS, folder=folder)
    assert_parity_of_parts(reference, recorded, "fp64")
    for rank in recorded:
        for expected, actual in zip(reference.rows, rank.rows, strict=True):
            tolerance = (GRADIENTS if expected["step"] == 1 else WEIGHTS)["fp64"]
            for key in (f"{label}/{name}" for label in ("loss", "share") for name in SOURCES):
                assert math.isclose(expected[key], actual[key], rel_tol=tolerance), (key, expected, actual)


@pytest.mark.campaign
def test_canonical_losses_of_sources_have_the_bits_of_one_process(ranks: Any, folder: Path) -> None:
    canonical = mixed_plan(parallel__reduction="canonical", batch={"global_size": 8, "micro_size": 1})
    expected = record(canonical, NUM_STEPS, folder=folder)
    actual = ranks(2)(record, changed(canonical, parallel__dp=2), NUM_STEPS, folder=folder)[0]
    for expected_row, row in zip(expected.rows, actual.rows, strict=True):
        names = [key for key in expected_row if key.startswith(("loss", "share"))]
        assert len(names) == 5
        assert {key: expected_row[key] for key in names} == {key: row[key] for key in names}
    assert_same_bits(expected.weights, actual.weights)


def test_a_batch_of_one_source_and_an_unknown_source(folder: Path) -> None:
    with running(mixed_plan(), folder) as run:
        batch = run.feed.next()
        row = run.step({**batch, "source": torch.ones(4, dtype=torch.int64)})
        assert row["loss/chats"] == row["loss"]
        assert row["share/texts"] == 0
        assert "loss/texts" not in row
        with pytest.raises(RunError, match=r"a sample has the source 2, but the data has 2 sources: texts, chats"):
            run.step({**batch, "source": torch.arange(4)})
