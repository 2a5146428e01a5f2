"""`run.memory` with core alone: an offload manager of a test's own plugin, and a run without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.comm.copies import free, grow, storage_id
from sley_core.errors import StateError, UsageError
from sley_core.memory.inventory import group_by_storage
from sley_core.memory.state import PARTS, Moved, Where, is_away
from sley_core.plan.check import check_offload
from sley_core.plan.load import plan_from_dict
from sley_core.records import OffloadManagerRecord
from sley_testing.plans import small_plan
from sley_testing.runs import running


class Shelf:
    """Moves one part to clones on the host: the least that a manager must do."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.calls: list[str] = []
        self.copies: list[tuple[Any, Tensor, int]] = []
        self.cost = Moved()

    @property
    def parts(self) -> Sequence[Any]:
        return [self.part]

    def attach(self, parts: Any, inventory: Any) -> None:
        self.inventory = inventory

    def offload(self, part: Any) -> Callable[[], None]:
        self.calls.append(f"offload {part}")
        pieces = self.inventory.pieces(part)
        self.copies = [(piece, piece.memory.clone(), free(piece.memory)) for piece in pieces]
        self.cost.copied_out += sum(size for _, _, size in self.copies)
        return lambda: self.calls.append(f"wait {part}")

    def onload(self, part: Any) -> Callable[[], None]:
        self.calls.append(f"onload {part}")
        for piece, copy, size in self.copies:
            grow(piece.memory, size)
            piece.memory.copy_(copy)
        self.copies = []
        return lambda: None

    def require(self, part: Any, what: str) -> None:
        if self.copies:
            raise is_away(part, what)

    def where(self, part: Any) -> Where:
        return Where.AWAY if self.copies else Where.HERE

    def moved(self, part: Any) -> Moved:
        return self.cost

    def host(self, part: Any) -> dict[int, Tensor]:
        return {storage_id(piece.memory): copy for piece, copy, _ in self.copies}

    def detach(self) -> None: ...


@pytest.fixture
def run(texts):
    with running(small_plan(precision__compute="bf16", evaluation={"every": 100}), texts) as made:
        yield made


def with_shelves(run, *parts):
    """`run` with a manager for each of `parts`, as `assemble` attaches those of a plan."""
    shelves = [Shelf(part) for part in parts]
    for shelf in shelves:
        shelf.attach(run.parts, run.memory.inventory)
    run.memory.managers = shelves
    return shelves


def test_a_run_says_what_it_holds_without_any_manager(run):
    """Masters and states are fp32; states come in the first step; without stages or pools nothing else is kept."""
    numel = sum(param.numel for param in run.registry)
    before = run.memory.bytes
    assert [*before] == [*PARTS]
    assert (before["weights"], before["optimizer_states"], before["pools"]) == (2 * numel, 0, 0)
    assert before["masters"] >= 4 * numel
    run.step()
    assert run.memory.bytes["optimizer_states"] == 8 * numel
    assert set(run.memory.where.values()) == {Where.HERE}
    assert run.memory.report == {}
    with pytest.raises(UsageError, match="nothing in the plan moves the run's memory"):
        run.memory.offload()


def test_parts_leave_the_last_first_and_come_back_the_first_first(run):
    """Gradients go before weights: then the device's peak is lowest."""
    shelves = with_shelves(run, "weights", "masters", "optimizer_states")
    run.step()
    calls: list[str] = []
    for shelf in shelves:
        shelf.calls = calls
    run.memory.offload().wait()
    run.memory.onload("masters")
    run.memory.onload()
    assert calls[:3] == ["offload optimizer_states", "offload masters", "offload weights"]
    assert sorted(calls[3:6]) == ["wait masters", "wait optimizer_states", "wait weights"]
    assert calls[6:] == ["onload masters", "onload weights", "onload masters", "onload optimizer_states"]
    run.step()


def test_what_is_away_is_asked_for_by_name(run):
    with_shelves(run, "masters")
    run.step()
    run.memory.offload()
    for call, what in ((run.step, "a step"), (run.train, "a step"), (lambda: run.load_weights({}), "loading weights")):
        with pytest.raises(StateError, match=f"{what} needs the run's masters, which are away"):
            call()
    run.evaluate()
    run.memory.onload()
    run.step()


def test_what_is_away_is_read_on_the_host(run):
    """And what is here, and the scalars that optimizers keep."""
    with_shelves(run, "optimizer_states")
    run.step()
    here = {name: value.clone() for name, value in run.memory.host("optimizer_states")}
    run.memory.offload()
    away = dict(run.memory.host("optimizer_states"))
    assert here.keys() == away.keys()
    assert all(torch.equal(here[name], value) for name, value in away.items())
    assert {value.dim() for name, value in away.items() if name.endswith(".step")} == {0}
    names = [name for name, _ in run.memory.host("weights")]
    assert names == [param.name for param in run.registry]
    with pytest.raises(UsageError, match="not-copied"):
        run.memory.host("pools")


def test_a_storage_that_two_parts_have_moves_with_the_first(run):
    run.step()
    param = next(iter(run.registry))
    optimizer = run.stepper.update.optimizer
    parameter = next(one.parameter for one in run.stepper.update.masters.stepped if one.param is param)
    optimizer.state[parameter]["alias"] = param.parameter.detach()
    names = [name for piece in run.memory.inventory.pieces("optimizer_states") for name in piece.tensors]
    assert f"{param.name}.exp_avg" in names
    assert f"{param.name}.alias" not in names
    stepped = [one for one in run.stepper.update.masters.stepped if one.param is param]
    assert storage_id(param.parameter) in run.memory.inventory.storage_ids_without(stepped)


def test_pieces_are_storages_with_all_that_lies_in_them():
    base = torch.arange(12.0)
    other = torch.ones(3, dtype=torch.int16)
    first, second = group_by_storage([("row", base[4:8]), ("other", other), ("turned", base.view(3, 4).t())])
    assert [*first.tensors] == ["row", "turned"]
    assert (first.memory.shape, first.memory.dtype) == ((48,), torch.uint8)
    assert second.memory.shape == (6,)


ADAMW, OWN = {"use": "core.adamw", "lr": 0.1}, {"factory": "torch.optim:LBFGS", "lr": 0.1}


@pytest.mark.parametrize(
    ("optimizer", "scope", "moves", "codes"),
    [
        (ADAMW, "global", [("masters",), ("weights", "buffers")], []),
        (ADAMW, "global", [("masters", "weights"), ("weights",)], ["offload-twice"]),
        (ADAMW, "per_matrix", [("masters",)], []),
        (OWN, "global", [("masters",)], []),
        (OWN, "per_matrix", [("masters",)], ["offload-optimizer"]),
        ({**OWN, "scope": "elementwise"}, "per_matrix", [("masters",)], []),
    ],
)
def test_managers_that_move_one_part_or_update_apart_what_belongs_together_are_refused(optimizer, scope, moves, codes):
    plan = plan_from_dict(small_plan(optimizer=optimizer))
    managers = []
    for parts in moves:
        record = OffloadManagerRecord(
            name="shelf",
            config=type(plan.loss.config),
            build="nowhere:Shelf",
            summary="",
            parts=lambda config, parts=parts: parts,
            scope=lambda config: scope,
        )
        managers.append(replace(plan.optimizer, record=record, name="own.shelf"))
    plan = replace(plan, offload=tuple(managers))
    assert [problem.code for problem in check_offload(plan)] == codes
