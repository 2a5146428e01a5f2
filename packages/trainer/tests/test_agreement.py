"""Ranks that do not do alike what they must do alike: one error on all of them, that says who does what, before any sum."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.comm.world import Group, World
from sley_core.engine.agreement import difference_term
from sley_core.errors import RunError
from sley_core.model.tensors import CHUNK_WORDS, fingerprint
from sley_core.plan.load import plan_from_dict
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

Change = Callable[[Run, bool], Any]


def freeze(*names: str) -> Change:
    """On one rank only: what is trained there is frozen, and the other way round."""

    def change(run: Run, is_odd: bool) -> None:
        for name in names if is_odd else ():
            parameter = run.registry[name].parameter
            parameter.requires_grad_(not parameter.requires_grad)

    return change


def other_value(run: Run, is_odd: bool) -> None:
    if is_odd:
        with torch.no_grad():
            run.registry["blocks.1.inner.weight"].parameter[0, 0] += 1e-9


def differing(tables: dict[str, Any], folder: Path) -> list[str]:
    """What each case says on this rank, the one before it over; and that a run goes on where all ranks change alike."""
    said = []
    cases: list[tuple[int, Change]] = [
        (0, freeze("head.bias")),
        (1, freeze("head.bias", "blocks.0.inner.weight")),
        (0, other_value),
        (1, lambda run, is_odd: is_odd and run.evaluate()),
        (2, lambda run, is_odd: is_odd and run.load_weights({})),
    ]
    with World.join("cpu") as world:
        for num_steps, change in cases:
            with assemble(plan_from_dict(tables, folder), world) as run:
                for _ in range(num_steps):
                    run.step()
                before = [param.parameter.detach().clone() for param in run.registry]
                with pytest.raises(RunError) as caught:  # noqa: PT012
                    change(run, world.rank == world.size - 1)
                    run.step()
                if change is not other_value:
                    assert all(torch.equal(was, param.parameter) for was, param in zip(before, run.registry, strict=True))
                said.append(str(caught.value))
    return said


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [3, 2])
def test_ranks_that_differ_are_told_alike(ranks, small, own, size):
    tables = small(batch__global_size=6, evaluation={"every": 10, "steps": 1}, parallel={"dp": size})
    found = ranks(size)(differing, tables, own)
    assert all(said == found[0] for said in found)
    odd = size - 1
    frozen, two, value, evaluated, loaded = found[0]
    assert all("ranks-differ" in said for said in found[0])
    assert f"head.bias is trained on rank 0, but frozen on rank {odd}\n" in frozen
    assert "(1 more parameters differ)" in two
    assert f"first values differ between rank 0 and rank {odd}: blocks.1.inner.weight\n" in value
    assert f"rank {odd} starts an evaluation, but rank 0 starts step 2" in evaluated
    assert f"rank {odd} starts loading weights, but rank 0 starts step 3" in loaded


PAIRS = {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}


@pytest.mark.parametrize(
    ("numbers", "groups"),
    [
        ((7, 7, 9, 9), dict.fromkeys(range(4), (0, 1, 2, 3))),
        ((4, 3, 5, 4), dict.fromkeys(range(4), (0, 1, 2, 3))),
        ((11, 13, 13, 11), PAIRS),  # the replicas' samples are swapped on their second stages
    ],
)
def test_what_differs_in_one_place_is_not_made_up_for_in_another(numbers, groups):
    def total(numbers: tuple[int, ...]) -> int:
        return sum(
            difference_term(Group("pp", ranks, rank, {}), number)
            for (rank, ranks), number in zip(sorted(groups.items()), numbers, strict=True)
        )

    assert total(numbers) != 0
    assert total((5, 6, 5, 6) if groups is PAIRS else (5, 5, 5, 5)) == 0


def test_a_fingerprint_sees_values_and_places():
    """Over more than one chunk; equal values in other memory have the same."""
    values = torch.randn(CHUNK_WORDS * 2 + 101, generator=torch.Generator().manual_seed(0))
    swapped = values.clone()
    swapped[[0, -1]] = swapped[[-1, 0]]
    changed = values.clone()
    changed[-1] = -changed[-1]
    assert fingerprint(values) == fingerprint(values.clone())
    assert len({int(fingerprint(value)) for value in (values, swapped, changed)}) == 3
    rows = torch.eye(4, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert fingerprint(rows) != fingerprint(rows.flip(0)), "rows of equal sums"
    assert fingerprint(signs) != fingerprint(-signs)
    assert fingerprint(values[:-1].view(-1, 4)[:, :2]) == fingerprint(values[:-1].view(-1, 4)[:, :2].clone())
    assert fingerprint(values[1:8]) == fingerprint(values[1:8].clone()), "wherever it begins"
    assert fingerprint(torch.ones(3, dtype=torch.bool)) != fingerprint(torch.ones(4, dtype=torch.bool))
