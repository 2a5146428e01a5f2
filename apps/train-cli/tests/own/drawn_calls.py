"""Draws sequences of a program's calls between steps, makes them on the ranks of a run, and has a plain loop do the same.

A number stands for one case: layout, precision, what moves, device and calls. Each call either has the plain loop's numbers,
or is refused by name while memory is away, and then it has changed nothing.
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

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

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
LAYOUTS: dict[str, tuple[int, Tables]] = {
    "alone": (1, {}),
    "dp each": (2, {"parallel": {"dp": 2}}),
    "dp bucketed": (2, {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed", "bucket_mb": 0.003}]}),
    "dp sharded": (2, {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.003}]}),
    "stages": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}}),
    "interleaved": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.interleaved"}}),
    "zero bubble": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.zero_bubble_h1"}}),
    "sharded weights": (2, {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}}),
    "slices": (2, {"parallel": {"sp": 2}, "sequence": {"use": "isp.all_to_all"}}),
}
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
"""Of a call while a part is away: of a step, an evaluation or a load; of a save of weights; of a checkpoint."""

PATTERNS = ("blocks.0.*", "*.norm*", "head.*")
NUM_CALLS = 9
TOLERANCE = {"fp64": 1e-9, "bf16": 2e-2}


@dataclass
class Case:
    """order: of drawn copies; None for a plain CPU."""

    seed: int
    world: int
    layout: str
    offload: str
    compute: str
    optimizer: Tables
    order: int | None
    calls: list[Call] = field(default_factory=list)

    @property
    def tables(self) -> Tables:
        """The run's plan."""
        offload = OFFLOADS[self.offload][0]
        changes = {"optimizer": self.optimizer, "precision": {"compute": self.compute}, "offload": offload}
        return changed(PLAN, **changes, **LAYOUTS[self.layout][1])

    def __str__(self) -> str:
        parts = f"{self.layout}, {self.offload}, {self.compute}, {self.optimizer['use']}, order {self.order}"
        return f"case {self.seed}: {parts}\n  " + "\n  ".join(map(str, self.calls))


def drawn(seed: int, world: int | None = None) -> Case:
    """The case of this number. world: of a layout for so many ranks."""
    draw = random.Random(f"calls {seed}")
    layout = draw.choice([name for name, (size, _) in LAYOUTS.items() if world in (None, size)])
    compute = draw.choice(["fp64", "fp64", "bf16"])
    offload = draw.choice([name for name in OFFLOADS if name != "shared" or layout.startswith("dp")])
    optimizer = OPTIMIZERS[0] if compute == "bf16" else draw.choice(OPTIMIZERS)
    order = draw.choice([None, draw.randrange(1000)])
    case = Case(seed, LAYOUTS[layout][0], layout, offload, compute, optimizer, order)
    parts = OFFLOADS[offload][1]
    kinds = ["step"] * 4 + ["offload"] * 4 + ["save", "save", "load", "kill", "evaluate", "predict", "host", "set"]
    kinds += ["write", "write"] if layout != "sharded weights" else []
    kinds += ["freeze", "thaw"] if layout != "dp sharded" else []
    case.calls.append(("step", 0))
    while len(case.calls) < NUM_CALLS:
        kind = draw.choice(kinds)
        if kind != "offload":
            case.calls.append(_call(draw, kind, len(case.calls)))
            continue
        case.calls.append(("offload", draw.random() < 0.5, *_some(draw, parts, 0.5)))
        for _ in range(draw.choice([0, 0, 1, 2])):
            inside = draw.choice(["save", "save", "host", *kinds])
            case.calls.append(_call(draw, inside if inside != "offload" else "host", len(case.calls)))
        if draw.random() < 0.7:
            case.calls.append(("onload", draw.random() < 0.3, *_some(draw, parts, 0.3)))
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
    drawn = torch.Generator().manual_seed(number)
    tokens, labels = torch.randint(0, 256, (2, 4, 8), generator=drawn)
    labels[torch.rand(4, 8, generator=drawn) < 0.2] = -100
    return {"tokens": tokens, "labels": labels}


