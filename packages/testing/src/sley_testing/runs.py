"""Runs a plan on ranks and records everything that another layout must reproduce.

reference = record_reference(tables, 3)              # one process
layouts = ranks(2)(record, tables, 3)                # the same plan on two ranks
assert_parity(reference, layouts, "fp32")
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.actions.action import Action, Kind, Placement
from sley_core.comm.world import World
from sley_core.engine.registry import Param
from sley_core.engine.shards import gather_full_tensors
from sley_core.engine.step_batch import GivenBatch
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.memory import Part
from sley_core.plan.load import plan_from_dict
from sley_core.plugin import CrossEntropyConfig
from sley_core.protocols import Counts
from sley_testing.collectives import Collective, collectives
from sley_testing.parity import assert_close_gradients, assert_same_bits, noise_floor
from sley_testing.plain import NamedParameters, PlainLoop, assert_step, split_batch
from sley_trainer.assemble import assemble
from sley_trainer.loop import Row
from sley_trainer.run import Run

Tensors = dict[str, Tensor]

BF16_SUMS = "bf16 sums"  # the key in WEIGHTS and GRADIENTS for plans with `[precision] gradients = "bf16"`

WEIGHTS = {"fp64": 1e-10, "fp32": 1e-5, "fp16": 2**-10, "bf16": 2**-7, BF16_SUMS: 2**-5}
"""The relative tolerance of weights after two or three steps, compared with one process. See docs/internals.md, Parity."""

GRADIENTS = {"fp64": 1e-10, "fp32": 1e-6, "fp16": 2**-10, "bf16": 2**-7, BF16_SUMS: 2**-6}
"""The relative tolerance of loss, norm and gradients in the first step, which starts from bit-identical weights."""


@dataclass
class RunRecord:
    """Holds one rank's results. rows: the metrics of each step. initial_weights, weights: the full weights before the first
    step and after the last. gradients: the full clipped gradients of each step. calls: the collectives of each step, empty
    unless requested. states: this rank's final master weights and optimizer states. held_out_loss: the final held-out loss;
    None if the run has no held-out data. notes: the notes of the loaded checkpoint; empty if none was loaded.
    """

    rows: list[dict[str, float | int]] = field(default_factory=list)
    initial_weights: Tensors = field(default_factory=dict)
    gradients: list[Tensors] = field(default_factory=list)
    calls: list[list[Collective]] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    states: Tensors = field(default_factory=dict)
    held_out_loss: float | None = None
    notes: list[str] = field(default_factory=list)


@contextmanager
def running(tables: Mapping[str, Any], folder: Path | None = None) -> Iterator[Run]:
    """Yields an assembled run of the plan in `tables` on this rank of the environment's world. folder: the plan's folder."""
    plan = plan_from_dict(tables, folder)
    with World.join(plan.run.device) as world, assemble(plan, world) as run:
        yield run


def record(
    tables: Mapping[str, Any],
    num_steps: int,
    *,
    folder: Path | None = None,
    load: Path | None = None,
    save: Path | None = None,
    prepare: Callable[[Run], None] | None = None,
    before_step: Callable[[Run, int], None] | None = None,
    batches: Sequence[GivenBatch] | None = None,
    records_calls: bool = False,
) -> RunRecord:
    """Takes `num_steps` steps of the plan in `tables` on this rank of the environment's world, and returns the record.

    folder: the plan's folder. load: the checkpoint to resume from. save: the path of a checkpoint after the last step. prepare:
    a function that is called with the run before the run loads the checkpoint. before_step: a function that is called before
    each step with the run and the number of steps taken so far. batches: global batches, one per step, that replace the plan's
    data; this rank uses its rows. records_calls: whether to record collectives, which takes time.
    """
    recorded = RunRecord()
    with running(tables, folder) as run:
        if prepare is not None:
            prepare(run)
        if load is not None:
            restored = run.load_checkpoint(load)
            assert restored is not None, load
            recorded.notes = restored.notes
        recorded.initial_weights = weights(run)
        for index in range(num_steps):
            if before_step is not None:
                before_step(run, index)
            local_batch = None if batches is None else batches[index]
            if isinstance(local_batch, Mapping):  # select this rank's rows
                local_batch = {name: value[run.rows] for name, value in local_batch.items()}
            elif local_batch is not None:
                size = run.plan.batch.micro_size
                local_batch = local_batch[run.rows.start // size : run.rows.stop // size]
            recorder: AbstractContextManager[list[Collective]] = collectives() if records_calls else nullcontext([])
            with recorder as calls:
                recorded.rows.append(run.step(local_batch))
            recorded.calls.append(calls)
            recorded.gradients.append(gradients(run))
        if save is not None:
            run.save_checkpoint(save)
        recorded.weights = weights(run)
        parts: tuple[Part, ...] = ("masters", "optimizer_states")
        for part in parts:
            recorded.states |= {f"{part} {name}": value.clone() for name, value in run.memory.host(part)}
        if run.held_out is not None:
            recorded.held_out_loss = run.evaluate()
    return recorded


def record_reference(tables: Mapping[str, Any], num_steps: int, *, folder: Path | None = None) -> RunRecord:
    """Returns the record of a plan in this process, cached for later calls. Callers must not modify the result. Use it for a
    reference that several tests share, but not if a test changes the run by other means than its plan.
    """
    key = repr((tables, num_steps, folder, torch.get_num_threads()))  # a kernel's sums depend on the number of threads
    if key not in _cached_references:
        _cached_references[key] = record(tables, num_steps, folder=folder)
    return _cached_references[key]


_cached_references: dict[str, RunRecord] = {}


def gradients(run: Run) -> Tensors:
    """Returns host copies of this rank's accumulated gradients by name. Gathers gradients if a reducer leaves shards or if
    weights are sharded, so all ranks must call it.
    """
    gathered: dict[Param, Tensor] = {}
    for buffer in run.store.buffers:
        if buffer.shard is not None:  # all ranks of the buffer's group gather it, in the same order
            group, full_buffer = run.groups[buffer.shard.axis], torch.empty_like(buffer.data)
            channel = next(iter(group.channels))
            group.all_gather(full_buffer, buffer.local_part, label="parts of gradients", channel=channel).wait()
            for param, start, view in zip(buffer.params, buffer.offsets, buffer.views, strict=True):
                gathered[param] = full_buffer[start : start + view.numel()].view(view.shape)
    for param in set(run.store.params) - gathered.keys():
        gathered[param] = run.store.gradient(param)
    # The order of the registry is the same on all ranks of `wp`.
    gathered = {param: gathered[param] for param in run.registry if param in gathered}
    return {param.name: gradient.cpu() for param, gradient in gather_full_tensors(gathered, run.groups).items()}


def weights(run: Run) -> Tensors:
    """Returns host copies of this rank's parameters and buffers by name. All ranks must call it if weights are sharded."""
    full_weights = gather_full_tensors({param: param.parameter for param in run.registry}, run.groups)
    tensors = {param.name: weight.cpu() for param, weight in full_weights.items()}
    for layer in run.layers:
        tensors |= {name: buffer.clone().cpu() for name, buffer in layer.module.named_buffers(layer.name)}
    return tensors


