"""Whole runs: contracts of the handlers, runs that must not change a bit, compiled layers, unused parameters, large worlds."""

from contextlib import ExitStack
from functools import partial
from typing import ClassVar

import pytest
import torch

from sley_core.engine.call import Keep, compile_layers, count_graphs, recompile_reasons
from sley_core.model.layers import Layer
from sley_core.plan.tables import CompileConfig
from sley_testing.contract import GradientHandlerContract
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import record


class TestEach(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "core.each"}


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_a_compiled_run_equals_one_that_is_not(own, small, monkeypatch):
    from torch._dynamo.utils import counters  # a second, which every process that collects tests would need

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    tables = small(model__options={"num_blocks": 1}, precision__compute="fp32", batch__micro_size=2)
    plain = record(tables, 3, folder=own)
    counters.clear()
    tables["model"]["compile"] = True
    compiled = record(tables, 3, folder=own)
    # Three layers, whatever the number of microbatches and steps.
    assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"]
    assert_close_gradients(plain.weights, compiled.weights, 1e-5)
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in compiled.rows] == pytest.approx([row[name] for row in plain.rows], rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_each_shape_of_a_layer_is_compiled_and_recompilations_have_reasons(own, monkeypatch):
    """There are more shapes than the eight after which torch's compiler gives up by default."""
    from own_models import Head

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    layers, num_before = [Layer(str(width), Head(width, 3)) for width in range(2, 12)], count_graphs()
    with ExitStack() as undo:
        compile_layers(layers, CompileConfig(), Keep(), undo)
        for _ in range(2):
            for layer in layers:
                layer.module(torch.ones(5, layer.module.in_features))
        assert count_graphs() - num_before == len(layers)
        reasons = recompile_reasons()
        assert all("size mismatch" in reason for reason in list(reasons.values())[1 - len(layers) :])
        with torch.no_grad():
            layers[0].module(torch.ones(5, 2))
    assert count_graphs() - num_before == len(layers) + 1
    assert recompile_reasons() == reasons, "an evaluation has graphs of its own"
