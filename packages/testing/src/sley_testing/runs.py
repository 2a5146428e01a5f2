"""Runs a plan on some ranks and keeps everything that another layout must reproduce.

reference = record_reference(tables, 3)                         # this process alone
layouts = ranks(2)(record, tables, 3)                # the same plan on two ranks
assert_parity(reference, layouts, "fp32")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.actions.action import Action, Kind, Placement
from sley_core.assemble import assemble
from sley_core.comm.device import Device
from sley_core.comm.world import World
from sley_core.config import CrossEntropyConfig
from sley_core.engine.registry import Param
from sley_core.engine.shards import gather_full_tensors
from sley_core.engine.step_batch import GivenBatch
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import Counts
from sley_core.run import Run
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.plain import PlainLoop, assert_step

Tensors = dict[str, Tensor]

BF16_SUMS = "bf16 sums"  # the key, in the tables below, of plans with `[precision] gradients = "bf16"`

WEIGHTS = {"fp64": 1e-10, "fp32": 1e-5, "fp16": 2**-10, "bf16": 2**-7, BF16_SUMS: 2**-5}
"""How far weights may be from the one-process run after three steps: ||d|| / ||w||. Why: docs/internals.md, Parity."""

GRADIENTS = {"fp64": 1e-10, "fp32": 1e-6, "fp16": 2**-10, "bf16": 2**-7, BF16_SUMS: 2**-6}
"""How far loss, norm and every gradient may be, relative; of the first step, where weights are still equal bit for bit."""


@dataclass
class Recorded:
    """What one rank saw.

    rows: the metrics of each step. first: weights before the first step. gradients: what the optimizer was given in each
    step, by the names of the registry. weights: after the last step. held_out: the loss of `Run.evaluate`, if asked for.
    """

    rows: list[dict[str, float | int]] = field(default_factory=list)
    first: Tensors = field(default_factory=dict)
    gradients: list[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    held_out: float | None = None


@contextmanager
def running(tables: Mapping[str, Any], folder: Path | None = None) -> Iterator[Run]:
    """`with running(tables, folder) as run`: the run of a plan on this rank of the world that the environment describes."""
    plan = plan_from_dict(tables, folder)
    with World.join(plan.run.device) as world, assemble(plan, world) as run:
        yield run


def record(
    tables: Mapping[str, Any],
    num_steps: int,
    *,
    folder: Path | None = None,
    prepare: Callable[[Run], None] | None = None,
    batches: Sequence[GivenBatch] | None = None,
    device: Device | None = None,
    is_alone: bool = False,
) -> Recorded:
    """Takes `num_steps` steps of the plan in `tables` on this rank of the world that the environment describes.

    folder: the plan's. prepare: is called with the run before its first step. batches: global batches to train on
    instead of the plan's data, of which this rank takes its rows. device: this rank's, if not the plan's. is_alone: as one
    process does, though this one is a rank of several; no other need take part.
    """
    plan = plan_from_dict(tables, folder)
    recorded = Recorded()
    join = World.alone if is_alone else World.join
    with join(device or plan.run.device) as world, assemble(plan, world) as run:
        if prepare is not None:
            prepare(run)
        recorded.first = weights(run)
        for number in range(num_steps):
            own = None if batches is None else batches[number]
            if isinstance(own, Mapping):  # this rank's rows, or those of its micro-batches
                own = {name: value[run.rows] for name, value in own.items()}
            elif own is not None:
                size = plan.batch.micro_size
                own = own[run.rows.start // size : run.rows.stop // size]
            recorded.rows.append(run.step(own))
            recorded.gradients.append(gradients(run))
        recorded.weights = weights(run)
        if run.held_out is not None:
            recorded.held_out = run.evaluate()
    return recorded


def record_reference(tables: Mapping[str, Any], num_steps: int, *, folder: Path | None = None) -> Recorded:
    """Runs a plan of one process and returns what `record` notes of it; a plan that this process has recorded so is not run
    again. Do not change what it returns.

    For references, which many layouts are compared with. Not for a test that changes what runs other than by the plan.
    """
    key = repr((tables, num_steps, folder, torch.get_num_threads()))  # a kernel's sums depend on the number of threads
    if key not in _alone:
        _alone[key] = record(tables, num_steps, folder=folder)
    return _alone[key]


_alone: dict[str, Recorded] = {}


def gradients(run: Run) -> Tensors:
    """Copies on the host of the accumulated gradients of what this rank holds, by name; sharded ones are gathered whole, as are
    those of which a reducer left parts to ranks.
    """
    parts: dict[Param, Tensor] = {}
    for buffer in run.store.buffers:
        if buffer.shard is not None:  # a collective of the buffer's ranks, in one order on all
            group = run.groups[buffer.shard.axis]
            whole = torch.empty_like(buffer.data)
            group.all_gather(whole, buffer.own, what="parts of gradients", lane=next(iter(group.lanes))).wait()
            for param, start, view in zip(buffer.params, buffer.offsets, buffer.views, strict=True):
                parts[param] = whole[start : start + view.numel()].view(view.shape)
    # In the order of the registry, which is one order on all ranks of `wp`.
    present = set(run.store.params)
    parts = {param: parts[param] if param in parts else run.store.gradient(param) for param in run.registry if param in present}
    return {param.name: gradient.cpu() for param, gradient in gather_full_tensors(parts, run.groups).items()}


def weights(run: Run) -> Tensors:
    """Copies of this rank's parameters and buffers, by name; sharded ones are gathered whole."""
    parts = gather_full_tensors({param: param.parameter for param in run.registry}, run.groups)
    found = {param.name: weight.cpu() for param, weight in parts.items()}
    for layer in run.layers:
        found |= {name: buffer.clone().cpu() for name, buffer in layer.module.named_buffers(layer.name)}
    return found


