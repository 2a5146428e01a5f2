"""Drawn models in drawn layouts have the numbers of a plain PyTorch loop. A failure prints its case; `draw(NUMBER)` has it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import drawn_model
import pytest
import torch
from drawn_cases import SCHEDULES, STARTS, Case, Step, draw
from drawn_model import BODIES, FORMS, batch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.config import CrossEntropyConfig
from sley_core.data.feed import Order
from sley_core.errors import SleyError
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.collectives import assert_untouched, drafts_kept
from sley_testing.parity import assert_same_bits
from sley_testing.plain import PlainLoop, assert_step
from sley_testing.runs import gradients, weights

CAMPAIGN = 20
"""Parts of 100 draws, of numbers of their own in each campaign."""

Tensors = dict[str, Tensor]


@dataclass
class Seen:
    """First weights of one rank, and each step's row, gradients, weights and held-out loss."""

    first: Tensors = field(default_factory=dict)
    rows: list[Mapping[str, float]] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)
    held_out: list[float | None] = field(default_factory=list)


def plan_of(case: Case, folder: Path) -> Any:
    tables = dict(case.tables)
    if case.csv:
        path = folder / f"case{case.seed}.csv"
        own = path.with_suffix(f".{os.getpid()}")  # each rank writes it
        own.write_text(case.csv, "utf-8")
        own.replace(path)
        tables["pipeline"] = tables["pipeline"] | {"file": path.name}
    fixed: dict[str, Any] = {
        "run": {"name": "drawn", "steps": 99, "device": "cpu", "seed": case.seed % 1000},
        "model": {"factory": "drawn_model:model", "options": case.model},
        "data": {"factory": "drawn_model:Rows"},
        "evaluation": {"every": 10**6, "steps": 1},
        "limits": {"collective_timeout_s": 20.0},
    }
    return plan_from_dict({**fixed, **case.training, **tables}, folder)


def valid(seed: int, folder: Path, world: int | None = None) -> Case:
    """The case of a number; if the plan's check refuses it, the next of its kind."""
    for again in range(50):
        case = draw(seed + again * 10**9, world)
        world = case.world
        try:
            if not check_plan(plan_of(case, folder), world):
                return case
        except SleyError:
            continue
    raise AssertionError(f"none of 50 draws of {seed} makes a plan")


def micros_of(case: Case, number: int) -> list[Tensors]:
    """The micro-batches of a step's global batch, in order."""
    r = random.Random(f"{case.seed} {number}")
    size = case.tables["batch"]["micro_size"]
    return [batch([r.randrange(10**5) for _ in range(size)], length) for length in case.steps[number].lengths]


def change(step: Step, parameters: Mapping[str, Any]) -> None:
    """Does to parameters what a program does before a step."""
    for name, parameter in parameters.items():
        if any(fnmatchcase(name, pattern) for pattern in step.freeze):
            parameter.requires_grad_(False)
        if any(fnmatchcase(name, pattern) for pattern in step.thaw):
            parameter.requires_grad_(True)
        if any(fnmatchcase(name, pattern) for pattern in step.halve):
            with torch.no_grad():
                parameter.mul_(0.5)


def see(case: Case, folder: Path) -> Seen:
    """Runs the case on this rank; the closed run leaves nothing in the modules of its model."""
    seen = Seen()
    with World.join("cpu") as world, drafts_kept() as drafts:
        with assemble(plan_of(case, folder), world) as run:
            seen.first = weights(run)
            for number, step in enumerate(case.steps):
                change(step, {param.name: param.parameter for param in run.registry})
                seen.rows.append(run.step(own_batch(case, number, run)))
                seen.gradients.append(gradients(run))
                seen.weights.append(weights(run))
                seen.held_out.append(run.evaluate() if step.evaluates else None)
        ((model, traces),) = drafts
        if not any(step.freeze or step.thaw for step in case.steps):  # which the program did, not the run
            assert_untouched(traces, model.layers)
    return seen


def own_batch(case: Case, number: int, run: Run) -> Any:
    """This rank's samples, in a list of micro-batches or as one batch."""
    micros = micros_of(case, number)
    count = len(micros) // run.topology.dp
    own = micros[run.groups["dp"].coord * count :][:count]
    return own if case.steps[number].listed else {name: torch.cat([micro[name] for micro in own]) for name in own[0]}


