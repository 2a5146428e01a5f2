"""What plugins add to a row is the same number on every rank and in every layout."""

from __future__ import annotations

import math

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.parts import StepNumbers
from sley_core.plan.load import plan_from_dict

NORMS = [{"use": "core.each"}, {"use": "core.gradient_norms"}]


def rows_and_norms(tables, folder, steps=2):
    """The rows of some steps, and the norms of their gradients as autograd's accumulated ones have them."""
    found = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for _ in range(steps):
            row = run.step()
            own = {param.name: run.store.gradient(param).double().norm().item() for param in run.registry.trainable}
            found.append((row, own))
    return found


def test_the_norm_of_each_gradient_is_in_the_row_and_adds_up_to_that_of_all(small, own):
    (row, norms), (second, _) = rows_and_norms(small(gradient_handlers=NORMS), own)
    assert norms
    for name, norm in norms.items():
        assert row[f"gradient_norm/{name}"] == pytest.approx(norm, rel=1e-12)
    assert math.hypot(*norms.values()) == pytest.approx(row["grad_norm"], rel=1e-12)
    assert row != second


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_ranks_have_the_rows_of_one_process(ranks, small, own, clip):
    tables = small(gradient_handlers=NORMS, optimizer__clip_norm=clip) if clip else small(gradient_handlers=NORMS)
    one = [row for row, _ in rows_and_norms(tables, own)]
    for rank in ranks(2)(rows_and_norms, tables, own):
        for before, (after, _) in zip(one, rank, strict=True):
            names = [name for name in before if "/" in name or name in ("loss", "grad_norm")]
            assert len(names) > 3
            assert {name: after[name] for name in names} == pytest.approx({name: before[name] for name in names})


def test_they_are_those_of_unscaled_gradients_in_fp16(small, own):
    tables = small(gradient_handlers=NORMS, precision={"compute": "fp16"})
    (row, norms), *_ = rows_and_norms(tables, own, steps=1)
    assert math.hypot(*norms.values()) == pytest.approx(row["grad_norm"], rel=1e-6)
    for name, norm in norms.items():
        assert row[f"gradient_norm/{name}"] == pytest.approx(norm, rel=1e-6)


def test_a_frozen_parameter_has_none_until_it_is_trained_again(small, own, alone):
    with alone(small(gradient_handlers=NORMS)) as run:
        param = run.registry.trainable[0]
        before = run.step()[f"gradient_norm/{param.name}"]
        param.parameter.requires_grad_(False)
        during = run.step()[f"gradient_norm/{param.name}"]
        param.parameter.requires_grad_(True)
        after = run.step()[f"gradient_norm/{param.name}"]
    assert before > 0
    assert during == 0
    assert after > 0


def of_some_ranks(tables, folder):
    """Rank 1 alone adds a number, both another."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        numbers = StepNumbers(run.groups)
        if world.rank == 1:
            numbers.add("own/second", lambda: torch.tensor(9.0), of="root")
        numbers.add("own/both", lambda: world.rank + 1.0)
        numbers.agree()
        values = numbers.own(torch.device("cpu"))
        torch.distributed.all_reduce(values)
        return numbers.names, numbers.row(values.tolist())


def test_a_number_of_some_ranks_is_one_of_all(ranks, small, own):
    names = ("own/both", "own/second")
    assert ranks(2)(of_some_ranks, small(), own) == [(names, {"own/both": 3.0, "own/second": 3.0})] * 2


def correct(tables, folder):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        return [run.step()["own/correct"] for _ in range(3)]


def test_a_loss_adds_numbers_of_its_own(ranks, small, own):
    tables = small(loss={"factory": "own_losses:Counted"})
    one = correct(tables, own)
    assert sum(one) > 0
    assert ranks(2)(correct, tables, own) == [one] * 2
