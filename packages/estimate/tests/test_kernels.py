"""What operators take and layers keep: scratch of the CPU's operators, and what CUDA's kernels save, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sley_core.model.attention import Attention
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.fake_tensors import FakeTensors, OpResultCache
from sley_estimate.bytes.ledger import Ledger, StepPlace
from sley_estimate.bytes.rank import RankBytes, rank_bytes
from sley_estimate.layers.operators import OperatorRecorder, imitate_cuda
from sley_testing.live_bytes import memory_profile, peak_bytes
from sley_testing.plans import changed, small_plan

WIDE, NARROW, WHOLE, FLAG = torch.float32, torch.bfloat16, torch.int64, torch.bool
SIZE = 4096
NUMBERS = 16
"""Bytes of the numbers that stand beside tensors, which torch makes tensors of."""
CASES: dict[str, tuple[Callable[..., Tensor], list[torch.dtype]]] = {
    "a gradient is added to a wider one": (lambda a, b: a.add_(b), [WIDE, NARROW]),
    "a wide one into a narrow one": (lambda a, b: a.add_(b), [NARROW, WIDE]),
    "a result of another type": (lambda a, b, c: torch.mul(a, b, out=c), [WIDE, WIDE, NARROW]),
    "new, of two types": (lambda a, b: a * b, [WIDE, NARROW]),
    "a mask as a factor": (lambda a, b: a * b, [WIDE, FLAG]),
    "whole numbers and a fraction": (lambda a: a * 0.5, [WHOLE]),
    "whole numbers divided": (lambda a, b: a / b, [WHOLE, WHOLE]),
    "compared": (lambda a, b: a < b, [WIDE, NARROW]),
    "chosen": (lambda a, b, c: torch.where(a, b, c), [FLAG, WIDE, WIDE]),
    "masked": (lambda a, b: a.masked_fill(b, 0.0), [WIDE, FLAG]),
    "summed in another type": (lambda a: a.sum(dtype=WIDE), [NARROW]),
    "flags counted": (lambda a: a.sum(), [FLAG]),
    "a mean": (lambda a: a.mean(), [NARROW]),
    "a norm in another type": (lambda a: torch.linalg.vector_norm(a, dtype=WIDE), [NARROW]),
    "of one type": (lambda a, b: a.add_(b), [WIDE, WIDE]),
    "a number beside": (lambda a: a.mul_(2.0), [NARROW]),
    "two at once": (lambda a, b: torch._foreach_mul([a, b], 2.0)[0], [WIDE, WIDE]),
}


@pytest.mark.parametrize(("operate", "dtypes"), CASES.values(), ids=CASES)
def test_it_is_what_the_allocator_says(operate: Callable[..., Tensor], dtypes: list[torch.dtype]) -> None:
    given = [torch.ones(SIZE, dtype=dtype) for dtype in dtypes]
    with memory_profile() as profile:
        operate(*given)
    ledger = Ledger(lambda: StepPlace(0, "", ""))
    tensors = FakeTensors(ledger, OpResultCache())
    fakes = [tensors.from_values(one) for one in given]
    for fake in fakes:
        fake.constant = None  # of no values, as activations are
    for _ in range(2):  # asked, and remembered
        operate(*fakes)
    assert ledger.peak()[0] == pytest.approx(peak_bytes(profile), abs=NUMBERS)


HIDDEN, HEADS, FFN, SEQUENCE, MICRO, VOCABULARY = 128, 4, 384, 64, 2, 4096
TOKENS = MICRO * SEQUENCE
PLAN = small_plan(
    run__device="cuda",
    model={"use": "models.llama", "hidden": HIDDEN, "heads": HEADS, "ffn_hidden": FFN, "vocab_size": VOCABULARY},
    data__sequence=SEQUENCE,
    batch={"global_size": MICRO, "micro_size": MICRO},
)


def estimated(texts: Any, **changes: Any) -> RankBytes:
    return rank_bytes(plan_from_dict(changed(PLAN, **changes), texts), 0, 1)


def kept_by_a_block(texts: Any, **changes: Any) -> int:
    """How much more activations a model of one block more has at its peak."""
    few, many = (estimated(texts, model__num_layers=number, **changes) for number in (3, 4))
    assert few.place.layer == many.place.layer == "head"
    return many.alive["activations"] - few.alive["activations"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("compute", "size"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2])
def test_a_block_keeps_what_the_kernels_save(texts, compute, size, kv_heads):
    """Inputs and outputs of both norms, queries, context and two or four times keys and values, in fp32 as many as queries; of
    the feed-forward both products, the activation and what is multiplied; and numbers of rows in fp32.
    """
    of_groups = 1.0 if compute == "fp32" else kv_heads / HEADS
    wide = HIDDEN * (6 + 2 * of_groups) + 4 * FFN
    rows = 4 * (2 + HEADS)
    tables = 2 * 4 * SEQUENCE * HIDDEN // HEADS  # cosines and sines
    kept = kept_by_a_block(texts, precision={"compute": compute}, model__kv_heads=kv_heads, data__documents="cut")
    assert kept == TOKENS * (wide * size + rows) + tables


def test_documents_take_no_pairs_of_positions(texts):
    """Their kernel knows bounds; a mask would be kept, a byte for each pair."""
    more = {"precision": {"compute": "bf16"}, "data__documents": "pack"}
    kept = kept_by_a_block(texts, **more)
    on_cpu = kept_by_a_block(texts, run__device="cpu", **more)
    assert kept < TOKENS * (2 * (8 * HIDDEN + 4 * FFN) + 4 * (2 + HEADS)) + 4096 < on_cpu


def kept(layer: Any, *given: torch.Tensor) -> int:
    """Bytes that a layer keeps beside what it was given and returns."""
    ledger = Ledger(lambda: StepPlace(0, "", ""))
    with FakeTensors(ledger) as mode, imitate_cuda():
        tensors = [mode.from_tensor(one).requires_grad_() for one in given]
        for one in tensors:
            ledger.ignore(one)
        output = layer(*tensors)
        found = ledger.current_bytes - output.nbytes
        output.sum().backward()
        assert [one.grad.shape for one in tensors] == [one.shape for one in tensors]
    return found


def test_dropout_keeps_a_byte_for_each_element_and_a_norm_a_number_for_each_row():
    x, w = torch.empty(6, 32, dtype=torch.bfloat16), torch.empty(32, dtype=torch.bfloat16)
    assert kept(lambda x: F.dropout(x, 0.1), x) == 6 * 32
    assert kept(lambda x: F.dropout(x, 0.1, training=False) + 0, x) == 0
    assert kept(lambda x, w: F.rms_norm(x, (32,), w), x, w) == 6 * 4


def test_dropout_is_one_kernel_forward_and_one_backward():
    """Each reads one tensor and writes one, and the byte of each element."""
    with OperatorRecorder() as seen, FakeTensors(Ledger(lambda: StepPlace(0, "", ""))) as mode, imitate_cuda(seen.record):
        x = mode.from_tensor(torch.empty(6, 32, dtype=torch.bfloat16)).requires_grad_()
        dropped = F.dropout(input=x, p=0.1)
        dropped.backward(torch.empty_like(dropped))
    assert [(one.name, one.num_bytes) for one in seen.operators("forward")] == [("dropout", 6 * 32 * (2 + 2 + 1))] * 2


def test_a_norm_whose_weight_has_another_type_is_its_formula():
    x, w = torch.empty(6, 32, dtype=torch.bfloat16), torch.empty(32)
    with pytest.warns(UserWarning, match="Mismatch dtype"):
        assert kept(lambda x, w: F.rms_norm(x, (32,), w), x, w) > 2 * 6 * 32


def test_attention_over_documents_multiplies_as_with_their_mask():
    """All pairs of positions, forward, and two and a half times that in its backward."""
    with OperatorRecorder() as seen, FakeTensors(Ledger(lambda: StepPlace(0, "", ""))), imitate_cuda():
        q, k = (torch.empty(2, 16, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
        bounds = torch.empty(2, 3, dtype=torch.int64)
        Attention()(q, k, k, bounds).sum().backward()
    forward, backward = (one for one in seen.operators("forward") if one.flops)
    assert forward.flops == 4 * 2 * 4 * 16 * 16 * 8
    assert backward.flops == 2.5 * forward.flops
    assert backward.num_bytes > forward.num_bytes > 2 * 16 * 4 * 8 * 2
