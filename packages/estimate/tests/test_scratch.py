"""What operators of several types take inside themselves is what the allocator of a CPU says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.bytes.ledger import Ledger, StepPlace
from sley_estimate.bytes.recipes import Recipes
from sley_testing.live_bytes import memory_profile, peak_bytes

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
    tensors = FakeTensors(ledger, Recipes())
    fakes = [tensors.of(one) for one in given]
    for fake in fakes:
        fake.constant = None  # of no values, as activations are
    for _ in range(2):  # asked, and remembered
        operate(*fakes)
    assert ledger.peak()[0] == pytest.approx(peak_bytes(profile), abs=NUMBERS)
