"""Reading and writing weights takes little memory beside what is owned: peaks of a process that does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MB = 1 << 20
LAYER = 16.8 * MB
"""A block of the model below: 4 x 512 x 512 + 3 x 512 x 2048 numbers of 4 bytes."""

FILE = 40 * MB
SLACK = 12 * MB
"""Python's own, and pages of code that is used for the first time."""

PROGRAM = '''
import json, sys
from pathlib import Path
import torch
from sley_core.data.dataset import DataInfo, Field
from sley_core.export.write import write_tensors
from sley_core.model import hf
from sley_core.model.build import build_on_meta
from sley_core.model.config import LlamaConfig
from sley_core.model.hf_config import to_hf_config
from sley_core.model.llama import layers
from sley_core.model.materialize import materialize
from sley_core.weight_files.read import WeightFiles
from sley_core.weight_files.write import FILE_BYTES, Spec, TensorFile

folder = Path(sys.argv[1])
rows = Field("int64", sequence_dim=1)
info = DataInfo({"tokens": rows, "labels": rows}, vocab_size=256, sequence=16)
sizes = dict(num_layers=12, hidden=512, heads=8, ffn_hidden=2048, vocab_size=256)

class Component:
    name = "given"
    def __init__(self, config): self.config = config
    def build(self, data): return layers(self.config, data)

class Ones:
    """Tensors that are made when they are asked for."""
    def __init__(self): self.shapes = hf.shapes(LlamaConfig(**sizes), 256)
    names = property(lambda self: list(self.shapes))
    def kind(self, name): return "F32", self.shapes[name]
    def tensor(self, name): return torch.ones(self.shapes[name])

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

def peak(work):
    """By how much memory grows at most while `work` runs; what it returns is kept until then."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    kept = work()
    del kept
    return status("VmHWM") - before

def read(owned):
    config = LlamaConfig(weights=folder / "hf")
    model = build_on_meta(Component(config), info, 0)
    materialize(model.layers, seed=0, init_weights=None, dtype=torch.float32, device=torch.device("cpu"), owned=owned)
    assert next(iter(model.layers[1].module.parameters())).is_meta == (owned is not None and "blocks.0" not in owned)
    return model

ones = Ones()
def export(to, source):
    def config(scratch):
        (scratch / "config.json").write_text(json.dumps(to_hf_config(LlamaConfig(**sizes), 256)))
    write_tensors(folder / to, source, [(name, name) for name in source.names], 40 << 20, config)
export("hf", ones)
read({"blocks.3"})  # the first time imports and warms up
total = sum(file.stat().st_size for file in (folder / "hf").glob("*.safetensors"))
print(json.dumps({
    "total": total,
    "files": len(list((folder / "hf").glob("*.safetensors"))),
    "write": peak(lambda: export("again", WeightFiles(folder / "hf"))),
    "layer": peak(lambda: read({"blocks.3"})),
    "all": peak(lambda: read(None)),
}))
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Bytes of the files, and the peaks, as a process of its own measures them."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not say how much memory a process had at most")
    folder: Path = tmp_path_factory.mktemp("model")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    peaks: dict[str, int] = json.loads(done.stdout)
    assert peaks["total"] > 200e6
    assert peaks["files"] >= 5
    return peaks


def test_a_rank_that_owns_a_layer_reads_no_more_than_a_file_and_a_layer(found: dict[str, int]) -> None:
    assert found["layer"] < FILE + LAYER + SLACK, f"{found['layer'] / MB:.0f} MB"


def test_a_rank_that_owns_all_needs_no_more_than_a_file_and_a_layer_beside_it(found: dict[str, int]) -> None:
    assert found["all"] < found["total"] + FILE + LAYER + SLACK, f"{found['all'] / MB:.0f} MB"


def test_an_export_needs_no_more_than_a_layer(found: dict[str, int]) -> None:
    assert found["write"] < LAYER + SLACK, f"{found['write'] / MB:.0f} MB"
