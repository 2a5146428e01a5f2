"""Reading and writing weights takes little memory beside what is owned: peaks of a process that does nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.data.dataset import DataInfo, Field
from sley_core.model.layers import Model
from sley_core.weight_files.read import WeightFiles
from sley_core.weight_files.write import write_tensors
from sley_models import hf
from sley_models.config import LlamaConfig
from sley_models.hf_config import to_hf_config
from sley_models.llama import layers
from sley_testing.plans import with_values
from sley_testing.ranks import Ranks

MB = 1 << 20
LAYER = 16.8 * MB
"""A block of the model below: 4 x 512 x 512 + 3 x 512 x 2048 numbers of 4 bytes."""

FILE = 40 * MB
SLACK = 12 * MB
"""Python's own, and pages of code that is used for the first time."""

SIZES = LlamaConfig(num_layers=8, hidden=512, heads=8, ffn_hidden=2048, vocab_size=256)
ROWS = Field("int64", sequence_dim=1)
INFO = DataInfo({"tokens": ROWS, "labels": ROWS}, vocab_size=256, sequence=16)


class Ones:
    """Tensors that are made when they are asked for."""

    def __init__(self) -> None:
        self.shapes = hf.shapes(SIZES, 256)
        self.names = list(self.shapes)

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        return "F32", self.shapes[name]

    def tensor(self, name: str) -> Tensor:
        return torch.ones(self.shapes[name])


def status(key: str) -> int:
    """Bytes that the system says under `key`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def peak(work: Callable[[], object]) -> int:
    """By how much memory grows at most while `work` runs; what it returns is kept until then."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    kept = work()
    del kept
    return status("VmHWM") - before


def read(folder: Path, owned: set[str] | None) -> Model:
    config = LlamaConfig.model_validate({"weights": folder})
    model = with_values(lambda data: layers(config, data), owned=owned, info=INFO)
    first = next(iter(model.layers[1].module.parameters()))
    assert first.is_meta == (owned is not None and "blocks.0" not in owned)
    return model


def export(to: Path, source: Any) -> None:
    def config(scratch: Path) -> None:
        (scratch / "config.json").write_text(json.dumps(to_hf_config(SIZES, 256)))

    write_tensors(to, source, [(name, name) for name in source.names], 40 << 20, config)


def measured(folder: Path) -> dict[str, int]:
    """Bytes and number of the files, and the peaks of writing them, of reading a layer and of reading all."""
    export(folder / "hf", Ones())
    read(folder / "hf", {"blocks.3"})  # the first time imports and warms up
    files = list((folder / "hf").glob("*.safetensors"))
    return {
        "total": sum(file.stat().st_size for file in files),
        "files": len(files),
        "write": peak(lambda: export(folder / "again", WeightFiles(folder / "hf"))),
        "layer": peak(lambda: read(folder / "hf", {"blocks.3"})),
        "all": peak(lambda: read(folder / "hf", None)),
    }


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not say how much memory was used")
def test_reading_takes_no_more_than_a_file_and_a_layer_beside_what_is_owned_and_writing_a_layer(tmp_path: Path) -> None:
    (peaks,) = Ranks(1, 300, init=False)(measured, tmp_path)
    assert peaks["total"] > 130e6
    assert peaks["files"] >= 4
    assert peaks["layer"] < FILE + LAYER + SLACK, f"{peaks['layer'] / MB:.0f} MB"
    assert peaks["all"] < peaks["total"] + FILE + LAYER + SLACK, f"{peaks['all'] / MB:.0f} MB"
    assert peaks["write"] < LAYER + SLACK, f"{peaks['write'] / MB:.0f} MB"