def other_weights(shapes: Shapes, number: int) -> Tensors:
    """Weights of this number, by name: values that bf16 holds."""
    drawn = torch.Generator().manual_seed(1000 + number)
    return {name: torch.randn(shape, generator=drawn).div(4).bfloat16().double() for name, shape in shapes.items()}


class Program:
    """Makes a case's calls on one rank, and notes what came of each: ("done", value) or ("refused", code, is any away)."""

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
                is_away = any(where[part] in (Where.AWAY, Where.LEAVING) for part in OFFLOADS[self.case.offload][1])
                self.log.append(("refused", error.diagnostics[0].code, is_away, str(error)))
        self.run.save_weights(self.folder / "weights", precision="full")
        found = [load_file(path) for path in (self.folder / "weights").glob("*.safetensors")]
        rows = self.run.rows
        self.run.close()
        return {
            "log": self.log,
            "rows": (rows.start, rows.stop),
            "weights": {name: value for state in found for name, value in state.items()},
        }

    def _assembled(self) -> Run:
        run = assemble(self.plan, self.world)
        masters = run.stepper.update.masters
        if isinstance(self.world.device, DrawnDevice) and masters.home:
            for _, master in masters.held():
                self.world.device.keeps_on_host(master)
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
        found = self.run.memory.host(part)
        return {name: one.detach().clone() for name, one in found if whole.get(name) == tuple(one.shape)}


def made(cases: Sequence[Case], folder: Path, texts: Path, shapes: Shapes) -> list[dict[str, Any]]:
    """What came of the calls of each case on this rank."""
    found = []
    for case in cases:
        own = folder / str(case.seed)
        rank = int(os.environ.get("RANK", "0"))
        device = None if case.order is None else DrawnDevice(order=2 * case.order + rank)
        with nullcontext() if device is None else device.watching():
            with World.join(device or "cpu") as world:
                found.append(Program(case, own, texts, world, shapes).follow())
            gc.collect()  # the run, and with it host memory that copies may use
    return found


class Loop(PlainLoop):
    """The plain loop with masters, if it computes with a narrower type than it steps."""

    def __init__(self, layers: Any, optimizer: Tables, narrow: torch.dtype | None) -> None:
        super().__init__(
            layers,
            CrossEntropy(CrossEntropyConfig()),
            optimizer=lambda named: _optimizer(optimizer, named),
            clip_norm=optimizer["clip_norm"],
        )
        self.masters = self.parameters
        self.saved: list[tuple[Tensors, Any]] = []
        if narrow is not None:
            self.masters = {name: nn.Parameter(one.detach().clone()) for name, one in self.parameters.items()}
            self.optimizer = _optimizer(optimizer, list(self.masters.items()))
            for parameter in self.parameters.values():
                parameter.data = parameter.data.to(narrow)
        self.first = self.state()

    def train(self, micros: Sequence[Tensors]) -> tuple[float, float]:
        """Takes a step; returns loss and norm. Gradients are summed in the masters' type."""
        if self.masters is self.parameters:
            step = self.step(micros)
            return step.loss, step.grad_norm
        weight = sum(self.loss.weight(micro) for micro in micros)
        total, sums = 0.0, {name: torch.zeros_like(one) for name, one in self.masters.items()}
        for micro in micros:
            loss = self.loss.loss(self.forward(micro), micro)
            total += loss.item()
            (loss / weight).backward()
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    sums[name] += parameter.grad
                parameter.grad = None
        trained = [name for name, one in self.parameters.items() if one.requires_grad]
        for name, master in self.masters.items():
            master.grad = sums[name] if name in trained else None
        norm = nn.utils.clip_grad_norm_([self.masters[name] for name in trained], self.clip_norm)
        self.optimizer.step()
        self._round()
        return total / weight, float(norm)

    def state(self) -> tuple[Tensors, Any]:
        return {name: one.detach().clone() for name, one in self.masters.items()}, deepcopy(self.optimizer.state_dict())

    @torch.no_grad()
    def restore(self, state: tuple[Tensors, Any]) -> None:
        self.set(state[0])
        self.optimizer.load_state_dict(deepcopy(state[1]))

    @torch.no_grad()
    def set(self, values: Tensors) -> None:
        for name, master in self.masters.items():
            master.copy_(values[name])
        self._round()

    @torch.no_grad()
    def write(self, name: str, value: float) -> None:
        """As a program writes a weight: its master follows where the rounded one is another."""
        working, master = self.parameters[name], self.masters[name]
        working.fill_(value)
        master.copy_(torch.where(working != master.to(working.dtype), working.to(master.dtype), master))

    def freeze(self, pattern: str, *, on: bool) -> None:
        for name, parameter in self.parameters.items():
            if fnmatchcase(name, pattern):
                parameter.requires_grad_(on)

    @torch.no_grad()
    def _round(self) -> None:
        if self.masters is not self.parameters:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])


