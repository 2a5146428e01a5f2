"""Copies from the memory of a process, of any length, in as many calls as the system takes for them."""

from __future__ import annotations

import os

import pytest
import torch

from sley_cma import process_vm
from sley_cma.process_vm import MemorySpan, read
from sley_testing.collectives import can_read_peers

pytestmark = pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")


def long_spans() -> None:
    """Copies longer than one call moves, of several spans, cut anywhere; a call is told to move 1000 bytes at most."""
    process_vm.MOST_BYTES = 1000
    lengths = [1, 999, 0, 1000, 4321, 7, 1993]
    source = [torch.randint(256, (length,), dtype=torch.uint8) for length in lengths]
    target = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    here = [MemorySpan(one.data_ptr(), one.numel()) for one in target]
    there = [MemorySpan(one.data_ptr(), one.numel()) for one in source]
    assert read(os.getpid(), here, there) == sum(lengths)
    assert all(map(torch.equal, source, target))
    assert read(os.getpid(), here, [*there[:-1], MemorySpan(8, lengths[-1])]) == -1


def test_copies_longer_than_one_call_moves(monkeypatch):
    monkeypatch.setattr(process_vm, "MOST_BYTES", process_vm.MOST_BYTES)
    long_spans()
