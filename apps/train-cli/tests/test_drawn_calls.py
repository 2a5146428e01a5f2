"""A program's calls between steps, drawn: steps, moves, saves, loads, writes, freezes, evaluations, kills, in any order.

A number stands for one case: layout, precision, what moves, device and calls. Each call has the plain loop's numbers, or is
refused by name while memory is away and has changed nothing; none ends a process. A failure prints its case, and
`drawn(NUMBER)` makes it again.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import layout_of, num_ranks
from safetensors.torch import load_file
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.config import CrossEntropyConfig
from sley_core.errors import SleyError
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.memory.state import Where
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.drawn_copies import DrawnDevice
from sley_testing.plain import PlainLoop
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import running, weights

Tensors = dict[str, Tensor]
Call = tuple[Any, ...]
Shapes = dict[str, tuple[int, ...]]

PLAN = small_plan(
    model__num_layers=2,
    model__heads=2,
    model__kv_heads=None,
    model__vocab_size=256,
    data__sequence=8,
    data__documents="cut",
    batch={"global_size": 4, "micro_size": 1},
    run__steps=100,
)
NAMES = ["alone", "dp2 each", "dp2 bucketed", "dp2 sharded", "pp2", "interleaved", "zero bubble", "wp2", "sp2"]
"""Of layouts."""

ON_HOST = {"use": "memory.host_optimizer", "bucket_mb": 0.003}
BETWEEN = {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.003}
EVERYTHING = {"use": "memory.everything", "bucket_mb": 0.003}
REST = ["weights", "buffers", "gradients", "pools", "messages"]
OFFLOADS: dict[str, tuple[list[Tables], list[str]]] = {
    "everything": ([EVERYTHING], [*REST, "masters", "optimizer_states", "handlers"]),
    "shared": ([EVERYTHING | {"shared": True}], [*REST, "masters", "optimizer_states", "handlers"]),
    "on the host": ([ON_HOST, EVERYTHING | {"parts": REST}], REST),
    "between steps": ([BETWEEN, EVERYTHING | {"parts": [*REST, "masters"]}], [*REST, "masters"]),
}
"""Tables of `[[offload]]`, and the parts that move by call."""

OPTIMIZERS = (
    {"use": "core.sgd", "lr": 0.05, "momentum": 0.9, "clip_norm": 0.7},
    {"use": "core.adamw", "lr": 5e-3, "eps": 1e-3, "weight_decay": 0.0, "clip_norm": 0.7},
)
REFUSALS = ("memory-away", "weights-unsaved", "checkpoint-failed")
"""The error codes of calls while a part is away: a step, an evaluation or a load; a save of weights; a checkpoint."""

PATTERNS = ("blocks.0.*", "*.norm*", "head.*")
NUM_CALLS = 9
TOLERANCE = {"fp64": 1e-9, "bf16": 2e-2}
SAMPLE = (14, 18, 25, 63)
"""Cases with calls while memory is away."""

CAMPAIGN = 10
"""Parts of 20 cases, of numbers of their own in each run."""


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """order: of drawn copies; None for a plain CPU."""

    seed: int
    layout: str
    offload: str
    compute: str
    optimizer: Tables
    order: int | None
    calls: list[Call] = field(default_factory=list)

    @property
    def world(self) -> int:
        return num_ranks(self.tables)

    @property
    def parts(self) -> list[str]:
        """What moves by call."""
        return OFFLOADS[self.offload][1]

    @property
    def tables(self) -> Tables:
        """The run's plan."""
        offload = OFFLOADS[self.offload][0]
        changes = {"optimizer": self.optimizer, "precision": {"compute": self.compute}, "offload": offload}
        return layout_of(self.layout, PLAN, **changes)

    def __str__(self) -> str:
        parts = f"{self.layout}, {self.offload}, {self.compute}, {self.optimizer['use']}, order {self.order}"
        return f"case {self.seed}: {parts}\n  " + "\n  ".join(map(str, self.calls))