def save_at(step: int, path: Path, run: Run) -> None:
    """Makes the run save a checkpoint to `path` after `step`. Use it with `partial` as `prepare` of `record`."""

    def save(row: Row) -> None:
        if row["step"] == step:
            run.save_checkpoint(path)

    run.listeners.append(save)


def assert_same_run(reference: RunRecord, actual_run: RunRecord) -> None:
    """Asserts that rows, gradients, weights, master weights, optimizer states and the held-out loss of two runs of one layout
    are bit-identical. `actual_run` may be a resumed run, whose steps are compared with the last steps of `reference`.
    """
    num_steps = len(actual_run.rows)
    for expected, actual in zip(reference.rows[-num_steps:], actual_run.rows, strict=True):
        for key in ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped", "held_out_loss"):
            assert repr(expected.get(key)) == repr(actual.get(key)), (
                f"step {actual['step']}: {key} is {actual.get(key)}, not {expected.get(key)}"
            )
    for expected_gradients, actual_gradients in zip(reference.gradients[-num_steps:], actual_run.gradients, strict=True):
        assert_same_bits(expected_gradients, actual_gradients)
    assert_same_bits(reference.weights, actual_run.weights)
    assert_same_bits(reference.states, actual_run.states)
    assert reference.held_out_loss == actual_run.held_out_loss


