"""Drawn models in drawn layouts have the numbers of a plain PyTorch loop. A failure prints its case; `draw(NUMBER)` has it.

A number stands for a case: a model, its training, and the layout that must not matter.
"""

from __future__ import annotations

import json
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
from drawn_model import BODIES, BY_DATA, BY_POSITION, FORMS, MAY_BE_CHANGED, MIXES_POSITIONS, NEEDS_TOKENS, batch
from torch import Tensor

from sley_core.actions import action
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.config import CrossEntropyConfig
from sley_core.data.order import Order
from sley_core.errors import SleyError
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_pp.schedules import write_csv
from sley_testing.collectives import assert_untouched, record_built_models
from sley_testing.parity import assert_same_bits
from sley_testing.plain import PlainLoop, assert_step
from sley_testing.plans import Tables
from sley_testing.runs import gradients, random_action_lists, weights

CAMPAIGN = 20
"""Parts of 100 draws, of numbers of their own in each campaign."""

Tensors = dict[str, Tensor]

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
    """lengths: of each microbatch of the global batch; listed: whether they are given one by one.

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
            placement = action.v(pp) if chunks == 2 and r.random() < 0.5 else action.loop(pp, chunks)
            csv = write_csv(random_action_lists(placement, micros, r), placement)
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


# -- runs and loops ----------------------------------------------------------------------------------------------------


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
    """The microbatches of a step's global batch, in order."""
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
    with World.join("cpu") as world, record_built_models() as drafts:
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
    """This rank's samples, in a list of microbatches or as one batch."""
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
