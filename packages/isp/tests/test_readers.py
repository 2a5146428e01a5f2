"""Tests that reads of sharded weights and ranks that call different modules are refused by name."""

import copy
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from isp_models import ReadsWeight
from torch import nn

from sley_core.comm.world import World
from sley_core.errors import RunError, SleyError
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import assert_untouched, record_built_models
from sley_testing.runs import running
from sley_trainer.assemble import assemble


def first_errors(plans: list[dict[str, Any]], folder: Path) -> list[tuple[str, str]]:
    """Returns the code and message of the first step's error for each plan."""
    errors = []
    for tables in plans:
        with running(tables, folder) as run, pytest.raises(RunError) as caught:
            run.step()
        errors.append((caught.value.diagnostics[0].code, str(caught.value)))
    return errors


READS: dict[str, Callable[[nn.Linear], Any]] = {
    "linear": lambda linear: F.linear(torch.ones(6, dtype=torch.float64), linear.weight).sum(),
    "norm": lambda linear: linear.weight.norm(),
    "detach": lambda linear: linear.weight.detach().sum(),
    "data": lambda linear: linear.weight.data.sum(),
    "tolist": lambda linear: linear.bias.tolist()[0],
    "__getitem__": lambda linear: linear.bias[0],
    "deepcopy": lambda linear: copy.deepcopy(linear).in_features,
    "view": lambda linear: nn.utils.parameters_to_vector(linear.parameters()).sum(),
    "register_hook": lambda linear: linear.weight.register_hook(print) and 1.0,
    "mul_": lambda linear: linear.weight.mul_(0.5) and 1.0,
}
SIZES: dict[str, Callable[[nn.Linear], Any]] = {
    "shape": lambda linear: linear.weight.shape[0],
    "size": lambda linear: linear.weight.size(0) + linear.bias.size()[0],
    "numel": lambda linear: 1 / sqrt(linear.weight.numel()),
    "len": lambda linear: len(linear.bias),
    "fan": lambda linear: sum(nn.init._calculate_fan_in_and_fan_out(linear.weight)),
    "like": lambda linear: torch.ones_like(linear.weight).sum() + linear.weight.new_ones(3).sum(),
    "count": lambda linear: sum(parameter.numel() for parameter in linear.parameters()),
    "dtype": lambda linear: torch.finfo(linear.weight.dtype).eps * linear.weight.element_size(),
    "to": lambda linear: torch.ones(3).to(linear.weight).sum(),
}


def late_reads(tables: dict[str, Any], folder: Path) -> tuple[dict[str, list[str]], dict[str, float], list[bool]]:
    """The errors of each of READS that begins after a step and an evaluation without it: in both, and by hand; SIZES of the
    linear; and whether its parameters are trained after they were frozen.
    """

    seen: dict[str, list[str]] = {}
    with running(tables, folder) as run:
        run.step()
        run.evaluate()
        linear = next(layer.module for layer in run.layers if layer.name == "reader").linear
        sizes = {name: float(size(linear)) for name, size in SIZES.items()}
        for name, read in READS.items():
            seen[name] = []
            ReadsWeight.reader = staticmethod(read)
            for ask in (run.step, run.evaluate, torch.no_grad()(lambda read=read: read(linear))):
                with pytest.raises(RunError) as caught:
                    ask()
                seen[name].append(str(caught.value))
        ReadsWeight.reader = None
        run.step()
        linear.requires_grad_(False)
        return seen, sizes, [param.trainable for param in run.registry if param.name.startswith("reader.linear")]


def test_late_reads_are_refused_and_sizes_are_unsharded(ranks, sharded, texts):
    """Reads are refused in training, in evaluation, without gradients and by hand."""
    whole = nn.Linear(6, 13, dtype=torch.float64)
    for seen, sizes, trained in ranks(2, 60)(late_reads, sharded(2, run__steps=40, factory="reader"), texts):
        for name, messages in seen.items():
            assert all(f"sharded-weight-read]: `{name}` reads the parameter 'reader.linear." in one for one in messages), (
                messages
            )
        assert sizes == {name: float(size(whole)) for name, size in SIZES.items()}
        assert trained == [False, False]


def test_reads_of_frozen_weights_and_of_tables_are_refused(ranks, sharded, texts):
    """Their shards would have enough elements to continue."""
    plans = [sharded(2, factory="scaled"), sharded(2, weights={"embedding": "hidden"}, factory="reads_table")]
    for errors in ranks(2)(first_errors, plans, texts):
        for (code, message), name in zip(errors, ("scaled.frozen.weight", "embed.table.weight"), strict=True):
            assert code == "sharded-weight-read"
            assert name in message


# -- failed assemblies -------------------------------------------------------------------------------------------------


SPLIT: dict[str, Any] = {"dp": 1, "parallel": {"sp": 2}, "sequence": {"use": "isp.all_to_all"}}


def fail(*args: Any, **more: Any) -> None:
    raise ValueError("the test's failure")


def assembly_errors(plans: list[tuple[dict[str, Any], str]], folder: Path) -> list[str]:
    """Returns the error of each plan's assembly, which fails at the named function if there is one."""
    errors = []
    for tables, place in plans:
        with World.join("cpu") as world, record_built_models() as kept, pytest.MonkeyPatch.context() as patch:
            if place:
                patch.setattr(place, fail)
            with pytest.raises((SleyError, ValueError)) as caught:
                assemble(plan_from_dict(tables, folder), world)
            ((model, traces),) = kept
            assert_untouched(traces, model.layers)
            errors.append(caught.value.diagnostics[0].code if isinstance(caught.value, SleyError) else str(caught.value))
    return errors


def test_failed_assemblies(ranks, texts, sharded):
    """The patched attention, the communicator, its `attach` or a later function raises the error."""
    sequence = {"use": "isp.all_to_all", "modules": ["*.attention", "no"]}
    cases = [
        (sharded(1, 1, parallel={"sp": 2}, sequence=sequence), "", "sequence-attention"),
        (sharded(2, weights={"launch": "nowhere"}, **SPLIT), "", "launch-point"),
        (sharded(2, weights={"groups": [{"match": "nowhere"}]}, **SPLIT), "", "group-unmatched"),
        (sharded(2, **SPLIT), "sley_trainer.assemble.build_samples", "the test's failure"),
    ]
    columns = sharded(2, weights={"head": "vocabulary", "embedding": "hidden"})
    for place in ("communicator.StandIn.replace", "reduce_scatter.GradientReducer.register", "communicator.prefetch_points"):
        cases.append((columns, f"sley_isp.{place}", "the test's failure"))
    errors = [error for _, _, error in cases]
    assert ranks(2, 120)(assembly_errors, [(tables, place) for tables, place, _ in cases], texts) == [errors, errors]
