"""A vocabulary-parallel head changes no number, holds no full logits, and refuses models that need them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.data.dataset import IGNORED
from sley_core.errors import RunError
from sley_core.losses import cross_entropy
from sley_core.losses.cross_entropy import plain_sum
from sley_core.plan.load import plan_from_dict
from sley_isp import vocabulary_head as vocabulary
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import assert_parity, record

SHARED = {"head": "vocabulary"}
SPLIT = {"sequence": {"use": "isp.all_to_all"}, "parallel": {"sp": 2}}
TIED = {"model__tie_embeddings": True}
OWN_DATA = {"data": {"factory": "isp_models:Labelled"}, "loss": {"use": "core.cross_entropy", "label_smoothing": 0.1}}
CLASSES = 257


def classifier(**options: Any) -> dict[str, Any]:
    return {"model": {"factory": "isp_models:classifier", "options": options}, **OWN_DATA}


def slices(num_classes: int, count: int) -> list[vocabulary.Classes]:
    """As core cuts rows: equal ranges, the last ones shorter or empty."""
    rows = -(-num_classes // count)
    sizes = [max(0, min(rows, num_classes - at * rows)) for at in range(count)]
    return [vocabulary.Classes(at * rows, size, num_classes) for at, size in enumerate(sizes)]


def together(logits: Tensor, labels: Tensor, count: int, smoothing: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sum and gradient, as `count` ranks compute them."""
    targets = labels.masked_fill(labels == IGNORED, vocabulary.NO_TARGET)
    classes = slices(logits.shape[1], count)
    parts = [logits.detach()[:, one.first : one.first + one.size].clone() for one in classes]
    every = [vocabulary.statistics(part, targets, one, smoothing) for part, one in zip(parts, classes, strict=True)]
    combined = vocabulary.combine(torch.stack(every))
    for part, one in zip(parts, classes, strict=True):
        factor = torch.tensor(scale, dtype=torch.float64)
        vocabulary.to_gradient(part, targets, one, combined.log_sum, factor, smoothing)
    return vocabulary.losses(combined, targets, logits.shape[1], smoothing).sum(), torch.cat(parts, 1)


def samples(num_tokens: int, num_classes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = 3 * torch.randn(num_tokens, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(num_classes, (num_tokens,), generator=generator)
    labels[::3] = IGNORED
    return logits.to(dtype).requires_grad_(), labels


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 6), st.sampled_from([0.0, 0.1]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_cut_gives_the_sum_over_all(num_tokens: int, num_classes: int, count: int, smoothing: float, few: bool) -> None:
    """Also where ranks have no class at all, and a chunk at a time."""
    logits, labels = samples(num_tokens, num_classes)
    expected = plain_sum(logits, labels, IGNORED, smoothing)
    (gradient,) = torch.autograd.grad(0.7 * expected, logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 4 if few else 1 << 19})
        total, found = together(logits, labels, count, smoothing, 0.7)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


def test_narrow_and_extreme_logits_and_labels_that_no_rank_has() -> None:
    logits, labels = samples(50, 37, torch.bfloat16)
    expected = plain_sum(logits, labels, IGNORED, 0.1)
    (gradient,) = torch.autograd.grad(expected, logits)
    total, found = together(logits, labels, 3, 0.1)
    assert (total.dtype, found.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, gradient, rtol=2**-7, atol=2**-9)
    total, found = together(torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]]), torch.tensor([0, 0]), 2, 0.0)
    assert float(total) == pytest.approx(2e4)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, 0.0], [-1.0, 1.0, 0.0]]))
    for label in (3, -1):
        assert float(together(torch.zeros(1, 3), torch.tensor([label]), 2, 0.0)[0]) == torch.inf


def test_parity(parities):
    """257 classes over two ranks, 129 and 128; tied or not; slices of sequences; a frozen head, and one before which nothing is
    trained; without overlap.
    """
    frozen = [{"optimizer__groups": [{"match": match, "freeze": True}]} for match in ("head.output*", "[eb]*")]
    plain = {"batch__micro_size": 1, "weights": SHARED | {"overlap": False}}
    parities(2, [plain, TIED | {"data__documents": "pad"}, {"dp": 1} | SPLIT, *frozen], weights=SHARED)