def assert_same_runs(references: Sequence[RunRecord], actual_runs: Sequence[RunRecord]) -> None:
    """Asserts that the two records of each rank are bit-identical, as `assert_same_run` does for one rank."""
    for reference, actual_run in zip(references, actual_runs, strict=True):
        assert_same_run(reference, actual_run)


def assert_resumed_parity(reference: RunRecord, layouts: Sequence[RunRecord], precision: str) -> None:
    """Asserts that each rank of a resumed run matches the last steps of the one-process `reference` within the tolerances of
    `precision`. A rank may hold only a part of the model.
    """
    for rank, resumed in enumerate(layouts):
        _assert_close_rows(reference.rows[-len(resumed.rows) :], resumed.rows, precision, rank)
        assert_close_gradients(_select(reference.weights, resumed.weights), resumed.weights, WEIGHTS[precision])


def assert_parity(reference: RunRecord, layouts: Sequence[RunRecord], precision: str) -> None:
    """Asserts that each rank has the whole model, and matches the one-process `reference` within the limits of `precision`."""
    for layout in layouts:
        unmatched = layout.initial_weights.keys() ^ reference.initial_weights.keys()
        assert not unmatched, sorted(unmatched)
        assert layout.gradients[0].keys() == reference.gradients[0].keys()
    assert_parity_of_parts(reference, layouts, precision)


def assert_parity_of_parts(reference: RunRecord, layouts: Sequence[RunRecord], precision: str) -> None:
    """Asserts that each rank, which may hold only a part of the model, matches the one-process `reference` within the limits of
    `precision`, and that all ranks together hold the whole model.
    """
    weight_tolerance, floor = WEIGHTS[precision], noise_floor(reference.gradients[0])
    for rank, layout in enumerate(layouts):
        assert_same_bits(_select(reference.initial_weights, layout.initial_weights), layout.initial_weights)
        local_gradients = layout.gradients[0]
        expected_gradients = _select(reference.gradients[0], local_gradients)
        assert_close_gradients(expected_gradients, local_gradients, GRADIENTS[precision], floor=floor)
        _assert_close_rows(reference.rows, layout.rows, precision, rank)
        assert_close_gradients(_select(reference.weights, layout.weights), layout.weights, weight_tolerance)
        if reference.held_out_loss is not None:
            label = f"rank {rank}: held-out loss {layout.held_out_loss}, not {reference.held_out_loss}"
            assert layout.held_out_loss is not None, label
            assert math.isclose(layout.held_out_loss, reference.held_out_loss, rel_tol=weight_tolerance), label
    assert {name for layout in layouts for name in layout.gradients[0]} == set(reference.gradients[0])


def _assert_close_rows(
    expected_rows: Sequence[Mapping[str, float]], actual_rows: Sequence[Mapping[str, float]], precision: str, rank: int
) -> None:
    """Asserts that losses and norms of each step are close, and that learning rates and numbers of tokens are equal."""
    for expected, actual in zip(expected_rows, actual_rows, strict=True):
        label = f"rank {rank}, step {expected['step']}"
        limit = (GRADIENTS if expected["step"] == 1 else WEIGHTS)[precision]
        for key in {"lr", "tokens"} & expected.keys():
            assert actual.get(key) == expected.get(key), f"{label}: {key} {actual.get(key)}, not {expected.get(key)}"
        for key in ("loss", "grad_norm"):
            error = abs(actual[key] - expected[key]) / max(abs(expected[key]), 1e-30)
            assert error <= limit, f"{label}: {key} {actual[key]}, not {expected[key]}"


def _select(tensors: Tensors, names: Iterable[str]) -> Tensors:
    return {name: tensors[name] for name in names}


