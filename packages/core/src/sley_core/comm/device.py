"""What differs between devices, in one place instead of in `if`s across the tree.

`cuda` is CUDA and NCCL, `cpu` is gloo, `meta` is a fake world: shapes without memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sley_core.errors import RunError

BACKENDS = {"cuda": "nccl", "cpu": "gloo", "meta": "fake"}


@dataclass(frozen=True)
class Device:
    """The device of this rank: `Device.pick("auto", local_rank)`."""

    torch_device: torch.device

    @classmethod
    def pick(cls, name: str, local_rank: int = 0) -> Device:
        """`name`: auto (CUDA if there is a device for this local rank), cpu or cuda.

        Raises RunError `no-device` when CUDA is asked for and this local rank has none.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if name == "auto":
            name = "cuda" if local_rank < count else "cpu"
        if name == "cpu":
            return cls(torch.device("cpu"))
        if count == 0:
            raise RunError("no-device", 'the plan asks for device = "cuda", but torch finds no CUDA device')
        device = torch.device("cuda", local_rank % count)
        torch.cuda.set_device(device)
        return cls(device)

    @property
    def type(self) -> str:
        return self.torch_device.type

    @property
    def backend(self) -> str:
        """The communication backend of this device's groups."""
        return BACKENDS[self.type]

    @property
    def is_real(self) -> bool:
        """Whether tensors on it have memory."""
        return self.type != "meta"

    @property
    def is_async(self) -> bool:
        """Whether work is queued on a stream, so that reading a scalar at once would stall it."""
        return self.type == "cuda"

    def seed(self, seed: int) -> None:
        """Seeds the generators from which a forward on this device draws; cheap enough for every layer."""
        torch.default_generator.manual_seed(seed)
        if self.type == "cuda":
            torch.cuda.default_generators[self.torch_device.index].manual_seed(seed)

    def move(self, tensor: Tensor) -> Tensor:
        """`tensor` on this device, without waiting for the copy where the host memory is pinned."""
        return tensor if tensor.device == self.torch_device else tensor.to(self.torch_device, non_blocking=True)

    def __str__(self) -> str:
        if self.type == "cuda":
            return f"{self.torch_device} ({torch.cuda.get_device_name(self.torch_device)})"
        return str(self.torch_device)