def drawn(seed: int) -> Case:
    """The case of this number."""
    draw = random.Random(f"calls {seed}")
    layout = draw.choice(NAMES)
    compute = draw.choice(["fp64", "fp64", "bf16"])
    offload = draw.choice([name for name in OFFLOADS if name != "shared" or layout.startswith("dp")])
    optimizer = OPTIMIZERS[0] if compute == "bf16" else draw.choice(OPTIMIZERS)
    order = draw.choice([None, draw.randrange(1000)])
    case = Case(seed, layout, offload, compute, optimizer, order)
    kinds = ["step"] * 4 + ["offload"] * 4 + ["save", "save", "load", "kill", "evaluate", "predict", "host", "set"]
    kinds += ["write", "write"] if layout != "wp2" else []
    kinds += ["freeze", "thaw"] if layout != "dp2 sharded" else []
    case.calls.append(("step", 0))
    while len(case.calls) < NUM_CALLS:
        kind = draw.choice(kinds)
        if kind != "offload":
            case.calls.append(_call(draw, kind, len(case.calls)))
            continue
        case.calls.append(("offload", draw.random() < 0.5, *_some(draw, case.parts, 0.5)))
        for _ in range(draw.choice([0, 0, 1, 2])):
            inside = draw.choice(["save", "save", "host", *kinds])
            case.calls.append(_call(draw, inside if inside != "offload" else "host", len(case.calls)))
        if draw.random() < 0.7:
            case.calls.append(("onload", draw.random() < 0.3, *_some(draw, case.parts, 0.3)))
    case.calls += [("onload", False), ("step", 100)]
    return case


def _call(draw: random.Random, kind: str, number: int) -> Call:
    """A call of this kind, at this place in the sequence."""
    if kind in ("freeze", "thaw"):
        return kind, draw.choice(PATTERNS)
    if kind == "write":
        return kind, draw.random(), draw.choice(["copy", "data"])
    if kind == "host":
        return kind, draw.choice(["weights", "masters"])
    return (kind,) if kind in ("save", "kill") else (kind, number)


def _some(draw: random.Random, parts: Sequence[str], share: float) -> list[str]:
    """Some of the parts, in this share of cases; else none, which stands for all."""
    return draw.sample(parts, draw.randint(1, len(parts))) if draw.random() < share else []


def batch(number: int) -> Tensors:
    """The global batch of this number."""
    generator = torch.Generator().manual_seed(number)
    tokens, labels = torch.randint(0, 256, (2, 4, 8), generator=generator)
    labels[torch.rand(4, 8, generator=generator) < 0.2] = -100
    return {"tokens": tokens, "labels": labels}


def other_weights(shapes: Shapes, number: int) -> Tensors:
    """Weights of this number, by name: values that bf16 holds."""
    generator = torch.Generator().manual_seed(1000 + number)
    return {name: torch.randn(shape, generator=generator).div(4).bfloat16().double() for name, shape in shapes.items()}


# -- the run -----------------------------------------------------------------------------------------------------------


