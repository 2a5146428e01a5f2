"""A case on one rank, and the plain loop on the same batches; what differs is told in words."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import drawn_models
import torch
from drawn_cases import Case, Step
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
from sley_testing.plain import NothingToTrainError, PlainLoop, assert_step
from sley_testing.runs import gradients, weights

Tensors = dict[str, Tensor]

EPSILON = torch.finfo(torch.float64).eps
CHANGES = 3
"""How often the plain loop is asked whether it knows its own numbers."""


@dataclass
class Seen:
    """What one rank saw: first weights, and of each step its row, gradients, weights and held-out loss."""

    first: Tensors = field(default_factory=dict)
    rows: list[Mapping[str, float]] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)
    held_out: list[float | None] = field(default_factory=list)


def plan(case: Case, folder: Path) -> Any:
    """The case's plan; a schedule's text is put into `folder`, under the same name on all ranks."""
    tables = dict(case.tables)
    if case.csv:
        path = folder / f"case{case.seed}.csv"
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(case.csv, "utf-8")
        own.replace(path)
        tables["pipeline"] = tables["pipeline"] | {"file": path.name}
    fixed: dict[str, Any] = {
        "run": {"name": "drawn", "steps": 99, "device": "cpu", "seed": run_seed(case)},
        "model": {"factory": "drawn_models:model", "options": case.model},
        "data": {"factory": "drawn_models:Rows"},
        "evaluation": {"every": 10**6, "steps": 1},
        "limits": {"collective_timeout_s": 20.0},
    }
    return plan_from_dict({**fixed, **case.training, **tables}, folder)


def run_seed(case: Case) -> int:
    return case.seed % 1000


def problems(case: Case, folder: Path) -> list[str]:
    """What the plan's own check says of the case, without a rank."""
    try:
        return [str(one) for one in check_plan(plan(case, folder), case.world)]
    except SleyError as error:
        return [str(error)]


def see(case: Case, folder: Path, seen: Seen) -> None:
    """The case's run on this rank; what it saw goes to `seen`, also where an error ends it."""
    made = plan(case, folder)
    with World.join("cpu") as world, assemble(made, world) as run:
        seen.first = weights(run)
        for number, step in enumerate(case.steps):
            _prepare(step, {param.name: param.parameter for param in run.registry})
            seen.rows.append(run.step(_own(case, number, run)))
            seen.gradients.append(gradients(run))
            seen.weights.append(weights(run))
            seen.held_out.append(run.evaluate() if step.evaluates else None)


def plainly(case: Case) -> PlainLoop:
    """The same model in the same loop as everybody's, with the values that its own code gives it."""
    layers = drawn_models.model(**case.model)
    for _, layer in layers:
        layer.double()
    loss, config = case.training["loss"], case.training["optimizer"]
    made: Any = (
        CrossEntropy(CrossEntropyConfig(label_smoothing=loss["label_smoothing"]))
        if "use" in loss
        else getattr(drawn_models, loss["factory"].partition(":")[2])()
    )
    return PlainLoop(
        layers,
        made,
        optimizer=lambda named: _optimizer(config, named, layers),
        clip_norm=config.get("clip_norm"),
        clip_kind=float(config.get("clip_kind", 2.0)),
    )


def train_plainly(case: Case, loop: PlainLoop, seen: Sequence[Seen] = (), record: Seen | None = None) -> list[list[float]]:
    """The loop's loss, gradient norm and held-out loss, if it is measured, of each step.

    Raises AssertionError with the first difference between the loop and what the ranks saw. record: takes what it did itself.
    """
    numbers = []
    for number, step in enumerate(case.steps):
        _prepare(step, loop.parameters)
        share = min(1.0, (number + 1) / (case.training["learning_rate"]["warmup_steps"] or 1))
        for group in loop.optimizer.param_groups:
            group["lr"] = group["full"] * share
        wanted = loop.step(micros(case, number))
        held_out = loop.evaluate(_held_out(case)) if step.evaluates else None
        numbers.append([wanted.loss, wanted.grad_norm, *([] if held_out is None else [held_out])])
        if record is not None:
            record.rows.append({"loss": wanted.loss, "grad_norm": wanted.grad_norm})
            record.gradients.append(wanted.gradients)
            record.weights.append(wanted.weights)
            record.held_out.append(held_out)
        taken = [one for one in seen if number < len(one.rows)]
        for rank, one in enumerate(taken):
            try:
                assert_step(wanted, one.rows[number], one.gradients[number], one.weights[number])
                found = one.held_out[number] if number < len(one.held_out) else held_out
                assert found == held_out or abs(found - held_out) <= 1e-9 * abs(held_out), f"held-out {found}, not {held_out}"
            except AssertionError as error:
                raise StepDiffersError(number, f"step {number + 1}, rank {rank}: {error}") from None
        missing = set(wanted.gradients) - {name for one in taken for name in one.gradients[number]}
        assert not (taken and missing), f"step {number + 1}: no rank has the gradients of {sorted(missing)}"
    return numbers


