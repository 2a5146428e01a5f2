"""What a factory gives a model costs a rank the memory of what it owns, and files stay on disk until then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch
from torch import nn
from sley_core.data.dataset import DataInfo, Field
from sley_core.model.build import build_on_meta
from sley_core.model.materialize import materialize

COUNT = 16  # of 4 MiB each

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, bias=False)
    def forward(self, tokens): ...

class Drawn(Part):
    def __init__(self):
        super().__init__()
        self.linear.weight = nn.Parameter(torch.randn(SIZE, SIZE) * 0.02)

def layers():
    parts = [Drawn() if kind == "drawn" else Part() for _ in range(COUNT)]
    if kind == "file":
        state = torch.load(path, mmap=True)
        for at, part in enumerate(parts):
            part.load_state_dict({"linear.weight": state[str(at)].bfloat16().float() * 2})
    if kind == "assigned":
        state = torch.load(path, mmap=True)
        for at, part in enumerate(parts):
            part.load_state_dict({"linear.weight": state[str(at)]}, assign=True)
    return parts

def held():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) / 1024

class Given:
    name = "given"
    def build(self, data): return layers()

def run():
    before = held()
    model = build_on_meta(Given(), DataInfo({"tokens": Field("int64")}, 32), 0)
    built = held() - before
    materialize(model.layers, seed=0, dtype=torch.float32, device=torch.device("cpu"), owned=owned)
    return model, built, held() - before

path, owned = sys.argv[1], set(sys.argv[2:])
kind, SIZE = "constructors", 8
run()  # what the first time of anything costs
SIZE = 1024
for kind in ("constructors", "drawn", "file", "assigned"):
    model, built, after = run()
    assert all(layer.module.linear.weight.is_meta != (layer.name in owned) for layer in model)
    print(kind, built, after)
    model = None
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_rank_holds_what_it_owns(tmp_path: Path) -> None:
    """64 MiB of weights, of which this rank owns a quarter; what it holds besides is one or two tensors of 4 MiB."""
    import torch

    torch.save({str(at): torch.full((1024, 1024), float(at)) for at in range(16)}, tmp_path / "file.pt")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file.pt"), "2", "3", "4", "5"]
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # holes of the heap are no tensors
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    kinds = [line.split() for line in done.stdout.splitlines()]
    assert [kind for kind, *_ in kinds] == ["constructors", "drawn", "file", "assigned"]
    for kind, built, after in kinds:
        assert float(built) < 24, f"{kind}: MiB; nothing but what is under way"
        assert 16 <= float(after) < 40, f"{kind}: MiB; 16 are its own"
