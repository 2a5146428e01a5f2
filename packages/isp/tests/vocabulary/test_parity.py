"""A vocabulary that ranks share changes no number."""

from __future__ import annotations

import pytest

from sley_core.data.dataset import IGNORED
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import assert_parity, record

SHARED = {"head": "vocabulary"}
SPLIT = {"sequence": {"use": "isp.all_to_all"}, "parallel": {"sp": 2}}
TIED = {"model__tie_embeddings": True}
OWN_DATA = {"data": {"factory": "scored:Labelled"}, "loss": {"use": "core.cross_entropy", "label_smoothing": 0.1}}


@pytest.fixture
def check(parities):
    """`check(world, cases, **changes)`: for each case, (wp, dp, more changes), every rank equals one process."""
    return lambda world, cases, weights=None, **changes: parities(world, cases, SHARED | (weights or {}), **changes)


@pytest.mark.parametrize(
    "cases", [[{"batch__micro_size": 1}, TIED | {"batch__micro_size": 4}], pytest.param([{}, TIED], marks=pytest.mark.campaign)]
)
def test_every_rank_scores_its_classes(check, cases):
    """257 classes over two ranks, 129 and 128: tied or not, with micro-batches of one, two and four samples."""
    check(2, [(2, 2, case) for case in cases])


@pytest.mark.campaign
def test_ignored_labels_and_smoothing(check):
    """In `pad` every sample ends in labels that are ignored, also where the loss has another number for these."""
    padded = {"data__documents": "pad"}
    smooth = {"loss": {"use": "core.cross_entropy", "label_smoothing": 0.1}}
    other = {"loss": {"use": "core.cross_entropy", "ignore_index": 32}}
    check(2, [(2, 2, padded), (2, 2, smooth), (2, 2, padded | smooth), (2, 2, padded | other)])


@pytest.mark.campaign
def test_recomputation_and_modules(check):
    again = {"activations": {"use": "core.recompute", "fraction": 1.0}, "model__tie_embeddings": True}
    check(2, [(2, 2, again)], weights={"unit": "module"})
    check(2, [(2, 2, again)], weights={"overlap": False})


@pytest.mark.campaign
def test_slices_of_sequences(check):
    """Each rank has other tokens of the same samples; the shared classes are those of all of them."""
    check(2, [(2, 1, SPLIT), (2, 1, SPLIT | TIED | {"data__documents": "cut"})])


@pytest.mark.parametrize(
    ("wp", "dp", "change"),
    [
        (2, 2, SPLIT),
        pytest.param(2, 4, {}, marks=pytest.mark.campaign),
        pytest.param(4, 2, SPLIT, marks=pytest.mark.campaign),
        pytest.param(4, 4, {}, marks=pytest.mark.campaign),
    ],
)
def test_four_ranks(check, wp, dp, change):
    """Two copies of two slices, and four slices, also of sequences in two."""
    check(4, [(wp, dp, change)])


def test_frozen_weights(check):
    """No gradient is made for a frozen head; none goes back where nothing before it is trained."""
    cases = [{"optimizer__groups": [{"match": match, "freeze": True}]} for match in ("head.output*", "[eb]*")]
    check(2, [(2, 2, case) for case in cases])


@pytest.mark.campaign
def test_a_head_with_a_bias_and_ranks_without_a_class(check, own):
    """Four classes over three ranks are two, two and none; samples all of whose labels are ignored."""
    sizes = {"batch": {"global_size": 6, "micro_size": 1}, **OWN_DATA}
    cases = [{"model": {"factory": "scored:layers", "options": {"frozen": name}}} for name in ("", "head", "embed")]
    check(3, [(3, 3, case) for case in cases], **sizes)


@pytest.mark.campaign
def test_single_precision(ranks, texts, sharded):
    for tied in (False, True):
        changes = {"precision__compute": "fp32", "model__tie_embeddings": tied}
        reference = record(sharded(1, 1, **changes), 3, folder=texts)
        assert_parity(reference, ranks(2)(record, sharded(2, weights=SHARED, **changes), 3, folder=texts), "fp32")


def test_half_precision(ranks, texts, sharded):
    """The head's input gradient is a sum of bf16 parts, one per slice; gradients keep the tolerance of bf16, 2^-7."""
    changes = {"precision__compute": "bf16"}
    reference = record(sharded(1, 1, **changes), 1, folder=texts)
    for layout in ranks(2)(record, sharded(2, weights=SHARED, **changes), 1, folder=texts):
        assert_close_gradients(reference.gradients[0], layout.gradients[0], 2**-7)
        assert layout.rows[0]["loss"] == pytest.approx(reference.rows[0]["loss"], rel=2**-7)


def batches(num_steps):
    """Micro-batches of two samples and of every length: at the same time, ranks have unequal ones."""
    import torch

    found = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        micros = []
        for length in (5, 9, 7, 3):
            tokens = torch.randint(4, (2, length), generator=generator)
            labels = tokens.roll(-1, 1)
            labels[:, -1] = IGNORED
            micros.append({"tokens": tokens, "labels": labels})
        found.append(micros)
    return found


def test_unequal_numbers_of_tokens(ranks, texts, sharded, own):
    """What one rank has more than another is padded where they meet."""
    changes = {"model": {"factory": "scored:layers"}, **OWN_DATA, "evaluation": {"every": 9, "steps": 1}}
    reference = record(sharded(1, 1, **changes), 3, folder=texts, batches=batches(3))
    tables = sharded(2, weights=SHARED, **changes)
    assert_parity(reference, ranks(2)(record, tables, 3, folder=texts, batches=batches(3)), "fp64")