def test_a_head_with_a_bias_and_ranks_without_a_class(parities):
    """Four classes over three ranks are two, two and none; samples all of whose labels are ignored."""
    sizes = {"batch": {"global_size": 6, "micro_size": 1}}
    parities(3, [classifier(frozen=name) for name in ("", "head", "embed")], weights=SHARED, **sizes)


def test_half_precision(ranks, texts, sharded):
    """The head's input gradient is a sum of bf16 parts, one per slice."""
    changes = {"precision__compute": "bf16"}
    reference = record(sharded(1, 1, **changes), 1, folder=texts)
    for layout in ranks(2)(record, sharded(2, weights=SHARED, **changes), 1, folder=texts):
        assert_close_gradients(reference.gradients[0], layout.gradients[0], 2**-7)
        assert layout.rows[0]["loss"] == pytest.approx(reference.rows[0]["loss"], rel=2**-7)


def batches(num_steps: int) -> list[list[dict[str, Tensor]]]:
    """Micro-batches of two samples and of every length: at the same time, ranks have unequal ones."""
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


def test_unequal_numbers_of_tokens(ranks, texts, sharded):
    """Shorter ones are padded where they are gathered."""
    changes = classifier() | {"evaluation": {"every": 9, "steps": 1}}
    reference = record(sharded(1, 1, **changes), 3, folder=texts, batches=batches(3))
    tables = sharded(2, weights=SHARED, **changes)
    assert_parity(reference, ranks(2)(record, tables, 3, folder=texts, batches=batches(3)), "fp64")


class Widths(TorchDispatchMode):
    """Counts the rows of the largest matrix that operations return, by its number of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.ndim > 1:
                width = tensor.shape[-1]
                self.rows[width] = max(self.rows[width], tensor.numel() // width if width else 0)
        return result


def seen(tables: dict[str, Any], folder: Path) -> Any:
    """The head's output by hand, the gathers of a step and an evaluation, the sizes of their matrices, and what is left."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        hidden: Any = torch.arange(12).view(1, 12)
        with torch.no_grad():
            for layer in run.layers:
                hidden = layer.module(hidden)
        communicator, names = run.stepper.executor.weights, set()
        if communicator is None:
            return hidden
        all_gather = communicator._all_gather
        communicator._all_gather = lambda group: [names.add(group.name), all_gather(group)][1]
        with Widths() as widths:
            run.step()
            run.evaluate()
        return hidden, names, widths.rows, (communicator.pool.num_lent, len(communicator.prefetch.unsharded))


@pytest.mark.parametrize("tied", [False, True])
def test_no_weight_is_gathered_and_no_logits_are_full(ranks, sharded, texts, tied):
    """A token's 257 logits are never in one place, only the 129 of a slice, of the 2 x 48 tokens of both ranks. Outside a run's
    actions the head is a linear like any other.
    """
    changes = {"model__tie_embeddings": tied, "data__documents": "cut"}
    reference = seen(sharded(1, 1, **changes), texts)
    for by_hand, gathered, rows, rest in ranks(2)(seen, sharded(2, weights=SHARED, **changes), texts):
        torch.testing.assert_close(by_hand, reference, rtol=1e-10, atol=1e-10)
        assert gathered == {"embed", "blocks.0", "blocks.1"}
        assert CLASSES not in rows
        assert rows[129] == 2 * 48
        assert rest == (0, 0)


def codes(plans: list[dict[str, Any]], folder: Path) -> list[str]:
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            with pytest.raises(RunError) as caught:
                run.step()
            found.append(caught.value.diagnostics[0].code)
    return found


def test_models_and_labels_that_do_not_fit(ranks, own, sharded):
    """Found in the first forward, on all ranks alike, before anything is sent: logits that are not returned unchanged, and a
    class that the head has not.
    """
    data = {"data": {"factory": "isp_models:Labelled"}}
    models = [{"factory": "isp_models:changed", "options": {"change": change}} for change in ("times", "tanh", "mean")]
    beyond = {"data": {"factory": "isp_models:Beyond"}, "model": {"factory": "isp_models:classifier"}}
    plans = [sharded(2, weights=SHARED, model=model, **data) for model in models]
    plans += [sharded(2, weights={"head": head}, **beyond) for head in ("gather", "vocabulary")]
    assert ranks(2)(codes, plans, own) == [["logits-split"] * 3 + ["label-out-of-range"] * 2] * 2