class StepDiffersError(AssertionError):
    """Step `number`, from 0, is another than the plain loop's."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def is_undetermined(case: Case, seen: Sequence[Seen], number: int) -> bool:
    """Whether the plain loop differs from itself, up to step `number`, if first values change in their last digit.

    By the comparison that a run has to pass. A training that diverges doubles its digits' errors until none is left, and an
    optimizer that divides by the size of a gradient makes a step of one that is nothing but rounding, as of an attention's key
    bias; then no two orders of a sum agree.
    """
    first: Tensors = {}
    for one in seen:
        first |= one.first
    itself = Seen()
    train_plainly(case, _plainly_from(case, first), record=itself)
    for seed in range(CHANGES):
        chance = torch.Generator().manual_seed(seed)
        changed = {
            name: value * (1 + EPSILON * (torch.randint(2, value.shape, generator=chance).to(value.dtype) * 2 - 1))
            for name, value in first.items()
        }
        try:
            train_plainly(case, _plainly_from(case, changed), [itself])
        except StepDiffersError as error:
            if error.number <= number:
                return True
    return False


def _plainly_from(case: Case, first: Tensors) -> PlainLoop:
    with torch.random.fork_rng(devices=[]):
        loop = plainly(case)
    loop.load(first)
    return loop


def compare(case: Case, seen: Sequence[Seen]) -> None:
    """Raises AssertionError with the first difference: of first values that the model's code determines, then of steps.

    Where the ranks refused a step, or what is held out after it, for want of a number, the loop must have none there either.
    """
    first: Tensors = {}
    for one in seen:
        first |= one.first
    with torch.random.fork_rng(devices=[]):
        loop, other = plainly(case), plainly(case)
    for name, value in loop.weights.items():
        low, high = min(value.min(), other.weights[name].min()), max(value.max(), other.weights[name].max())
        if torch.equal(value, other.weights[name]):
            assert torch.equal(first[name], value), f"first value of {name}: {_told(first[name])}, not {_told(value)}"
        elif low >= 0.25 and high <= 0.5:
            inside = first[name].min() >= 0.25 and first[name].max() <= 0.5
            assert inside, f"first value of {name}: {_told(first[name])}, not within 0.25 and 0.5"
    loop.load(first)
    numbers = train_plainly(case, loop, seen)
    ended = {len(one.held_out) for one in seen}
    assert len(ended) == 1, f"ranks saw {sorted(ended)} steps"
    (number,) = ended
    if number < len(case.steps) and all(map(math.isfinite, numbers[number])):
        raise StepDiffersError(number, f"step {number + 1} was refused, in which the loop has {numbers[number]}")


def micros(case: Case, number: int) -> list[Tensors]:
    """The micro-batches of a step's global batch, in order."""
    r = random.Random(f"{case.seed} {number}")
    return [
        drawn_models.batch([r.randrange(10**5) for _ in range(case.micro_size)], length)
        for length in case.steps[number].lengths
    ]


def has_nothing_to_train(case: Case) -> bool:
    """Whether the plain loop finds a loss that no trained parameter has a part in."""
    try:
        train_plainly(case, plainly(case))
    except NothingToTrainError:
        return True
    return False


def some_step_counts_nothing(case: Case) -> bool:
    """Whether all labels of a step, or of an evaluation, are ignored."""
    batches = [micros(case, number) for number in range(len(case.steps))]
    if any(step.evaluates for step in case.steps):
        batches.append(_held_out(case))
    return any(not sum(map(drawn_models.Squares().weight, batch)) for batch in batches)


def _own(case: Case, number: int, run: Run) -> Any:
    """This rank's samples: apart, or as one batch."""
    every = micros(case, number)
    count = len(every) // run.topology.dp
    own = every[run.groups["dp"].coord * count :][:count]
    return own if case.steps[number].listed else {name: torch.cat([micro[name] for micro in own]) for name in own[0]}


def _held_out(case: Case) -> list[Tensors]:
    size = case.micro_size
    order = Order(drawn_models.ROWS, seed=run_seed(case), epoch=0)
    keys = [drawn_models.HELD_OUT + order[at] for at in range(case.tables["batch"]["global_size"])]
    return [drawn_models.batch(keys[at : at + size], drawn_models.LENGTH) for at in range(0, len(keys), size)]


def _prepare(step: Step, parameters: Mapping[str, Any]) -> None:
    for name, parameter in parameters.items():
        if any(fnmatchcase(name, pattern) for pattern in step.freeze):
            parameter.requires_grad_(False)
        if any(fnmatchcase(name, pattern) for pattern in step.thaw):
            parameter.requires_grad_(True)
        if any(fnmatchcase(name, pattern) for pattern in step.halve):
            with torch.no_grad():
                parameter.mul_(0.5)


def _optimizer(config: Mapping[str, Any], named: Any, layers: Any) -> torch.optim.Optimizer:
    """torch's own, a group for each parameter; matrices decay, unless the plan's groups say otherwise."""
    options: dict[str, Any] = {"lr": config["lr"]}
    if config.get("use") == "core.sgd":
        kind: Any = torch.optim.SGD
        options |= {"momentum": config["momentum"], "nesterov": config.get("nesterov", False)}
    elif config.get("use") == "core.adamw":
        kind, options = torch.optim.AdamW, options | {"eps": config["eps"], "betas": (0.9, 0.95)}
    else:
        kind, options = torch.optim.NAdam, options | config["options"]
    kept = {"lr": options.pop("lr"), "decay": config.get("weight_decay", 0.1 if kind is torch.optim.AdamW else 0.0)}
    groups = []
    for name, parameter in named:
        own = _group(config, name)
        decay = own.get("weight_decay", kept["decay"] if parameter.ndim >= 2 else 0.0)
        groups.append({"params": [parameter], "lr": (lr := own.get("lr", kept["lr"])), "full": lr, "weight_decay": decay})
        if own.get("freeze"):
            parameter.requires_grad_(False)
    return kind(groups, **options)


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The first of the plan's groups that matches a name."""
    return next((one for one in config.get("groups", ()) if fnmatchcase(name, one["match"])), {})


def _told(value: Tensor) -> str:
    return f"{[round(number, 4) for number in value.flatten()[:3].tolist()]} ... of {list(value.shape)}"
