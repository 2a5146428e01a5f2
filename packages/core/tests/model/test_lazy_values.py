"""Once a run has begun, a rank has the memory of what it owns; builders never take more than that and a layer."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field
from sley_core.model.build import build_on_meta
from sley_core.model.layers import Model
from sley_core.model.values import HostModel
from sley_testing.ranks import Ranks

COUNT, SIZE = 16, 1024
"""Layers, of one weight of 4 MiB each."""

OWNED = {"2", "3", "4", "5"}
_MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""


class Part(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


class Drawn(Part):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.linear.weight = nn.Parameter(torch.randn(size, size) * 0.02)


@dataclass
class Given:
    """Stands for a plan's model. kind: where its weights come from."""

    kind: str
    size: int
    file: Path
    name: str = "given"

    def build(self, _: DataInfo) -> Any:
        if self.kind == "builders":
            return [(str(at), partial(Drawn, self.size)) for at in range(COUNT)]
        parts = [(Drawn if self.kind == "drawn" else Part)(self.size) for _ in range(COUNT)]
        if self.kind in ("file", "assigned"):
            state = torch.load(self.file, mmap=True)
            for at, part in enumerate(parts):
                own = state[str(at)]
                value = own if self.kind == "assigned" else own.bfloat16().float() * 2
                part.load_state_dict({"linear.weight": value}, assign=self.kind == "assigned")
        return parts


def mib(key: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) / 1024


def run(given: Any) -> tuple[Model, float, float, float]:
    """The model, and by how many MiB this process has grown once it is built, once it has values, and at most meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")
    before, resident = mib("RssAnon"), mib("VmRSS")
    model = build_on_meta(given, DataInfo({"tokens": Field("int64")}, 32), 0)
    built = mib("RssAnon") - before
    host = HostModel(model)
    host.drop_others(host.place(OWNED, dtype=torch.float32, device=torch.device("cpu")), OWNED)
    del host
    return model, built, mib("RssAnon") - before, mib("VmHWM") - resident


def growth(file: Path) -> dict[str, tuple[float, float, float]]:
    """What `run` measures of each kind, in a process that does nothing else."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)  # holes of the heap are no tensors
    run(Given("constructors", 8, file))  # what the first time of anything costs
    found: dict[str, tuple[float, float, float]] = {}
    for kind in ("constructors", "drawn", "file", "assigned", "builders"):
        model, *found[kind] = run(Given(kind, SIZE, file))  # type: ignore[assignment]
        assert all(layer.module.linear.weight.is_meta != (layer.name in OWNED) for layer in model)
        del model
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_rank_holds_what_it_owns(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    """64 MiB of weights, of which this rank owns a quarter; what it holds besides is one or two tensors of 4 MiB."""
    file = tmp_path / "file.pt"
    torch.save({str(at): torch.full((SIZE, SIZE), float(at)) for at in range(COUNT)}, file)
    (found,) = ranks(1, init=False, fresh=True)(growth, file)
    assert list(found) == ["constructors", "drawn", "file", "assigned", "builders"]
    for kind, (built, after, _) in found.items():
        assert built < 24, f"{kind}: MiB; nothing but what is under way"
        assert 16 <= after < 40, f"{kind}: MiB; 16 are its own"
    assert found["builders"][2] < 40, "MiB; a builder of another rank was called for values"