def assert_same_run(reference: Recorded, other: Recorded) -> None:
    """Losses, norms, gradients, weights and the held-out loss of two runs are equal bit for bit."""
    for wanted, found in zip(reference.rows, other.rows, strict=True):
        assert (wanted["loss"], wanted["grad_norm"]) == (found["loss"], found["grad_norm"]), (wanted, found)
    for these, those in zip(reference.gradients, other.gradients, strict=True):
        assert_same_bits(these, those)
    assert_same_bits(reference.weights, other.weights)
    assert reference.held_out == other.held_out


def assert_parity(reference: Recorded, others: Sequence[Recorded], precision: str) -> None:
    """Asserts that each of `others` equals the one-process `reference`, within this precision's limits."""
    # A gradient below this share of the model's largest is zero but for rounding.
    floor = 1e-6 * max((float(one.double().norm()) for one in reference.gradients[0].values()), default=0.0)
    for rank, other in enumerate(others):
        assert_same_bits(reference.first, other.first)
        assert_close_gradients(reference.gradients[0], other.gradients[0], GRADIENTS[precision], floor=floor)
        _assert_close_rows(reference, other, precision, rank)
        assert_close_gradients(reference.weights, other.weights, WEIGHTS[precision])


def assert_parity_of_parts(reference: Recorded, layouts: Sequence[Recorded], precision: str) -> None:
    """Asserts the parity of ranks that hold a part of the model each, and that each part is on some rank."""
    near, far = GRADIENTS[precision], WEIGHTS[precision]
    for rank, layout in enumerate(layouts):
        assert_same_bits(_part(reference.first, layout.first), layout.first)
        own = layout.gradients[0]
        assert_close_gradients(_part(reference.gradients[0], own), own, near, floor=1e-6)
        assert_close_gradients(_part(reference.weights, layout.weights), layout.weights, far)
        _assert_close_rows(reference, layout, precision, rank)
        if reference.held_out is not None:
            assert layout.held_out is not None
            assert math.isclose(layout.held_out, reference.held_out, rel_tol=far), (
                f"rank {rank}: held-out {layout.held_out}, not {reference.held_out}"
            )
    assert {name for layout in layouts for name in layout.gradients[0]} == set(reference.gradients[0])


def _assert_close_rows(reference: Recorded, other: Recorded, precision: str, rank: int) -> None:
    """Asserts that loss and norm are close in each step, and that as many tokens were counted."""
    for wanted, found in zip(reference.rows, other.rows, strict=True):
        place = f"rank {rank}, step {wanted['step']}"
        limit = (GRADIENTS if wanted["step"] == 1 else WEIGHTS)[precision]
        assert found.get("tokens") == wanted.get("tokens"), f"{place}: {found.get('tokens')} tokens"
        for key in ("loss", "grad_norm"):
            error = abs(found[key] - wanted[key]) / max(abs(wanted[key]), 1e-30)
            assert error <= limit, f"{place}: {key} {found[key]}, not {wanted[key]}"


