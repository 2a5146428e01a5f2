"""A case is drawn from a number: a model, how it is trained, and the layout that must not matter.

`draw(seed)` gives the same case everywhere; `describe(case)` prints it. Nothing here imports torch.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from drawn_layouts import draw_layout

WIDTH = 4
STARTS = ("", "", "", "", "zeros", "constant", "data", "filled", "normal", "loaded", "assigned", "applied")
CARRIES = ("made", "made", "kept", "input", "sent")

Tables = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One step. lengths: of each micro-batch of the global batch, in order; listed: whether they are given apart.

    Before it, by patterns of names: freeze, thaw: which parameters stop or start being trained; halve: which are written on.
    evaluates: after it.
    """

    lengths: list[int]
    listed: bool = False
    freeze: list[str] = field(default_factory=list)
    thaw: list[str] = field(default_factory=list)
    halve: list[str] = field(default_factory=list)
    evaluates: bool = False


@dataclass(frozen=True)
class Case:
    """model: the factory's options. training: loss and optimizer. tables: the rest of the plan. csv: a schedule file's text.

    refusals: codes of errors that may come instead of numbers, because this case holds what they refuse.
    """

    seed: int
    world: int
    model: dict[str, Any]
    training: Tables
    tables: Tables
    steps: list[Step]
    csv: str = ""
    refusals: frozenset[str] = frozenset()

    @property
    def micro_size(self) -> int:
        size: int = self.tables["batch"]["micro_size"]
        return size


@dataclass
class Traits:
    """What a layout asks of its model and its batches.

    parts: into how many parts the layers are cut. is_sliced: each sequence over several ranks. is_sharded: each weight.
    """

    parts: int
    is_sliced: bool
    is_sharded: bool
    recomputes: bool


def draw(seed: int, world: int | None = None) -> Case:
    """The case of a number. world: how many ranks it takes; drawn too, if left out."""
    r = random.Random(f"sley {seed} {world}")
    world = world or r.choice([1, 1, 2, 2, 2, 2, 3, 4, 4])
    layout = draw_layout(r, world)
    sizes = layout.tables["parallel"]
    traits = Traits(layout.parts, sizes["sp"] > 1, sizes["wp"] > 1, "activations" in layout.tables)
    from drawn_descriptions import draw_model, refusals

    model, loss = draw_model(r, traits, layout)
    return Case(
        seed,
        world,
        model,
        {"loss": loss, "optimizer": draw_optimizer(r), "learning_rate": {"warmup_steps": r.choice([0, 0, 2])}},
        layout.tables,
        draw_steps(r, layout, model),
        layout.csv,
        refusals(model, layout),
    )


def draw_optimizer(r: random.Random) -> Tables:
    clip = r.choice([{}, {}, {"clip_norm": 0.25}, {"clip_norm": 0.5, "clip_kind": "inf"}, {"clip_norm": 100.0}])
    decay = r.choice([0.0, 0.1])
    chosen: Tables = r.choice(
        [
            {"use": "core.sgd", "lr": 0.25, "momentum": 0.5, "weight_decay": decay},
            {"use": "core.sgd", "lr": 0.25, "momentum": 0.9, "nesterov": True},
            {"use": "core.adamw", "lr": 0.01, "eps": 1e-6, "weight_decay": decay},
            {"factory": "torch.optim:NAdam", "lr": 0.01, "weight_decay": decay, "options": {"eps": 1e-6}},
        ]
    )
    groups: list[Tables] = r.choice(
        [
            [],
            [],
            [{"match": "embed.*", "lr": chosen["lr"] / 4}],
            [{"match": "embed.*", "freeze": True}],
            [{"match": "*", "weight_decay": 0.05}],
        ]
    )
    return chosen | clip | ({"groups": groups} if groups else {})


def draw_steps(r: random.Random, layout: Any, model: dict[str, Any]) -> list[Step]:
    replicas, steps = layout.tables["parallel"]["dp"], []
    unit = layout.tables["parallel"]["sp"]
    frozen: list[str] = []
    for number in range(r.choice([2, 2, 3])):
        micros = layout.micros if number == 0 or layout.csv or r.random() < 0.7 else r.randint(1, 6)
        listed = r.random() < 0.3
        count = replicas * micros
        length = unit * r.choice([1, 2, 3])
        lengths = [unit * r.choice([1, 2, 3]) for _ in range(count)] if listed else [length] * count
        freeze, thaw = [], []
        if number and r.random() < 0.3:
            freeze = draw_names(r, model)
        if number and (frozen or model["frozen"]) and r.random() < 0.5:
            thaw = r.choice([frozen or model["frozen"], model["frozen"] or frozen])
        frozen = [*frozen, *freeze]
        halve = draw_names(r, model) if r.random() < 0.15 else []
        steps.append(Step(lengths, listed, freeze, thaw, halve, r.random() < 0.3))
    return steps


def draw_names(r: random.Random, model: dict[str, Any]) -> list[str]:
    """Patterns: of a kind of parameter, of a layer, of the first layers or of the last."""
    names = ["embed", *(f"blocks.{at}" for at in range(len(model["layers"]))), "head"]
    kind, at = r.randrange(4), r.randrange(1, len(names))
    if kind == 0:
        return [r.choice(["*.weight", "*.bias", "*.inner.*", "*.norm.*"])]
    if kind == 1:
        return [f"{r.choice(names)}.*"]
    return [f"{name}.*" for name in (names[:at] if kind == 2 else names[at:])]


def describe(case: Case) -> str:
    """Everything about the case, a few lines, and how to see it again."""
    lines = [f"case {case.seed}, on {case.world}: python replay.py {case.seed}"]
    model = dict(case.model)
    for part in ("embed", "head"):
        lines.append(f"  {part:8} {json.dumps(model.pop(part))}")
    for at, one in enumerate(model.pop("layers")):
        lines.append(f"  {at:<8} " + " ".join(f"{key}={value}" for key, value in one.items() if value != ""))
    lines.append(f"  model    {json.dumps({key: value for key, value in model.items() if value})}")
    lines.append(f"  training {json.dumps(case.training)}")
    lines.append(f"  layout   {json.dumps(case.tables)}")
    lines += [f"  step     {json.dumps({key: value for key, value in vars(step).items() if value})}" for step in case.steps]
    if case.csv:
        lines.append("  csv      " + case.csv.strip().replace("\n", " | "))
    return "\n".join(lines)