def assert_equal_replicas(recorded: Sequence[RunRecord]) -> None:
    """Asserts that the final weights of all ranks are bit-identical."""
    for actual_run in recorded[1:]:
        assert_same_bits(recorded[0].weights, actual_run.weights)


def assert_matches_plain_loop(
    recorded: RunRecord,
    named: list[tuple[str, nn.Module]],
    batches: Sequence[Mapping[str, Tensor]],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    micro_size: int,
    first: Mapping[str, Tensor] | None = None,
) -> None:
    """Trains a plain loop on `batches`, one per step, and asserts that losses, norms, gradients and weights match `recorded`
    within a relative tolerance of 1e-9. named: new layers by name, which are converted to the dtype of the run. make_optimizer:
    builds an optimizer of the trained parameters. micro_size: the samples per microbatch. first: the initial weights of the
    full model, if `recorded` has only a part of the model.
    """
    start = recorded.initial_weights if first is None else first
    for _, module in named:
        module.to(next(iter(start.values())).dtype)

    def make_loop_optimizer(parameters: NamedParameters) -> torch.optim.Optimizer:
        return make_optimizer([parameter for _, parameter in parameters if parameter.requires_grad])

    loop = PlainLoop(named, CrossEntropy(CrossEntropyConfig()), optimizer=make_loop_optimizer)
    loop.load(start)
    for batch, row, gradients in zip(batches, recorded.rows, recorded.gradients, strict=True):
        assert_step(loop.step(split_batch(batch, micro_size)), row, gradients, {})
    weights = loop.weights
    assert_close_gradients({name: weights[name] for name in recorded.weights}, recorded.weights, 1e-9)


def fail_once(run: Run, microbatch: int = 0, *, in_forward: bool = False) -> None:
    """Takes a step that raises ValueError in microbatch `microbatch`, catches the error, and restores the position in the
    data. All ranks must call it. The step raises before the backward of this rank's first layer, when handlers have received
    the gradients of all later layers. With `in_forward`, it raises after the forward of that layer.
    """
    calls = count()

    def fail(*_: Any) -> None:
        if next(calls) == microbatch:
            raise ValueError("the contract's failing step")

    def fail_in_pass(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if in_forward:
            fail()
        elif output.requires_grad:
            output.register_hook(fail)  # type: ignore[no-untyped-call]

    assert run.feed is not None
    feed_state = run.feed.state()
    hook = run.layers[0].module.register_forward_hook(fail_in_pass)
    with pytest.raises(ValueError, match="the contract's failing step"):
        run.step()
    hook.remove()
    run.feed.restore(feed_state)


def read_counts(part: object) -> dict[str, float]:
    """Returns the counts of a part, or {} if it has none. Asserts that they are finite and do not change between two calls."""
    if not isinstance(part, Counts):
        return {}
    first, second = dict(part.counts()), dict(part.counts())
    assert first == second, f"counts change between two calls: {first}, {second}"
    assert all(math.isfinite(value) for value in first.values()), f"counts must be finite, but are {first}"
    return first


def random_action_lists(placement: Placement, num_microbatches: int, generator: Random) -> list[list[Action]]:
    """Returns a random valid action list for each stage of `placement`. Each backward is full or split at random."""
    lists: list[list[Action]] = [[] for _ in range(placement.stages)]
    last = placement.num_positions - 1
    ready = [(Kind.FORWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    while ready:
        action_type, position, microbatch = ready.pop(generator.randrange(len(ready)))
        stage, chunk = placement.holder(position)
        lists[stage].append(Action(action_type, chunk, microbatch))
        if action_type is Kind.FORWARD and position < last:
            ready.append((Kind.FORWARD, position + 1, microbatch))
        elif action_type is Kind.FORWARD:
            ready.append((generator.choice([Kind.BACKWARD, Kind.INPUT_GRADIENT]), last, microbatch))
        elif action_type is not Kind.WEIGHT_GRADIENT and position > 0:
            ready.append((generator.choice([Kind.BACKWARD, Kind.INPUT_GRADIENT]), position - 1, microbatch))
        if action_type is Kind.INPUT_GRADIENT:
            ready.append((Kind.WEIGHT_GRADIENT, position, microbatch))
    return lists
