"""Draws a case from a number: a model, its training, and the layout that must not matter."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from drawn_model import BODIES, BY_DATA, BY_POSITION, FORMS, MAY_BE_CHANGED, MIXES_POSITIONS, NEEDS_TOKENS

from sley_core.actions.action import loop, v
from sley_pp.schedules import write_csv
from sley_testing.plans import Tables
from sley_testing.runs import any_lists

WIDTH = 4
STARTS = ("", "", "", "zeros", "data", "loaded", "assigned", "applied")
CARRIES = ("made", "made", "kept", "input", "sent")
SCHEDULES = ("pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v", "pp.csv")
SQUARE = {
    **dict.fromkeys(("linear", "begins", "twice", "detaches", "broadcasts", "counts", "reads"), "inner"),
    **dict.fromkeys(("adds", "unused", "chooses"), "one"),
    "half_frozen": "two",
}
"""Bodies with a square matrix, and the module that has it: these can be tied to one another."""


@dataclass(frozen=True)
class Step:
    """lengths: of each micro-batch of the global batch; listed: whether they are given one by one.

    Before it, by patterns of names: freeze, thaw: parameters that stop or start being trained; halve: those that are written.
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
    """model: the factory's options. training: loss and optimizer. tables: the rest of the plan. csv: a schedule file's text."""

    seed: int
    world: int
    model: dict[str, Any]
    training: Tables
    tables: Tables
    steps: list[Step]
    csv: str = ""

    def __str__(self) -> str:
        lines = [f"case {self.seed} on {self.world}"]
        lines += [f"  {at}: {json.dumps(layer)}" for at, layer in enumerate(self.model["layers"])]
        lines.append(f"  model {json.dumps({key: value for key, value in self.model.items() if key != 'layers'})}")
        lines += [f"  training {json.dumps(self.training)}", f"  layout {json.dumps(self.tables)}"]
        lines += [f"  step {json.dumps({key: value for key, value in vars(step).items() if value})}" for step in self.steps]
        return "\n".join([*lines, *([f"  csv {self.csv!r}"] if self.csv else [])])


def draw(seed: int, world: int | None = None) -> Case:
    """The case of a number. world: how many ranks it takes; drawn too, if left out."""
    r = random.Random(f"sley {seed} {world}")
    world = world or r.choice([1, 1, 2, 2, 2, 2, 3, 4, 4])
    micros = r.randint(1, 6)
    tables, parts, csv = _layout(r, world, micros)
    model, loss = _model(r, parts, tables)
    training = {"loss": loss, "optimizer": _optimizer(r, model), "learning_rate": {"warmup_steps": r.choice([0, 0, 2])}}
    return Case(seed, world, model, training, tables, _steps(r, tables["parallel"], micros, csv, model), csv)


# -- layout ------------------------------------------------------------------------------------------------------------


