"""Computes numbers by which ranks find out which of their memory is equal, without moving it.

The number is the sum of all 32-bit words, each times an odd number that is drawn for its place, modulo 2^64. One word that
differs always changes it; words, rows or blocks in other places, and any other difference, pass with a chance of 2^-31 at most.
Words of 64 bits would not do: two that differ in their highest bit, as a number's sign, could change places unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WIDTH = 1024
"""Words in a row."""

CHUNK = {"cpu": 64, "cuda": 3072}
"""Rows that are multiplied at a time: on a CPU the products stay in its cache; on CUDA they are 24 MiB: a device is faster
with 1024 rows than the host starts them (35 ms for 4.5 GiB on an H200).
"""


def fingerprints(memories: Sequence[Tensor]) -> list[int]:
    """Returns a number for each of `memories`, which differs, but for a chance of 2^-31, where their bytes do. Waits for the
    device.

    memories: uint8 [bytes], of one device, each starting at a multiple of 4 bytes.
    """
    if not memories:
        return []
    most_rows = max(memory.numel() // 4 // WIDTH for memory in memories)
    # Once for all of them: many small pieces would otherwise cost more operations than bytes.
    drawn = _drawn(WIDTH + max(most_rows, WIDTH + 2) + 1, memories[0].device)
    prints: list[int] = torch.stack([_fingerprint(memory, drawn) for memory in memories]).tolist()
    return prints


def _fingerprint(memory: Tensor, drawn: Tensor) -> Tensor:
    """Returns the fingerprint of a memory, an int64 scalar on the device. drawn: the numbers of the places in a row, then those
    of rows and of the rest.
    """
    of_places, of_rest = drawn[:WIDTH], drawn[WIDTH:]
    num_words = memory.numel() // 4
    words = memory[: num_words * 4].view(torch.int32)
    num_rows = num_words // WIDTH
    sums = []
    if num_rows:
        table = words[: num_rows * WIDTH].view(num_rows, WIDTH)
        sums = [(rows * of_places).sum(1) for rows in torch.split(table, CHUNK.get(memory.device.type, CHUNK["cuda"]))]
    tail = words[num_rows * WIDTH :].long()
    if memory.numel() % 4:
        tail = torch.cat([tail, memory[num_words * 4 :].long()])
    last = (tail * of_rest[: tail.numel()]).sum().reshape(1)
    return (torch.cat([*sums, last]) * of_rest[: num_rows + 1]).sum()


def _drawn(count: int, device: torch.device) -> Tensor:
    """Returns odd numbers that look like chance, int64 [count]: those of SplitMix64."""
    found = torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # a shift that fills with zeros; torch's fills with the sign
        found = (found ^ ((found >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return found | 1


def _signed(number: int) -> int:
    """Returns the int64 with the bits of `number`."""
    return number - (1 << 64) if number >= 1 << 63 else number
