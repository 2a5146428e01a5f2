"""`[model] compile = true` changes how fast the numbers come, not what they are.

Here with the graphs as they are, without a compiler behind them; test_llama.py has layers that inductor compiled.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from sley_testing.parity import assert_close_gradients
from sley_testing.runs import record


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_a_compiled_run_equals_one_that_is_not(own, small, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    tables = small(model__options={"num_blocks": 1}, precision__compute="fp32", batch__micro_size=2)
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


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_layers_that_a_factory_compiled_are_given_what_their_own_forwards_name(own, small):
    plain = record(small(model__options={"num_blocks": 2}), 2, folder=own)
    compiled = record(small(model={"factory": "own_models:compiled"}), 2, folder=own)
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in compiled.rows] == pytest.approx([row[name] for row in plain.rows], rel=1e-9)
