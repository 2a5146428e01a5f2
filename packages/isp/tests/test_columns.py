"""Tests that embeddings by columns and vocabulary-parallel heads change no result, and refuse unsupported models."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import records_or_codes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.data.dataset import IGNORE_INDEX
from sley_core.losses import cross_entropy
from sley_core.losses.cross_entropy import sum_cross_entropy
from sley_isp import vocabulary
from sley_testing.collectives import assert_same_sequence, can_read_peers, collectives
from sley_testing.runs import assert_equal_replicas, assert_parity, record, running

HIDDEN = {"embedding": "hidden"}
CLASSES = {"head": "vocabulary"}
SPLIT = {"dp": 1, "sequence": {"use": "isp.all_to_all"}, "parallel": {"sp": 2}}
RECOMPUTED = {"activations": {"use": "core.recompute", "fraction": 1.0}}
ROWS, WIDTH, TOKENS = 257, 16, 48
"""Of the table and the head; and tokens of a rank's microbatch, of which there are two per step."""


def classifier(**options: Any) -> dict[str, Any]:
    data = {"data": {"factory": "isp_models:Labelled"}, "loss": {"use": "core.cross_entropy", "label_smoothing": 0.1}}
    return {"model": {"factory": "isp_models:classifier", "options": options}, **data}


# -- the loss over slices of the classes, without ranks --------------------------------------------------------------------