def _part(whole: Tensors, of: Tensors) -> Tensors:
    return {name: whole[name] for name in of}


def assert_equal_replicas(recorded: Sequence[Recorded]) -> None:
    """Asserts that weights of replicas are equal bit for bit, step after step."""
    for other in recorded[1:]:
        assert_same_bits(recorded[0].weights, other.weights)


def assert_by_hand(
    recorded: Recorded,
    named: list[tuple[str, nn.Module]],
    batches: Sequence[Mapping[str, Tensor]],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    micro_size: int,
    first: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-9,
) -> None:
    """Trains by hand on `batches`, one a step, and asserts that loss, norm, gradients and weights that `recorded` saw of them
    are the same within `tolerance`, relative.

    named: fresh layers, which get the dtype of the run's. first: the weights of the whole model at the start, where
    `recorded` holds a part of it.
    """
    start = recorded.first if first is None else first
    for _, module in named:
        module.to(next(iter(start.values())).dtype)
    loop = PlainLoop(
        named,
        CrossEntropy(CrossEntropyConfig()),
        optimizer=lambda parameters: make_optimizer([parameter for _, parameter in parameters if parameter.requires_grad]),
    )
    loop.load(start)
    for batch, row, gradients in zip(batches, recorded.rows, recorded.gradients, strict=True):
        size = len(next(iter(batch.values())))
        micros = [{name: value[at : at + micro_size] for name, value in batch.items()} for at in range(0, size, micro_size)]
        assert_step(loop.step(micros), row, gradients, {}, tolerance)
    weights = loop.weights
    assert_close_gradients({name: weights[name] for name in recorded.weights}, recorded.weights, tolerance)


def fail_once(run: Run, backward: int = 0) -> None:
    """Takes a step that raises at the first layer, in this rank's `backward`-th one (0 is the first); then moves the data back.
    All ranks call it. Of a layer that comes last in a backward handlers hear last: they know of the others' gradients already.
    """
    calls = count()

    def fail(_: Tensor) -> None:
        if next(calls) == backward:
            raise ValueError("the contract's failing backward")

    assert run.feed is not None
    before = run.feed.state()
    hook = run.registry.trainable[0].parameter.register_hook(fail)  # type: ignore[no-untyped-call]  # torch's
    with pytest.raises(ValueError, match="the contract's failing backward"):
        run.step()
    hook.remove()
    run.feed.restore(before)


def counts_of(part: object) -> dict[str, float]:
    """Returns what a part counts, nothing if it does not; asserts that they are finite, and that asking changes none."""
    if not isinstance(part, Counts):
        return {}
    first, second = dict(part.counts()), dict(part.counts())
    assert first == second, f"counts change when they are asked for: {first}, {second}"
    assert all(math.isfinite(value) for value in first.values()), f"counts that are no numbers: {first}"
    return first


def random_action_lists(placement: Placement, micros: int, chance: Random) -> list[list[Action]]:
    """Returns lists of a walk that does whatever could be done next, backwards whole or split: they can run."""
    made: list[list[Action]] = [[] for _ in range(placement.stages)]
    last = placement.num_positions - 1
    ready = [(Kind.FORWARD, 0, micro) for micro in range(micros)]
    while ready:
        kind, position, micro = ready.pop(chance.randrange(len(ready)))
        stage, chunk = placement.holder(position)
        made[stage].append(Action(kind, chunk, micro))
        if kind is Kind.FORWARD and position < last:
            ready.append((Kind.FORWARD, position + 1, micro))
        elif kind is Kind.FORWARD:
            ready.append((chance.choice([Kind.BACKWARD, Kind.INPUT_GRADIENT]), last, micro))
        elif kind is not Kind.WEIGHT_GRADIENT and position > 0:
            ready.append((chance.choice([Kind.BACKWARD, Kind.INPUT_GRADIENT]), position - 1, micro))
        if kind is Kind.INPUT_GRADIENT:
            ready.append((Kind.WEIGHT_GRADIENT, position, micro))
    return made
