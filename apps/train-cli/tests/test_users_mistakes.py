"""A mistake in the user's model or data is one error with its place, and not reported as a bug in Sley."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train_cli.faults import Fault

pytestmark = pytest.mark.timeout(120)

Cli = Callable[..., Any]
Own = Callable[..., Path]

LAYERS = """
    from torch import nn

    class Embed(nn.Embedding):
        def forward(self, tokens):
            return super().forward(tokens)

    def layers():
        return [Embed(256, 32), {more}]
"""

DATA = """
    import torch
    from torch import nn

    class Data:
        def __len__(self):
            return {length}

        def __getitem__(self, index):
            sample = {{"input": torch.zeros(8, dtype=torch.int64), "labels": torch.ones(8, dtype=torch.int64)}}
            {action}
            return sample

    def data():
        return Data()

    def layers():
        return [nn.Embedding(256, 256)]
"""

FIELDS = """[data]
factory = "own:data"
fields.input = {dtype = "int64"}
fields.labels = {dtype = "int64"}
"""


def data_set(length: str, action: str) -> str:
    return DATA.format(length=length, action=action)


MISTAKES: dict[str, tuple[str, tuple[str, ...]]] = {
    "wrong shapes": (
        LAYERS.format(more="nn.Linear(32, 64), nn.Linear(32, 256)"),
        (
            "error[own-code]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x64 and 32x256)",
            "in layer `2` (Linear) in microbatch 0, called with float32 [1, 16, 64]",
        ),
    ),
    "too few classes": (
        LAYERS.format(more="nn.Linear(32, 8)"),
        ("error[label-out-of-range]", "labels must be classes from 0 to 7"),
    ),
    "None as a sample": (data_set("8", "return None"), ("is a NoneType, not a dict of tensors",)),
    "a negative length": (
        data_set("-8", "pass"),
        ("the length of `own:data` failed: ValueError: __len__() should return >= 0",),
    ),
    "a fractional length": (data_set("8.5", "pass"), ("the length of `own:data` failed: TypeError: 'float' object",)),
    "StopIteration": (data_set("8", "raise StopIteration"), ("of the dataset failed: StopIteration",)),
    "SystemExit": (data_set("8", "raise SystemExit(7)"), ("of the dataset failed: SystemExit: 7",)),
    "an error": (data_set("8", "torch.zeros(2) @ torch.zeros(3)"), ("of the dataset (hint: the error is in your code",)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_model_or_in_data_is_one_line(cli: Cli, own_model: Own, mistake: str) -> None:
    source, messages = MISTAKES[mistake]
    path = own_model(source, data=FIELDS) if "def data" in source else own_model(source)
    result = cli("run", path, "--set", "parallel.dp=1")
    assert result.code in (1, 3), result.err
    (line,) = [line for line in result.err.splitlines() if "error[" in line]
    assert "bug in Sley" not in line
    assert all(message in line for message in messages), line


def test_a_step_with_too_many_actions_is_refused(cli: Cli, plan: Path) -> None:
    pipeline = ("parallel.dp=1", "parallel.pp=2", 'pipeline={use="pp.one_f_one_b"}')
    for change in (("batch.global_size=1000000",), ("parallel.pp=1000000",)):
        result = cli("check", plan, changes=(*pipeline, *change))
        assert result.code == 3
        assert "error[schedule-too-long]: a step must have at most" in result.err


ALLOCATION_ERROR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError(ALLOCATION_ERROR), "out-of-memory"),
        (MemoryError(), "out-of-memory"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "torch-broken"),
        (ImportError("libcudart.so.12: cannot open shared object file", name="torch._C"), "torch-broken"),
        (OSError(28, "No space left on device"), "cannot-write"),
        (OSError(30, "Read-only file system", "runs/a/plan.toml"), "cannot-write"),
        (KeyError("ours"), "internal-error"),
    ],
)
def test_errors_of_the_machine_have_codes(error: Exception, code: str) -> None:
    (diagnostic,) = Fault.of(error).diagnostics
    assert diagnostic.code == code