def _layout(r: random.Random, world: int, micros: int) -> tuple[Tables, int, str]:
    """Returns tables of the plan, the number of parts of the model, and a schedule's text."""
    pp = r.choice([size for size in (1, 2, 3, 4) if world % size == 0])
    sp, wp = (r.choice([1, 1, *(size for size in (2,) if world // pp % size == 0)]) for _ in range(2))
    dp, micro_size = world // pp // sp, r.choice([1, 2])
    tables: Tables = {
        "batch": {"global_size": dp * micros * micro_size, "micro_size": micro_size},
        "parallel": {"dp": dp, "pp": pp, "sp": sp, "wp": wp, "cross_memory_attach": r.random() < 0.7},
        "precision": {"compute": "fp64", "accumulation": r.choice(["auto", "autograd", "direct", "direct"])},
    }
    parts, csv, name = pp, "", r.choice(SCHEDULES)
    if pp > 1:
        tables["pipeline"] = {"use": name}
        chunks = {"pp.interleaved": 2, "pp.zero_bubble_v": 2, "pp.csv": r.choice([1, 2])}.get(name, 1)
        parts = pp * chunks
        if name == "pp.csv":
            placement = v(pp) if chunks == 2 and r.random() < 0.5 else loop(pp, chunks)
            csv = write_csv(any_lists(placement, micros, r), placement)
        if r.random() < 0.4:
            tables["partition"] = {"use": "pp.uniform"}
    if wp > 1:
        tables["weights"] = {
            "use": "isp.communicator",
            "unit": r.choice(["layer", "module"]),
            "overlap": r.random() < 0.8,
            "ahead": r.choice([0, 1, 2]),
            "reduce": r.choice(["micro_batch", "step"]),
            "head": r.choice(["gather", "vocabulary"]),
            "embedding": r.choice(["gather", "hidden"]),
        }
    if sp > 1:
        tables["sequence"] = {"use": "isp.all_to_all"}
    if r.random() < 0.3:
        tables["activations"] = {"use": "core.recompute", "fraction": r.choice([0.5, 1.0])}
    if dp * sp > 1 and r.random() < 0.6:
        reducer: Tables = {"use": "dp.bucketed", "bucket_mb": r.choice([1e-4, 5e-4, 25.0])}
        tables["gradient_handlers"] = [reducer, *([{"use": "pp.shared_modules"}] if pp > 1 else [])]
    return tables, parts, csv


# -- model -------------------------------------------------------------------------------------------------------------


def _model(r: random.Random, parts: int, tables: Tables) -> tuple[dict[str, Any], Tables]:
    """The options of the factory, and the table of the loss: bodies and forms that may follow one another in this layout."""
    is_sliced, is_sharded = tables["parallel"]["sp"] > 1, tables["parallel"]["wp"] > 1
    count = max(parts - 2, 1) + r.choice([0, 0, 1, 2])
    known = set(BY_POSITION if is_sliced else BODIES)
    if is_sharded:  # refused: weights that are read without their module, and exchanges that the data decide
        known -= {"reads", *BY_DATA}
    bodies = [r.choice(sorted(known)) for _ in range(count)]
    if is_sliced:
        bodies[r.randrange(count)] = "attends"
    forms = [form for form in FORMS if not (is_sliced and form in MIXES_POSITIONS)]
    gives = [r.choice(["tensor", *forms]) if r.random() < 0.65 else "tensor" for _ in range(count + 1)]
    gives[-1] = "tensor" if gives[-1] in NEEDS_TOKENS else gives[-1]
    layers: list[dict[str, Any]] = [
        {"body": body, "take": take, "give": give, "carry": r.choice(CARRIES), "start": r.choice(STARTS)}
        for body, take, give in zip(bodies, gives, gives[1:], strict=False)
    ]
    shared: list[list[int]] = []
    if not is_sliced and count > 1 and r.random() < 0.25:
        first, *others = sorted(r.sample(range(count), r.randint(2, min(4, count))))
        if layers[first]["body"] != "begins":
            for other in others:
                layers[other]["body"], layers[other]["start"] = layers[first]["body"], ""
            shared = [[first, *others]]
    _keep_writable(layers, "activations" in tables)
    own = "" if tables.get("weights", {}).get("head") == "vocabulary" else r.choice(["", "", "", "Squares"])
    smoothing = r.choice([0.0, 0.1])
    loss = {"factory": f"drawn_model:{own}"} if own else {"use": "core.cross_entropy", "label_smoothing": smoothing}
    embed = {"give": gives[0], "padding": r.random() < 0.2, "positions": r.random() < 0.3}
    if is_sliced and not embed["positions"]:
        tables["sequence"]["positions"] = False
    model = {"width": WIDTH, "layers": layers, "embed": embed, "shared": shared}
    model["head"] = {"take": gives[-1], "bias": r.random() < 0.5}
    model["ties"] = _ties(r, model, tables)
    model["frozen"] = _names(r, model) if r.random() < 0.25 else []
    return model, loss


def _keep_writable(layers: list[dict[str, Any]], recomputes: bool) -> None:
    """Nobody else, no other output and no backward, has the memory that a layer writes on."""
    for at, layer in enumerate(layers):
        if layer["body"] != "begins":
            continue
        before = layers[at - 1] if at else {"body": "linear", "carry": "made"}
        form = layer["take"]
        fresh = before["body"] in MAY_BE_CHANGED and (not FORMS[form].carries or before["carry"] == "made")
        if recomputes or not fresh or FORMS[form].views or form in ("detached", "nested", "masked", "many", "scaled", "empty"):
            layer["body"] = "linear"
        elif layer["carry"] == "input" or (layer["carry"] == "kept" and FORMS[form].carries):
            layer["carry"] = "made"  # the kept tensor was made of the written one, and a backward reads that


def _ties(r: random.Random, model: dict[str, Any], tables: Tables) -> list[list[str]]:
    ties = []
    if r.random() < 0.3 and tables.get("weights", {}).get("embedding") != "hidden":
        ties.append(["embed.table.weight", "head.scores.weight"])
    taken = {place for places in model["shared"] for place in places}
    layers = [(at, layer["body"]) for at, layer in enumerate(model["layers"]) if at not in taken and layer["body"] in SQUARE]
    names = [f"blocks.{at}.body.{SQUARE[body]}.weight" for at, body in layers]
    if len(names) > 1 and r.random() < 0.5:
        ties.append(sorted(r.sample(names, r.randint(2, min(4, len(names))))))
    return ties


# -- training ----------------------------------------------------------------------------------------------------------


def _optimizer(r: random.Random, model: dict[str, Any]) -> Tables:
    """With an eps so large that no step depends on the rounding of a gradient that is almost zero."""
    clip = r.choice([{}, {}, {"clip_norm": 0.25}, {"clip_norm": 0.5, "clip_kind": "inf"}, {"clip_norm": 100.0}])
    decay = r.choice([0.0, 0.1])
    chosen: Tables = r.choice(
        [
            {"use": "core.sgd", "lr": 0.05, "momentum": 0.5, "weight_decay": decay},
            {"use": "core.sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True},
            {"use": "core.adamw", "lr": 0.01, "eps": 1e-3, "weight_decay": decay},
            {"factory": "torch.optim:NAdam", "lr": 0.01, "weight_decay": decay, "options": {"eps": 1e-3}},
        ]
    )
    low, frozen, all_decay = {"match": "embed.*", "lr": 0.01}, {"match": "embed.*", "freeze": True}, {"match": "*"}
    groups = r.choice([[], [], [low], [] if model["ties"] else [frozen], [all_decay | {"weight_decay": 0.05}]])
    return chosen | clip | ({"groups": groups} if groups else {})


def _steps(r: random.Random, sizes: dict[str, int], micros: int, csv: str, model: dict[str, Any]) -> list[Step]:
    steps: list[Step] = []
    frozen: list[str] = []
    for number in range(r.choice([2, 2, 3])):
        count = sizes["dp"] * (micros if number == 0 or csv or r.random() < 0.7 else r.randint(1, 6))
        listed, length = r.random() < 0.3, sizes["sp"] * r.choice([1, 2, 3])
        lengths = [sizes["sp"] * r.choice([1, 2, 3]) for _ in range(count)] if listed else [length] * count
        freeze = _names(r, model) if number and r.random() < 0.3 else []
        thaw = (frozen or model["frozen"]) if number and r.random() < 0.5 else []
        frozen = [*frozen, *freeze]
        halve = _names(r, model) if r.random() < 0.15 else []
        steps.append(Step(lengths, listed, freeze, thaw, halve, r.random() < 0.3))
    return steps


def _names(r: random.Random, model: dict[str, Any]) -> list[str]:
    """Patterns of a kind of parameter, or of one layer but the head, and tables tied to it, so that something stays trained."""
    layers = [*(f"blocks.{at}" for at in range(len(model["layers"]))), *([] if model["ties"] else ["embed"])]
    return [r.choice(["*.bias", "*.inner.*", "*.norm.*", *(f"{name}.*" for name in layers)])]
