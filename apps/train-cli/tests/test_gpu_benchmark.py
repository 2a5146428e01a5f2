"""Tests the tiny form of benchmarks/gpu.py, whose usual form needs a device."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="the benchmarks are not part of the sdist")


def tiny_figures() -> list[str]:
    """Runs parts a and f on the CPU. Part a compares the losses of Sley and the plain loop, in fp32, eager and compiled."""
    sys.path.insert(0, str(BENCHMARKS))
    gpu = import_module("gpu")

    work = replace(gpu.TINY_PRETRAINING, compute="fp32", num_rounds=1)
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):  # inductor takes a minute
        figures = [*gpu.compare_with_plain_loop(work, "cpu", False), *gpu.compare_with_plain_loop(work, "cpu", True)]
    return [figure.name for figure in [*figures, *gpu.measure_host_time("cpu", True)]]


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
def test_the_gpu_benchmark_trains_the_same_model_as_its_plain_loop(ranks: Callable[..., Any]) -> None:
    (names,) = ranks(1, init=False)(tiny_figures)
    assert names[-1].startswith("f: the engine's host time")
    for label in ("a, eager", "a, compiled"):
        assert {f"{label}: plain loop", f"{label}: Sley", f"{label}: Sley's speed relative to the plain loop"} <= set(names)
