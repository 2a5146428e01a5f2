"""Stands for the device of a fake world that takes steps: tensors on it have shapes, types and storages, and no values."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sley_core.comm.copies import CopyStream, HostMemory
from sley_core.comm.device import Device
from sley_estimate.bytes.fake_copies import FakeCopies
from sley_estimate.bytes.fake_tensors import FakeTensors


@dataclass(frozen=True)
class FakeDevice(Device):
    """Stands for `torch_device`. tensors: makes what lies on it. copies: between it and its host."""

    tensors: FakeTensors = field(kw_only=True)
    copies: FakeCopies = field(kw_only=True)

    def in_use(self) -> AbstractContextManager[object]:
        return self.tensors

    def read(self, values: Tensor, usual: list[float]) -> list[float]:
        return usual

    def move(self, tensor: Tensor) -> Tensor:
        """Returns `tensor` as a fake tensor on the device; one that is fake is returned as it is.

        Its memory counts as new where copies run beside the device's work, as on CUDA, or the device is of another kind than
        the tensor's. On a CPU it is the memory of `tensor`, which is not counted here: a batch counts once for all.
        """
        if isinstance(tensor, FakeTensor):
            return tensor
        if self.torch_device == tensor.device:
            return self.tensors.of(tensor, counts=self.copies.runs_ahead)
        with self.tensors:
            return torch.empty_like(tensor, device=self.torch_device)

    def again(self, memory: Tensor) -> Tensor:
        found = self.tensors.uncounted(memory.numel(), memory.dtype)
        self.tensors.ledger.lies_in(found, memory)
        return found

    def bytes_of(self, memory: Tensor) -> memoryview:
        return memoryview(bytearray(memory.numel()))

    def copy_stream(self) -> CopyStream:
        return self.copies.stream()

    def host_memory(self, num_bytes: int) -> HostMemory:
        return self.copies.memory(num_bytes)
