"""Whole runs: contracts of the handlers, runs that must not change a bit, compiled layers, unused parameters, large worlds."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import ClassVar

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.call import Keep, compile_layers, count_graphs, recompile_reasons
from sley_core.model.layers import Layer
from sley_core.plan.load import plan_from_dict
from sley_core.plan.tables import CompileConfig
from sley_testing.contract import GradientHandlerContract
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import assert_equal_replicas, assert_parity, record


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


@pytest.mark.sample(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("global_size", [2, 6])
def test_what_one_rank_uses_is_summed_with_the_zeros_of_the_other(ranks, own, small, recompute, global_size):
    """Samples go to ranks in halves: of 2 rank 0 has an even one and rank 1 an odd one, of 6 both have both kinds."""
    tables = small(
        model={"factory": "own_models:model", "options": {"kind": "Branch"}},
        batch={"global_size": global_size, "micro_size": 1},
        data__shuffle=False,
        activations={"use": "core.recompute" if recompute else "core.keep"},
    )
    reference = record(tables, 4, folder=own)
    layouts = ranks(2)(record, tables, 4, folder=own)
    assert_parity(reference, layouts, "fp64")
    assert_equal_replicas(layouts)
    for found in layouts:
        for wanted, gradients in zip(reference.gradients, found.gradients, strict=True):
            assert_close_gradients(wanted, gradients, 1e-10, floor=1e-12)
            assert gradients["blocks.0.even.weight"].any()
            assert gradients["blocks.0.odd.weight"].any()
            assert not gradients["blocks.0.never.weight"].any()
    for name, value in reference.first.items():
        assert torch.equal(value, reference.weights[name]) == (".never." in name)


LARGE = {
    "run": {"name": "fake", "steps": 1},
    "model": {"use": "models.llama", "num_layers": 4, "hidden": 1024, "heads": 8},
    "data": {"use": "data.text", "source": "python-stdlib", "sequence": 64},
    "batch": {"global_size": 256, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 1e-3},
}


def test_every_rank_of_a_large_world_is_assembled_without_memory_for_a_parameter():
    tables, size = set(), 4
    for rank in range(size):
        with World.fake(rank, size) as world, assemble(plan_from_dict(LARGE), world) as run:
            assert run.registry.num_parameters > 50_000_000
            assert all(param.parameter.is_meta for param in run.registry)
            assert all(buffer.data.is_meta for buffer in run.store.buffers)
            assert run.rows == slice(256 // size * rank, 256 // size * (rank + 1))
            assert run.groups["stage"].ranks == tuple(range(size))
            tables.add(tuple((axis, group.size, tuple(group.channels)) for axis, group in run.groups.items()))
    assert len(tables) == 1
    assert not torch.distributed.is_initialized()
    with World.fake(0, 3) as world, pytest.raises(Exception, match="a multiple of dp x micro_size = 3 x 2 = 6, but is 256"):
        assemble(plan_from_dict(LARGE), world)