class Program:
    """Makes a case's calls on one rank, and notes the result of each: ("done", value) or ("refused", code, is any away)."""

    def __init__(self, case: Case, folder: Path, texts: Path, world: World, shapes: Shapes) -> None:
        self.case, self.folder, self.world, self.shapes = case, folder, world, shapes
        self.plan = plan_from_dict(case.tables, texts)
        self.saved: list[str] = []
        self.log: list[tuple[Any, ...]] = []
        self.run = self._assembled()

    def follow(self) -> dict[str, Any]:
        for kind, *rest in self.case.calls:
            call: Callable[..., Any] = getattr(self, kind)
            try:
                self.log.append(("done", call(*rest)))
            except SleyError as error:
                where = self.run.memory.where
                is_away = any(where[part] in (Where.AWAY, Where.LEAVING) for part in self.case.parts)
                self.log.append(("refused", error.diagnostics[0].code, is_away, str(error)))
        self.run.save_weights(self.folder / "weights", precision="full")
        states = [load_file(path) for path in (self.folder / "weights").glob("*.safetensors")]
        rows = self.run.rows
        self.run.close()
        saved = {name: value for state in states for name, value in state.items()}
        return {"log": self.log, "rows": (rows.start, rows.stop), "weights": saved}

    def _assembled(self) -> Run:
        run = assemble(self.plan, self.world)
        masters = run.stepper.update.masters
        if isinstance(self.world.device, DrawnDevice) and masters.home:
            for _, master in masters.named_tensors():
                self.world.device.mark_host_memory(master)
        return run

    def _own(self, number: int) -> Tensors:
        return {name: value[self.run.rows] for name, value in batch(number).items()}

    def step(self, number: int) -> tuple[float, float]:
        row = self.run.step(self._own(number))
        return row["loss"], row["grad_norm"]

    def evaluate(self, number: int) -> float:
        return self.run.evaluate(self._own(number))

    def predict(self, number: int) -> Any:
        return self.run.predict(self._own(number), join=True)

    def offload(self, waits: bool, *parts: Any) -> None:
        moved = self.run.memory.offload(*parts)
        if waits:
            moved.wait()

    def onload(self, waits: bool, *parts: Any) -> None:
        moved = self.run.memory.onload(*parts)
        if waits:
            moved.wait()

    def save(self) -> None:
        self.saved.append(self.run.save_checkpoint(self.folder / f"checkpoint {len(self.log)}"))

    def load(self, number: int) -> int | None:
        if not self.saved:
            return None
        self.run.load_checkpoint(self.saved[number % len(self.saved)])
        return number % len(self.saved)

    def kill(self) -> None:
        self.run.close()
        self.run = self._assembled()
        if self.saved:
            self.run.load_checkpoint(self.saved[-1])

    def set(self, number: int) -> None:
        self.run.load_weights(other_weights(self.shapes, number))

    def write(self, which: float, how: str) -> str | None:
        """Writes one weight in place, or points it elsewhere; None while weights are away, which no program may write."""
        if self.run.memory.where["weights"] in (Where.AWAY, Where.LEAVING):
            return None
        self.run.memory.onload("weights").wait()
        name = list(self.shapes)[int(which * len(self.shapes))]
        for param in self.run.registry:
            if param.name == name:
                value = torch.full_like(param.parameter, which)
                with torch.no_grad():
                    param.parameter.copy_(value) if how == "copy" else setattr(param.parameter, "data", value)
        return name

    def freeze(self, pattern: str, *, on: bool = False) -> None:
        for param in self.run.registry:
            if fnmatchcase(param.name, pattern):
                param.parameter.requires_grad_(on)

    def thaw(self, pattern: str) -> None:
        self.freeze(pattern, on=True)

    def host(self, part: Any) -> Tensors:
        """Copies of the whole weights or masters of this rank."""
        whole = {param.name: param.shape for param in self.run.registry if param.shard is None}
        values = self.run.memory.host(part)
        return {name: value.detach().clone() for name, value in values if whole.get(name) == tuple(value.shape)}


def followed(cases: Sequence[Case], folder: Path, texts: Path, shapes: Shapes) -> list[dict[str, Any]]:
    """The results of the calls of each case on this rank."""
    results = []
    for case in cases:
        rank = int(os.environ.get("RANK", "0"))
        device = None if case.order is None else DrawnDevice(order=2 * case.order + rank)
        with nullcontext() if device is None else device.watching():
            with World.join(device or "cpu") as world:
                results.append(Program(case, folder / str(case.seed), texts, world, shapes).follow())
            gc.collect()  # the run, and with it host memory that copies may use
    return results


# -- the plain loop ----------------------------------------------------------------------------------------------------


