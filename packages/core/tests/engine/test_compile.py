"""`[model] compile = true` changes how fast the numbers come, not what they are."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from sley_core.testing.parity import assert_close_gradients
from sley_core.testing.runs import record

NEEDS_COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_a_compiled_run_equals_one_that_is_not(own, small, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config = torch._inductor.config
    monkeypatch.setattr(config, "compile_threads", 1)  # no processes of its own
    tables = small(
        model__options={"num_blocks": 1},
        precision__compute="fp32",
        batch__micro_size=2,
    )
    plain = record(tables, 3, folder=own)
    counters.clear()
    tables["model"]["compile"] = True
    compiled = record(tables, 3, folder=own)
    # Three layers, whatever the number of micro-batches and steps.
    assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"]
    assert_close_gradients(plain.weights, compiled.weights, 1e-5)
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in compiled.rows] == pytest.approx([row[name] for row in plain.rows], rel=1e-5)