def plain_loop(case: Case) -> PlainLoop:
    """The same model in a plain loop, with the values that its own code gives it under the run's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed % 1000)
        layers = drawn_model.model(**case.model)
    for _, layer in layers:
        layer.double()
    loss, config = case.training["loss"], case.training["optimizer"]
    own: Any = CrossEntropy(CrossEntropyConfig(label_smoothing=loss.get("label_smoothing", 0.0)))
    if "factory" in loss:
        own = getattr(drawn_model, loss["factory"].partition(":")[2])()
    kind = float(config.get("clip_kind", 2.0))
    return PlainLoop(
        layers, own, optimizer=lambda named: optimizer_of(config, named), clip_norm=config.get("clip_norm"), clip_kind=kind
    )


def optimizer_of(config: Mapping[str, Any], named: Any) -> torch.optim.Optimizer:
    """Torch's own, a group for each parameter; matrices decay, unless the plan's groups say otherwise."""
    options: dict[str, Any] = {"eps": 1e-3}
    kind: Any = torch.optim.NAdam
    if config.get("use") == "core.sgd":
        kind, options = torch.optim.SGD, {"momentum": config["momentum"], "nesterov": config.get("nesterov", False)}
    elif config.get("use") == "core.adamw":
        kind, options = torch.optim.AdamW, options | {"betas": (0.9, 0.95)}
    groups = []
    for name, parameter in named:
        own = next((group for group in config.get("groups", ()) if fnmatchcase(name, group["match"])), {})
        decay = own.get("weight_decay", config.get("weight_decay", 0.0) if parameter.ndim >= 2 else 0.0)
        rate = own.get("lr", config["lr"])
        groups.append({"params": [parameter], "lr": rate, "full": rate, "weight_decay": decay})
        if own.get("freeze"):
            parameter.requires_grad_(False)
    return kind(groups, **options)


def compare(case: Case, ranks: Sequence[Seen]) -> None:
    """Raises AssertionError with the first difference from the plain loop."""
    loop = plain_loop(case)
    first = {name: value for one in ranks for name, value in one.first.items() if name in loop.parameters}
    assert_same_bits(loop.weights, first)
    size, order = case.tables["batch"]["micro_size"], Order(drawn_model.ROWS, seed=case.seed % 1000, epoch=0)
    keys = [drawn_model.HELD_OUT + order[at] for at in range(case.tables["batch"]["global_size"])]
    held_out = [drawn_model.batch(keys[at : at + size], drawn_model.LENGTH) for at in range(0, len(keys), size)]
    for number, step in enumerate(case.steps):
        change(step, loop.parameters)
        share = min(1.0, (number + 1) / (case.training["learning_rate"]["warmup_steps"] or 1))
        for group in loop.optimizer.param_groups:
            group["lr"] = group["full"] * share
        expected = loop.step(micros_of(case, number))
        loss = loop.evaluate(held_out) if step.evaluates else None
        for rank, one in enumerate(ranks):
            try:
                assert_step(expected, one.rows[number], one.gradients[number], one.weights[number])
                assert one.held_out[number] == (None if loss is None else pytest.approx(loss, rel=1e-9)), "held-out"
            except AssertionError as error:
                raise AssertionError(f"step {number + 1}, rank {rank}: {error}") from None
        missing = set(expected.gradients) - {name for one in ranks for name in one.gradients[number]}
        assert not missing, f"step {number + 1}: no rank has the gradients of {sorted(missing)}"


def check(ranks: Any, folder: Path, numbers: Iterable[int], world: int | None = None) -> None:
    """Runs these cases; fails with all that are wrong."""
    wrong = []
    for case in (valid(number, folder, world) for number in numbers):
        try:
            compare(case, ranks(case.world, 60)(see, case, folder))
        except Exception as error:
            wrong.append(f"{case}\n  => {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} cases are wrong\n" + "\n\n".join(wrong)


@pytest.mark.parametrize(("world", "count"), [(1, 3), (2, 5), (3, 2), (4, 2)])
def test_a_fixed_sample_equals_a_plain_loop(ranks: Any, tmp_path: Path, world: int, count: int) -> None:
    check(ranks, tmp_path, range(count), world)


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(CAMPAIGN))
def test_two_thousand_draws_equal_a_plain_loop(ranks: Any, tmp_path: Path, part: int) -> None:
    first = random.SystemRandom().randrange(10**6) * 1000
    print(f"numbers {first} to {first + 99}")
    check(ranks, tmp_path, range(first, first + 100))


def test_a_number_stands_for_one_case_and_all_features_are_drawn() -> None:
    cases = [str(draw(number)) for number in range(400)]
    assert cases == [str(draw(number)) for number in range(400)]
    text = "\n".join(cases)
    names = [*BODIES, *FORMS, *filter(None, STARTS), *SCHEDULES, "core.sgd", "core.adamw", "torch.optim:NAdam", "clip_norm"]
    names += ["drawn_model:Squares", "dp.bucketed", "core.recompute", "vocabulary", "hidden"]
    names += ["freeze", "thaw", "halve", "listed", "evaluates"]
    missing = [name for name in names if f'"{name}"' not in text]
    assert not missing, f"never drawn: {missing}"


def test_a_number_that_is_off_by_little_is_seen(tmp_path: Path) -> None:
    case = valid(5, tmp_path, 1)
    case = replace(case, steps=[replace(step, evaluates=True) for step in case.steps])
    seen = see(case, tmp_path)
    compare(case, [seen])
    largest = max(seen.gradients[1], key=lambda name: float(seen.gradients[1][name].norm()))
    for part, key in ((seen.rows[1], "loss"), (seen.rows[0], "grad_norm"), (seen.gradients[1], largest), (seen.first, largest)):
        right = part[key]
        part[key] = right * (1 + 1e-7)
        with pytest.raises(AssertionError, match=key.replace(".", r"\.")):
            compare(case, [seen])
        part[key] = right
    seen.held_out[0] *= 1 + 1e-7
    with pytest.raises(AssertionError, match="held-out"):
        compare(case, [seen])