class Loop(PlainLoop):
    """The plain loop of a case, from the run's first weights, with what a program does between steps."""

    def __init__(self, case: Case, texts: Path) -> None:
        plan = changed(PLAN, precision={"compute": "fp32" if case.compute == "bf16" else "fp64"})
        with running(plan, texts) as run:
            first = weights(run)
        layers = [(layer.name, layer.module) for layer in run.layers]
        for _, module in layers if case.compute == "bf16" else ():
            module.bfloat16()
        table = case.optimizer
        loss = CrossEntropy(CrossEntropyConfig())
        super().__init__(layers, loss, optimizer=lambda named: _optimizer(table, named), clip_norm=table["clip_norm"])
        self.load(first)
        self.saved: list[tuple[Tensors, Any]] = []
        self.first = self.state()

    @property
    def shapes(self) -> Shapes:
        return {name: tuple(value.shape) for name, value in self.stepped.items()}

    def state(self) -> tuple[Tensors, Any]:
        masters = {name: master.detach().clone() for name, master in self.stepped.items()}
        return masters, deepcopy(self.optimizer.state_dict())

    def restore(self, state: tuple[Tensors, Any]) -> None:
        self.load(state[0])
        self.optimizer.load_state_dict(deepcopy(state[1]))

    @torch.no_grad()
    def write(self, name: str, value: float) -> None:
        """As a program writes a weight: its master follows where the rounded one is another."""
        working, master = self.parameters[name], self.stepped[name]
        working.fill_(value)
        master.copy_(torch.where(working != master.to(working.dtype), working.to(master.dtype), master))

    def freeze(self, pattern: str, *, on: bool) -> None:
        for name, parameter in self.parameters.items():
            if fnmatchcase(name, pattern):
                parameter.requires_grad_(on)
                self.stepped[name].requires_grad_(on)