def _optimizer(table: Tables, named: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    if table["use"] == "core.sgd":
        return torch.optim.SGD(parameters, lr=table["lr"], momentum=table["momentum"])
    return torch.optim.AdamW(parameters, lr=table["lr"], betas=(0.9, 0.95), eps=table["eps"], weight_decay=0.0)


def plain_loop(case: Case, texts: Path) -> Loop:
    """The case's model, with its first weights, in a plain loop."""
    tables = changed(PLAN, precision={"compute": "fp32" if case.compute == "bf16" else "fp64"})
    with World.alone("cpu") as world:
        run = assemble(plan_from_dict(tables, texts), world)
        run.close()
    layers = [(layer.name, layer.module) for layer in run.layers]
    return Loop(layers, case.optimizer, torch.bfloat16 if case.compute == "bf16" else None)


def judge(case: Case, loop: Loop, ranks: Sequence[dict[str, Any]]) -> int:
    """Has the loop make the calls that were not refused. Raises AssertionError for the first that differs, and for a refusal
    that has no reason; returns how many were refused.
    """
    num_refused = 0
    for number, (kind, *rest) in enumerate(case.calls):
        place = f"call {number}, {kind} {rest}"
        every = [rank["log"][number] for rank in ranks]
        if any(one[0] == "refused" for one in every):
            for one in every:
                assert one[0] == "refused", f"{place}: refused on some ranks alone: {every}"
                assert one[1] in REFUSALS, f"{place}: {one}"
                assert one[2], f"{place}: refused, and nothing is away: {one}"
            num_refused += 1
            continue
        values = [one[1] for one in every]
        _judge(case, loop, kind, rest, values, [rank["rows"] for rank in ranks], place)
    found = next(rank["weights"] for rank in ranks if rank["weights"])
    for name, master in loop.masters.items():
        _close(case, found[name], master.detach(), f"{name} at the end")
    return num_refused


def _judge(
    case: Case, loop: Loop, kind: str, rest: Sequence[Any], values: Sequence[Any], rows: Sequence[Any], place: str
) -> None:
    if kind in ("step", "evaluate"):
        micros = [{name: value[at : at + 1] for name, value in batch(rest[0]).items()} for at in range(4)]
        wanted = loop.train(micros) if kind == "step" else loop.evaluate(micros)
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
        held = loop.masters if rest[0] == "masters" else loop.parameters
        for value in values:
            for name, one in value.items():
                _close(case, one, held[name].detach(), f"{place}: {name}")
    elif kind == "save":
        loop.saved.append(loop.state())
    elif kind == "load" and values[0] is not None:
        loop.restore(loop.saved[values[0]])
    elif kind == "kill":
        loop.freeze("*", on=True)
        loop.restore(loop.saved[-1] if loop.saved else loop.first)
    elif kind == "set":
        loop.set(other_weights({name: tuple(one.shape) for name, one in loop.masters.items()}, rest[0]))
    elif kind == "write" and values[0] is not None:
        loop.write(values[0], rest[0])
    elif kind in ("freeze", "thaw"):
        loop.freeze(rest[0], on=kind == "thaw")


def _close(case: Case, found: Tensor, wanted: Tensor, place: str) -> None:
    found, wanted = found.double(), wanted.double()
    error = float((found - wanted).norm()) / max(float(wanted.norm()), 1e-3)
    assert error <= TOLERANCE[case.compute], f"{place}: off by {error:.3g}"
