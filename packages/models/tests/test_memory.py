"""Weights are read and written one layer at a time, so a rank needs little memory besides its own layers."""

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
from sley_models.hf import hf_name, list_param_shapes
from sley_models.hf_config import to_hf_config
from sley_models.llama import build_llama
from sley_models.plugin import LlamaConfig
from sley_testing.plans import build_model_with_values
from sley_testing.ranks import Ranks

MB = 1 << 20
LAYER = 16.8 * MB  # 4 x 512 x 512 + 3 x 512 x 2048 elements of 4 bytes
FILE = 40 * MB
SLACK = 12 * MB  # for Python, and for pages of code that runs for the first time
SIZES = LlamaConfig(num_layers=8, hidden=512, heads=8, ffn_hidden=2048, vocab_size=256)
ROWS = Field("int64", sequence_dim=1)
INFO = DataInfo({"tokens": ROWS, "labels": ROWS}, vocab_size=256, sequence=16)


class Ones:
    """A source of tensors that creates each tensor when it is read."""

    def __init__(self) -> None:
        self.shapes = {hf_name(name): shape for name, shape in list_param_shapes(SIZES, 256).items()}
        self.names = list(self.shapes)

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        return "F32", self.shapes[name]

    def tensor(self, name: str) -> Tensor:
        return torch.ones(self.shapes[name])


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def peak_growth(function: Callable[[], object]) -> int:
    """Returns the peak growth of this process's memory while `function` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    start = status_bytes("VmRSS")
    result = function()
    del result
    return status_bytes("VmHWM") - start


def read_layers(folder: Path, owned: set[str] | None) -> Model:
    """Builds the model with values of the layers `owned`, or of all."""
    config = LlamaConfig.model_validate({"weights": folder})
    return build_model_with_values(lambda data: build_llama(config, data), owned=owned, info=INFO)


def write_files(folder: Path, source: Any) -> None:
    def write_config(scratch: Path) -> None:
        (scratch / "config.json").write_text(json.dumps(to_hf_config(SIZES, 256)))

    write_tensors(folder, source, [(name, name) for name in source.names], int(FILE), write_config)


def measure_peaks(folder: Path) -> dict[str, int]:
    """Returns the peaks of writing, of reading one layer and of reading all, and the size of the files."""
    write_files(folder / "first", Ones())
    read_layers(folder / "first", {"blocks.3"})  # imports what is needed
    files = list((folder / "first").glob("*.safetensors"))
    return {
        "size": sum(file.stat().st_size for file in files),
        "write": peak_growth(lambda: write_files(folder / "second", WeightFiles(folder / "first"))),
        "one": peak_growth(lambda: read_layers(folder / "first", {"blocks.3"})),
        "all": peak_growth(lambda: read_layers(folder / "first", None)),
    }


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not report peak memory")
def test_reading_needs_a_file_and_a_layer_and_writing_a_layer(tmp_path: Path) -> None:
    (peaks,) = Ranks(1, 300, init=False)(measure_peaks, tmp_path)
    assert peaks["size"] > 130e6
    assert peaks["one"] < FILE + LAYER + SLACK, f"{peaks['one'] / MB:.0f} MB"
    assert peaks["all"] < peaks["size"] + FILE + LAYER + SLACK, f"{peaks['all'] / MB:.0f} MB"
    assert peaks["write"] < LAYER + SLACK, f"{peaks['write'] / MB:.0f} MB"
