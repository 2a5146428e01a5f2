"""Compiled layers exchange as others do: the graph breaks around an exchange."""

from __future__ import annotations

import shutil
import warnings

import pytest

from sley_testing.runs import record

NEEDS_COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")

PLAN = {
    "run": {"name": "compiled", "steps": 2, "device": "cpu"},
    "model": {"use": "models.llama", "num_layers": 1, "hidden": 16, "heads": 4, "kv_heads": 2},
    "data": {"use": "data.text", "source": "python-stdlib", "sequence": 16, "documents": "cut"},
    "batch": {"global_size": 1, "micro_size": 1},
    "optimizer": {"use": "core.sgd", "lr": 0.1},
    "sequence": {"use": "isp.all_to_all"},
}


def quietly(tables):
    """torch's compiler warns about itself, and would start processes of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._inductor.config as inductor  # loads the compiler

        inductor.compile_threads = 1
        return record(tables, 2)


@pytest.mark.campaign
@NEEDS_COMPILER
def test_a_compiled_model_on_slices(ranks):
    plain = record(PLAN, 2)
    tables = PLAN | {"model": PLAN["model"] | {"compile": True}, "parallel": {"sp": 2, "dp": 1}}
    for layout in ranks(2, 240)(quietly, tables):
        for name in ("loss", "grad_norm"):
            assert [row[name] for row in layout.rows] == pytest.approx([row[name] for row in plain.rows], rel=1e-5)