def _optimizer(table: Tables, named: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    if table["use"] == "core.sgd":
        return torch.optim.SGD(parameters, lr=table["lr"], momentum=table["momentum"])
    return torch.optim.AdamW(parameters, lr=table["lr"], betas=(0.9, 0.95), eps=table["eps"], weight_decay=0.0)


def judge(case: Case, loop: Loop, ranks: Sequence[dict[str, Any]]) -> int:
    """Has the loop make the calls that were not refused. Raises AssertionError for the first that differs, and for a refusal
    that has no reason; returns how many were refused.
    """
    num_refused = 0
    for number, (kind, *rest) in enumerate(case.calls):
        place = f"call {number}, {kind} {rest}"
        results = [rank["log"][number] for rank in ranks]
        if any(result[0] == "refused" for result in results):
            for result in results:
                assert result[0] == "refused", f"{place}: refused on some ranks alone: {results}"
                assert result[1] in REFUSALS, f"{place}: {result}"
                assert result[2], f"{place}: refused, and nothing is away: {result}"
            num_refused += 1
            continue
        _judge(case, loop, kind, rest, [result[1] for result in results], [rank["rows"] for rank in ranks], place)
    saved = next(rank["weights"] for rank in ranks if rank["weights"])
    for name, master in loop.stepped.items():
        _close(case, saved[name], master.detach(), f"{name} at the end")
    return num_refused


def _judge(
    case: Case, loop: Loop, kind: str, rest: Sequence[Any], values: Sequence[Any], rows: Sequence[Any], place: str
) -> None:
    if kind in ("step", "evaluate"):
        micros = [{name: value[at : at + 1] for name, value in batch(rest[0]).items()} for at in range(4)]
        step = loop.step(micros) if kind == "step" else None
        wanted = loop.evaluate(micros) if step is None else (step.loss, step.grad_norm)
        for value in values:
            _close(case, torch.tensor(value), torch.tensor(wanted), place)
    elif kind == "predict":
        with torch.no_grad():
            output = loop.forward(batch(rest[0]))
        assert any(value is not None for value in values), f"{place}: nobody has the output"
        for value, (first, last) in zip(values, rows, strict=True):
            if value is not None:
                _close(case, value, output[first:last], place)
    elif kind == "host":
        held = loop.stepped if rest[0] == "masters" else loop.parameters
        for value in values:
            for name, tensor in value.items():
                _close(case, tensor, held[name].detach(), f"{place}: {name}")
    elif kind == "save":
        loop.saved.append(loop.state())
    elif kind == "load" and values[0] is not None:
        loop.restore(loop.saved[values[0]])
    elif kind == "kill":
        loop.freeze("*", on=True)
        loop.restore(loop.saved[-1] if loop.saved else loop.first)
    elif kind == "set":
        loop.load(other_weights(loop.shapes, rest[0]))
    elif kind == "write" and values[0] is not None:
        loop.write(values[0], rest[0])
    elif kind in ("freeze", "thaw"):
        loop.freeze(rest[0], on=kind == "thaw")


def _close(case: Case, value: Tensor, wanted: Tensor, place: str) -> None:
    value, wanted = value.double(), wanted.double()
    error = float((value - wanted).norm()) / max(float(wanted.norm()), 1e-3)
    assert error <= TOLERANCE[case.compute], f"{place}: off by {error:.3g}"


# -- tests -------------------------------------------------------------------------------------------------------------


def check(ranks: Any, cases: Sequence[Case], texts: Path, folder: Path) -> int:
    """Makes and judges these cases; returns how many calls were refused."""
    num_refused = 0
    for world in sorted({case.world for case in cases}):
        same = [case for case in cases if case.world == world]
        loops = [Loop(case, texts) for case in same]
        by_rank = ranks(world, 60 + 20 * len(same))(followed, same, folder, texts, loops[0].shapes)
        for at, (case, loop) in enumerate(zip(same, loops, strict=True)):
            try:
                num_refused += judge(case, loop, [rank[at] for rank in by_rank])
            except AssertionError as error:
                raise AssertionError(f"{case}\n{error}") from error
    return num_refused


@pytest.mark.parametrize("number", SAMPLE)
def test_a_fixed_sample_equals_a_plain_loop(ranks: Any, texts: Path, tmp_path: Path, number: int) -> None:
    assert check(ranks, [drawn(number)], texts, tmp_path) > 0, "nothing is refused"


AWAY = ("offload", True)
BACK = ("onload", False, "weights", "buffers", "masters", "optimizer_states", "handlers")
COMES = [("offload", False), ("onload", False)]
HARD: dict[str, tuple[str, str, str, int | None, list[Call]]] = {
    "saved while weights are away and masters at home": ("alone", "on the host", "bf16", None, [AWAY, ("save",), ("kill",)]),
    "saved while weights come": ("alone", "on the host", "bf16", 1, [*COMES, ("save",), ("kill",)]),
    "loaded while gradients are away": (
        *("dp2 bucketed", "everything", "fp64", None),
        [("step", 1), ("save",), AWAY, BACK, ("load", 0)],
    ),
    "pointed elsewhere before it left": (
        *("alone", "everything", "bf16", None),
        [("write", 0.3, "data"), AWAY, ("save",), ("kill",)],
    ),
    "written, and read as masters": ("alone", "on the host", "fp64", None, [("write", 0.3, "copy"), ("host", "masters")]),
    "loaded into shards of the optimizer": ("dp2 sharded", "everything", "bf16", None, [("set", 1), ("host", "weights")]),
    "loaded into shards of weights": ("wp2", "everything", "bf16", None, [("set", 1), ("step", 2)]),
    "loaded into stages": ("interleaved", "everything", "fp64", None, [("set", 1), ("step", 2)]),
}
"""Sequences that are easy to get wrong: layout, what moves, precision, order of copies, calls."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", HARD)
def test_a_hard_sequence_equals_a_plain_loop(ranks: Any, texts: Path, tmp_path: Path, name: str) -> None:
    layout, offload, compute, order, calls = HARD[name]
    end: list[Call] = [("onload", False), ("step", 100)]
    check(ranks, [Case(0, layout, offload, compute, OPTIMIZERS[0], order, [("step", 0), *calls, *end])], texts, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(CAMPAIGN))
def test_two_hundred_sequences_equal_a_plain_loop(ranks: Any, texts: Path, tmp_path: Path, part: int) -> None:
    first = random.SystemRandom().randrange(10**6) * 1000
    print(f"numbers {first} to {first + 19}")
    num_refused = check(ranks, [drawn(number) for number in range(first, first + 20)], texts, tmp_path)
    print(f"{num_refused} calls were refused")


def test_a_wrong_number_is_seen(texts: Path, tmp_path: Path) -> None:
    """A loop that writes another value does not pass."""
    case = Case(0, "alone", "everything", "fp64", OPTIMIZERS[1], None, [("step", 0), ("write", 0.3, "copy")])
    loop = Loop(case, texts)
    results = followed([case], tmp_path, texts, loop.shapes)
    judge(case, loop, results)
    results[0]["log"][1] = ("done", None)
    with pytest.raises(AssertionError, match="at the end: off by"):
        judge(case, Loop(case, texts), results)