def slices(num_classes: int, count: int) -> list[vocabulary.ClassRange]:
    """Returns equal ranges of classes, the last ones shorter or empty, as core shards rows."""
    rows = -(-num_classes // count)
    sizes = [max(0, min(rows, num_classes - at * rows)) for at in range(count)]
    return [vocabulary.ClassRange(at * rows, size, num_classes) for at, size in enumerate(sizes)]


def split_loss(logits: Tensor, labels: Tensor, count: int, smoothing: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns the loss and its gradient, as `count` ranks compute them."""
    targets = labels.masked_fill(labels == IGNORE_INDEX, vocabulary.NO_TARGET)
    classes = slices(logits.shape[1], count)
    parts = [logits.detach()[:, one.start : one.start + one.size].clone() for one in classes]
    every = [vocabulary.logit_statistics(part, targets, one, smoothing) for part, one in zip(parts, classes, strict=True)]
    losses, log_sum = vocabulary.token_losses(torch.stack(every), targets, logits.shape[1], smoothing)
    for part, one in zip(parts, classes, strict=True):
        factor = torch.tensor(scale, dtype=torch.float64)
        vocabulary.logits_to_gradient(part, targets, one, log_sum, factor, smoothing)
    return losses.sum(), torch.cat(parts, 1)


def samples(num_tokens: int, num_classes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = 3 * torch.randn(num_tokens, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(num_classes, (num_tokens,), generator=generator)
    labels[::3] = IGNORE_INDEX
    return logits.to(dtype).requires_grad_(), labels


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 6), st.sampled_from([0.0, 0.1]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_slices_give_the_same_loss(num_tokens: int, num_classes: int, count: int, smoothing: float, few: bool) -> None:
    """Ranks may have no class, and process logits in chunks."""
    logits, labels = samples(num_tokens, num_classes)
    expected = sum_cross_entropy(logits, labels, IGNORE_INDEX, smoothing)
    (gradient,) = torch.autograd.grad(0.7 * expected, logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 4 if few else 1 << 19})
        total, found = split_loss(logits, labels, count, smoothing, 0.7)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


def test_bf16_and_extreme_logits_and_invalid_labels() -> None:
    logits, labels = samples(50, 37, torch.bfloat16)
    expected = sum_cross_entropy(logits, labels, IGNORE_INDEX, 0.1)
    (gradient,) = torch.autograd.grad(expected, logits)
    total, found = split_loss(logits, labels, 3, 0.1)
    assert (total.dtype, found.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, gradient, rtol=2**-7, atol=2**-9)
    total, found = split_loss(torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]]), torch.tensor([0, 0]), 2, 0.0)
    assert float(total) == pytest.approx(2e4)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, 0.0], [-1.0, 1.0, 0.0]]))
    for label in (3, -1):
        assert float(split_loss(torch.zeros(1, 3), torch.tensor([label]), 2, 0.0)[0]) == torch.inf


# -- parity, beside the rows of the parity table ---------------------------------------------------------------------------


def test_frozen_heads_and_slices(assert_parities):
    """Tests a frozen head, a head after frozen layers, slices, and gradients once per step, also of bf16."""
    head, start = ({"optimizer__groups": [{"match": match, "freeze": True}]} for match in ("head.output*", "[eb]*"))
    narrow = {"precision__compute": "bf16", "weights": {"reduce": "step"}}
    slices = SPLIT | {"weights": HIDDEN | CLASSES | {"reduce": "step"}}
    assert_parities(2, [slices | head, narrow, start], weights=CLASSES, model__num_layers=1)


def test_tables_with_uneven_shards_that_are_read_twice(assert_parities):
    """Shards have two columns, one or none. The model has padding, a shared table and a frozen layer."""
    for num_ranks, case in (4, RECOMPUTED), (2, {"options": {"frozen": "again"}}):
        assert_parities(num_ranks, [case], weights=HIDDEN, factory="tables")


def test_a_head_with_a_bias_and_ranks_without_a_class(assert_parities):
    """Three ranks have two, two and no classes. All labels of some samples are ignored."""
    sizes = {"batch": {"global_size": 6, "micro_size": 1}}
    chunks = {"loss": {"use": "core.cross_entropy", "label_smoothing": 0.1, "chunk_tokens": 4}}
    cases = [classifier(frozen="head"), classifier(frozen="embed") | chunks]
    assert_parities(3, cases, weights=CLASSES, **sizes)


def batches(num_steps: int, target: str) -> list[list[dict[str, Tensor]]]:
    """Returns microbatches of two samples with different lengths on ranks. target: `labels` or `y`."""
    found = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        micros = []
        for length in (5, 9, 7, 3):
            tokens = torch.randint(4, (2, length), generator=generator)
            labels = tokens.roll(-1, 1)
            labels[:, -1] = IGNORE_INDEX
            y = torch.randn(2, length, 6, generator=generator, dtype=torch.float64)
            micros.append({"tokens": tokens, target: labels if target == "labels" else y})
        found.append(micros)
    return found


@pytest.mark.parametrize(
    ("changes", "weights", "target", "chunks"),
    [
        ({"factory": "tables"}, HIDDEN, "y", False),
        pytest.param(classifier(), CLASSES, "labels", False, marks=pytest.mark.campaign),
        (classifier(), CLASSES, "labels", True),
    ],
)
def test_unequal_numbers_of_tokens(ranks, texts, sharded, changes, weights, target, chunks):
    """Gathers pad short microbatches, and the gradient of the padding row stays zero."""
    given = batches(3, target)
    reference = record(sharded(1, 1, **changes), 3, folder=texts, batches=given)
    if chunks:
        changes = changes | {"loss": changes["loss"] | {"chunk_tokens": 4}}
    layouts = ranks(2)(record, sharded(2, weights=weights, **changes), 3, folder=texts, batches=given)
    assert_parity(reference, layouts, "fp64")
    assert_equal_replicas(layouts)


# -- what is whole, and when -----------------------------------------------------------------------------------------------


class Shapes(TorchDispatchMode):
    """Records the shapes of all results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.found.add(tuple(tensor.shape))
        return result


def record_step(tables: dict[str, Any], folder: Path) -> Any:
    """Returns the head's output by hand, and the gathers, exchanges, counters and shapes of the second step and
    of an evaluation.
    """
    with running(tables, folder) as run:
        hidden: Any = torch.arange(12).view(1, 12)
        with torch.no_grad():
            for layer in run.layers:
                hidden = layer.module(hidden)
        communicator, names = run.stepper.executor.communicator, set()
        if communicator is None:
            return hidden
        run.step()
        all_gather = communicator._all_gather
        communicator._all_gather = lambda group: [names.add(group.name), all_gather(group)][1]
        with Shapes() as shapes, collectives() as calls:
            run.step()
        counts = communicator.counts()
        with shapes:
            run.evaluate()
        gradient = run.store.gradient(run.registry["embed.tokens.weight"]).shape
        rest = communicator.groups[0].pool.num_lent, len(communicator.prefetch.unsharded)
        return hidden, names, shapes.found, list(calls), counts, gradient, rest


NEEDS_PEERS = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")


@pytest.mark.sample(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attaches", [pytest.param(True, marks=NEEDS_PEERS), False])
def test_no_table_and_no_logits_exist_in_full(ranks, sharded, texts, tied, attaches):
    """No rank has all 257 logits of a token, only the 129 of a slice for the tokens of both ranks. By hand the head is a
    plain linear. A table needs two all-to-alls of vectors and a gather of ids per microbatch.
    """
    changes = {"model__tie_embeddings": tied, "data__documents": "cut", "parallel": {"cross_memory_attach": attaches}}
    reference = record_step(sharded(1, 1, **changes), texts)
    weights = CLASSES if tied else CLASSES | HIDDEN
    found = ranks(2)(record_step, sharded(2, weights=weights, **changes), texts)
    assert_same_sequence([calls for _, _, _, calls, *_ in found])
    for by_hand, gathered, shapes, calls, counts, gradient, rest in found:
        torch.testing.assert_close(by_hand, reference, rtol=1e-10, atol=1e-10)
        assert gathered == {"blocks.0", "blocks.1"} | ({"embed"} if tied else set())
        assert not any(shape[-1:] == (ROWS,) for shape in shapes if len(shape) > 1)
        assert max(prod(shape[:-1]) for shape in shapes if shape[-1:] == (129,)) == 2 * TOKENS
        assert rest == (0, 0)
        if tied:
            continue
        assert not {(ROWS, WIDTH), (ROWS + 1, WIDTH)} & shapes
        assert gradient == (ROWS, WIDTH // 2)
        exchange = ("swap", TOKENS * WIDTH) if attaches else ("send", TOKENS * WIDTH // 2)  # its half to the other rank
        assert [(call.op, call.numel) for call in calls].count(exchange) == 4
        assert counts["demand_gathers_per_step"] == 1, "the first block of the step"


def test_changed_logits_and_invalid_labels_are_refused(ranks, own, sharded):
    """The first forward refuses them on all ranks before it sends data: the mean of all logits, and a class that the head does
    not have.
    """
    data = {"data": {"factory": "isp_models:Labelled"}}
    beyond = {"data": {"factory": "isp_models:Beyond"}, "model": {"factory": "isp_models:classifier"}}
    plans = [sharded(2, weights=CLASSES, model={"factory": "isp_models:changed"}, **data)]
    plans += [sharded(2, weights={"head": head}, **beyond) for head in ("gather", "vocabulary")]
    assert ranks(2)(records_or_codes, plans, own, 1) == [["logits-split", *["label-out-of-range"] * 2]] * 2
