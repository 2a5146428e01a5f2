"""Random models in random layouts have the numbers of a plain PyTorch loop.

A number stands for a case: a model, its training and its layout. A failure prints the case; `draw(NUMBER)` returns it.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import drawn_model
import pytest
import torch
from drawn_model import BODIES, BY_DATA, BY_POSITION, FORMS, MAY_BE_CHANGED, MIXES_POSITIONS, NEEDS_TOKENS, batch
from matrix_optimizers import Orthogonal

from sley_core.comm.world import World
from sley_core.errors import SleyError
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_core.plugin import CrossEntropyConfig
from sley_testing.collectives import assert_untouched, record_built_models
from sley_testing.parity import assert_same_bits
from sley_testing.plain import PlainLoop, assert_step
from sley_testing.plans import Tables
from sley_testing.runs import RunRecord, Tensors, gradients, weights
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

CAMPAIGN = 20
"""The number of parts of a campaign, with 100 new cases each."""

WIDTH = 4
STARTS = ("", "", "", "zeros", "data", "loaded", "assigned", "applied")
CARRIES = ("made", "made", "kept", "input", "sent")
SCHEDULES = ("pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v")
SQUARE = {
    **dict.fromkeys(("linear", "begins", "twice", "detaches", "broadcasts", "counts", "reads"), "inner"),
    **dict.fromkeys(("adds", "unused", "chooses"), "one"),
    "half_frozen": "two",
}
"""Bodies with a square matrix, which can be tied, and the module that has it."""


@dataclass(frozen=True)
class Step:
    """The microbatches of a step. lengths: of each microbatch of the global batch. is_list: whether a program passes a list."""

    lengths: list[int]
    is_list: bool


@dataclass(frozen=True)
class Case:
    """model: the options of the factory. training: loss, optimizer and learning rate. tables: the rest of the plan."""

    seed: int
    world: int
    model: dict[str, Any]
    training: Tables
    tables: Tables
    steps: list[Step]

    def __str__(self) -> str:
        lines = [f"case {self.seed} on {self.world} ranks"]
        lines += [f"  {index}: {json.dumps(layer)}" for index, layer in enumerate(self.model["layers"])]
        lines.append(f"  model {json.dumps({key: value for key, value in self.model.items() if key != 'layers'})}")
        lines += [f"  training {json.dumps(self.training)}", f"  layout {json.dumps(self.tables)}"]
        return "\n".join([*lines, *(f"  step {json.dumps(vars(step))}" for step in self.steps)])


def draw(seed: int, world: int | None = None) -> Case:
    """Returns the case of a number. world: the number of ranks; drawn if None."""
    r = random.Random(f"sley {seed} {world}")
    world = world or r.choice([1, 1, 2, 2, 2, 2, 3, 4, 4])
    num_microbatches = r.randint(1, 6)
    tables, num_stages = _draw_layout(r, world, num_microbatches)
    model, loss = _draw_model(r, num_stages, tables)
    training = {"loss": loss, "optimizer": _draw_optimizer(r, model), "learning_rate": {"warmup_steps": r.choice([0, 0, 2])}}
    return Case(seed, world, model, training, tables, _draw_steps(r, tables["parallel"], num_microbatches))


def draw_matrix_case(seed: int, world: int | None = None) -> Case:
    """Returns the case of a number with a matrix optimizer, mostly in a layout in which matrices are split."""
    case = draw(seed, world)
    r = random.Random(f"matrix {seed} {world}")
    config = {**case.training["optimizer"], "factory": "matrix_optimizers:Orthogonal", "scope": "matrix", "lr": 0.02}
    for key in ("use", "momentum", "nesterov", "eps", "options"):
        config.pop(key, None)
    tables = {**case.tables}
    if tables["parallel"]["dp"] * tables["parallel"]["sp"] > 1 and r.random() < 0.7:
        reducer = {"use": "dp.sharded", "bucket_mb": r.choice([1e-4, 5e-4, 25.0])}
        ties = [{"use": "pp.shared_modules"}] if tables["parallel"]["pp"] > 1 else []
        tables["gradient_handlers"] = [reducer, *ties]
    return replace(case, training={**case.training, "optimizer": config}, tables=tables)


Drawer = Callable[..., Case]


def _draw_layout(r: random.Random, world: int, num_microbatches: int) -> tuple[Tables, int]:
    """Returns tables of the plan, and the number of model parts that its pipeline needs."""
    pp = r.choice([size for size in (1, 2, 3, 4) if world % size == 0])
    sp, wp = (r.choice([1, 1, *(size for size in (2,) if world // pp % size == 0)]) for _ in range(2))
    dp, micro_size = world // pp // sp, r.choice([1, 2])
    tables: Tables = {
        "batch": {"global_size": dp * num_microbatches * micro_size, "micro_size": micro_size},
        "parallel": {"dp": dp, "pp": pp, "sp": sp, "wp": wp, "cross_memory_attach": r.random() < 0.7},
        "precision": {"compute": "fp64", "accumulation": r.choice(["auto", "autograd", "direct", "direct"])},
    }
    num_parts, schedule = pp, r.choice(SCHEDULES)
    if pp > 1:
        tables["pipeline"] = {"use": schedule}
        num_parts = pp * (2 if schedule in ("pp.interleaved", "pp.zero_bubble_v") else 1)
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
    return tables, num_parts


def _draw_model(r: random.Random, num_parts: int, tables: Tables) -> tuple[dict[str, Any], Tables]:
    """Returns the options of the factory and the table of the loss. The layers fit each other and the layout."""
    is_sliced, is_sharded = tables["parallel"]["sp"] > 1, tables["parallel"]["wp"] > 1
    count = max(num_parts - 2, 1) + r.choice([0, 0, 1, 2])
    allowed = set(BY_POSITION if is_sliced else BODIES)
    if is_sharded:  # refused: weights that are read without their module, and exchanges that depend on the data
        allowed -= {"reads", *BY_DATA}
    bodies = [r.choice(sorted(allowed)) for _ in range(count)]
    if is_sliced:
        bodies[r.randrange(count)] = "attends"
    forms = [form for form in FORMS if not (is_sliced and form in MIXES_POSITIONS)]
    outputs = [r.choice(["tensor", *forms]) if r.random() < 0.65 else "tensor" for _ in range(count + 1)]
    outputs[-1] = "tensor" if outputs[-1] in NEEDS_TOKENS else outputs[-1]
    layers: list[dict[str, Any]] = [
        {"body": body, "take": take, "give": give, "carry": r.choice(CARRIES), "start": r.choice(STARTS)}
        for body, take, give in zip(bodies, outputs, outputs[1:], strict=False)
    ]
    shared: list[list[int]] = []
    if not is_sliced and count > 1 and r.random() < 0.25:
        first, *copies = sorted(r.sample(range(count), r.randint(2, min(4, count))))
        if layers[first]["body"] != "begins":
            for index in copies:
                layers[index]["body"], layers[index]["start"] = layers[first]["body"], ""
            shared = [[first, *copies]]
    _avoid_forbidden_writes(layers, "activations" in tables)
    own_loss = "" if tables.get("weights", {}).get("head") == "vocabulary" else r.choice(["", "", "", "Squares"])
    smoothing = r.choice([0.0, 0.1])
    loss = {"factory": f"drawn_model:{own_loss}"} if own_loss else {"use": "core.cross_entropy", "label_smoothing": smoothing}
    embed = {"give": outputs[0], "padding": r.random() < 0.2, "positions": r.random() < 0.3}
    if is_sliced and not embed["positions"]:
        tables["sequence"]["positions"] = False
    model = {"width": WIDTH, "layers": layers, "embed": embed, "shared": shared}
    model["head"] = {"take": outputs[-1], "bias": r.random() < 0.5}
    model["ties"] = _draw_ties(r, model, tables)
    names = [*(f"blocks.{index}" for index in range(count)), *([] if model["ties"] else ["embed"])]
    patterns = ["*.bias", "*.inner.*", "*.norm.*", *(f"{name}.*" for name in names)]
    model["frozen"] = [r.choice(patterns)] if r.random() < 0.25 else []
    return model, loss


def _avoid_forbidden_writes(layers: list[dict[str, Any]], recomputes: bool) -> None:
    """Replaces a layer that writes to its input if another output or a backward needs that memory."""
    for index, layer in enumerate(layers):
        if layer["body"] != "begins":
            continue
        before = layers[index - 1] if index else {"body": "linear", "carry": "made"}
        form = layer["take"]
        is_writable = before["body"] in MAY_BE_CHANGED and (not FORMS[form].carries or before["carry"] == "made")
        is_shared = FORMS[form].views or form in ("detached", "nested", "masked", "many", "scaled", "empty")
        if recomputes or not is_writable or is_shared:
            layer["body"] = "linear"
        elif layer["carry"] == "input" or (layer["carry"] == "kept" and FORMS[form].carries):
            layer["carry"] = "made"  # a backward reads the written tensor, from which the kept one was computed


def _draw_ties(r: random.Random, model: dict[str, Any], tables: Tables) -> list[list[str]]:
    ties = []
    if r.random() < 0.3 and tables.get("weights", {}).get("embedding") != "hidden":
        ties.append(["embed.table.weight", "head.scores.weight"])
    shared = {index for indices in model["shared"] for index in indices}
    bodies = [(index, layer["body"]) for index, layer in enumerate(model["layers"]) if index not in shared]
    names = [f"blocks.{index}.body.{SQUARE[body]}.weight" for index, body in bodies if body in SQUARE]
    if len(names) > 1 and r.random() < 0.5:
        ties.append(sorted(r.sample(names, r.randint(2, min(4, len(names))))))
    return ties


def _draw_optimizer(r: random.Random, model: dict[str, Any]) -> Tables:
    """Returns the table of an optimizer with a large eps, so that no step depends on the rounding of a tiny gradient."""
    clip = r.choice([{}, {}, {"clip_norm": 0.25}, {"clip_norm": 0.5, "clip_kind": "inf"}, {"clip_norm": 100.0}])
    decay = r.choice([0.0, 0.1])
    optimizer: Tables = r.choice(
        [
            {"use": "core.sgd", "lr": 0.05, "momentum": 0.5, "weight_decay": decay},
            {"use": "core.sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True},
            {"use": "core.adamw", "lr": 0.01, "eps": 1e-3, "weight_decay": decay},
            {"factory": "torch.optim:NAdam", "lr": 0.01, "weight_decay": decay, "options": {"eps": 1e-3}},
        ]
    )
    low, frozen, all_decay = {"match": "embed.*", "lr": 0.01}, {"match": "embed.*", "freeze": True}, {"match": "*"}
    groups = r.choice([[], [], [low], [] if model["ties"] else [frozen], [all_decay | {"weight_decay": 0.05}]])
    return optimizer | clip | ({"groups": groups} if groups else {})


def _draw_steps(r: random.Random, sizes: dict[str, int], num_microbatches: int) -> list[Step]:
    steps: list[Step] = []
    for number in range(r.choice([2, 2, 3])):
        count = sizes["dp"] * (num_microbatches if number == 0 or r.random() < 0.7 else r.randint(1, 6))
        is_list, length = r.random() < 0.3, sizes["sp"] * r.choice([1, 2, 3])
        lengths = [sizes["sp"] * r.choice([1, 2, 3]) for _ in range(count)] if is_list else [length] * count
        steps.append(Step(lengths, is_list))
    return steps


# -- runs and loops ----------------------------------------------------------------------------------------------------


@dataclass
class Results(RunRecord):
    """A record of one rank with the weights after each step."""

    weights_by_step: list[Tensors] = field(default_factory=list)


def plan_of(case: Case, folder: Path) -> Any:
    fixed: dict[str, Any] = {
        "run": {"name": "drawn", "steps": 99, "device": "cpu", "seed": case.seed % 1000},
        "model": {"factory": "drawn_model:model", "options": case.model},
        "data": {"factory": "drawn_model:Rows"},
        "limits": {"collective_timeout_s": 20.0},
    }
    return plan_from_dict({**fixed, **case.training, **case.tables}, folder)


def draw_valid(seed: int, folder: Path, world: int | None = None, drawer: Drawer = draw) -> Case:
    """Returns the case of a number, or the next one that the check of plans accepts."""
    for attempt in range(50):
        case = drawer(seed + attempt * 10**9, world)
        world = case.world
        try:
            if not check_plan(plan_of(case, folder), world):
                return case
        except SleyError:
            continue
    raise AssertionError(f"50 draws of {seed} are no valid plan")


def micro_batches(case: Case, number: int) -> list[Tensors]:
    """Returns the microbatches of a step's global batch, in order."""
    r = random.Random(f"{case.seed} {number}")
    size = case.tables["batch"]["micro_size"]
    return [batch([r.randrange(10**5) for _ in range(size)], length) for length in case.steps[number].lengths]


def train(case: Case, folder: Path) -> Results:
    """Runs the case on this rank. Checks that the closed run leaves nothing in the modules of its model."""
    results = Results()
    with World.join("cpu") as world, record_built_models() as models:
        with assemble(plan_of(case, folder), world) as run:
            results.initial_weights = weights(run)
            for number in range(len(case.steps)):
                results.rows.append(run.step(rank_batch(case, number, run)))
                results.gradients.append(gradients(run))
                results.weights_by_step.append(weights(run))
        ((model, traces),) = models
        assert_untouched(traces, model.layers)
    return results


def rank_batch(case: Case, number: int, run: Run) -> Any:
    """Returns this rank's samples, as a list of microbatches or as one batch."""
    micros = micro_batches(case, number)
    count = len(micros) // run.topology.dp
    own = micros[run.groups["dp"].coord * count :][:count]
    return own if case.steps[number].is_list else {name: torch.cat([micro[name] for micro in own]) for name in own[0]}


def plain_loop(case: Case) -> PlainLoop:
    """Returns the same model in a plain loop, with the values that its code gives it under the run's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed % 1000)
        layers = drawn_model.model(**case.model)
    for _, layer in layers:
        layer.double()
    table, config = case.training["loss"], case.training["optimizer"]
    loss: Any = CrossEntropy(CrossEntropyConfig(label_smoothing=table.get("label_smoothing", 0.0)))
    if "factory" in table:
        loss = getattr(drawn_model, table["factory"].partition(":")[2])()
    return PlainLoop(
        layers,
        loss,
        optimizer=lambda named: optimizer_of(config, named),
        clip_norm=config.get("clip_norm"),
        clip_kind=float(config.get("clip_kind", 2.0)),
    )


def optimizer_of(config: Mapping[str, Any], named: Any) -> torch.optim.Optimizer:
    """Returns torch's optimizer with a group for each parameter. Matrices decay, unless a group of the plan changes that."""
    options: dict[str, Any] = {"eps": 1e-3}
    optimizer_type: Any = torch.optim.NAdam
    if config.get("scope") == "matrix":
        optimizer_type, options = Orthogonal, {}
    elif config.get("use") == "core.sgd":
        optimizer_type = torch.optim.SGD
        options = {"momentum": config["momentum"], "nesterov": config.get("nesterov", False)}
    elif config.get("use") == "core.adamw":
        optimizer_type, options = torch.optim.AdamW, options | {"betas": (0.9, 0.95)}
    groups = []
    for name, parameter in named:
        group = next((group for group in config.get("groups", ()) if fnmatchcase(name, group["match"])), {})
        decay = group.get("weight_decay", config.get("weight_decay", 0.0) if parameter.ndim >= 2 else 0.0)
        rate = group.get("lr", config["lr"])
        groups.append({"params": [parameter], "lr": rate, "full": rate, "weight_decay": decay})
        if group.get("freeze"):
            parameter.requires_grad_(False)
    return optimizer_type(groups, **options)


def compare(case: Case, ranks: Sequence[Results]) -> None:
    """Raises AssertionError with the first difference from the plain loop."""
    loop = plain_loop(case)
    first = {name: value for rank in ranks for name, value in rank.initial_weights.items() if name in loop.parameters}
    assert_same_bits(loop.weights, first)
    for number in range(len(case.steps)):
        share = min(1.0, (number + 1) / (case.training["learning_rate"]["warmup_steps"] or 1))
        for group in loop.optimizer.param_groups:
            group["lr"] = group["full"] * share
        expected = loop.step(micro_batches(case, number))
        for rank, results in enumerate(ranks):
            try:
                assert_step(expected, results.rows[number], results.gradients[number], results.weights_by_step[number])
            except AssertionError as error:
                raise AssertionError(f"step {number + 1}, rank {rank}: {error}") from None
        missing = set(expected.gradients) - {name for results in ranks for name in results.gradients[number]}
        assert not missing, f"step {number + 1}: no rank has the gradients of {sorted(missing)}"


def check(ranks: Any, folder: Path, numbers: Iterable[int], world: int | None = None, drawer: Drawer = draw) -> None:
    """Runs these cases. Fails with all differences."""
    failures = []
    for case in (draw_valid(number, folder, world, drawer) for number in numbers):
        try:
            compare(case, ranks(case.world, 60)(train, case, folder))
        except Exception as error:
            failures.append(f"{case}\n  => {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} cases are wrong\n" + "\n\n".join(failures)


@pytest.mark.parametrize(("world", "count"), [(1, 1), (2, 2), (4, 1)])
def test_a_fixed_sample_equals_a_plain_loop(ranks: Any, tmp_path: Path, world: int, count: int) -> None:
    check(ranks, tmp_path, range(count), world)


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(CAMPAIGN))
def test_two_thousand_cases_equal_a_plain_loop(ranks: Any, tmp_path: Path, part: int) -> None:
    first = random.SystemRandom().randrange(10**6) * 1000
    print(f"numbers {first} to {first + 99}")
    check(ranks, tmp_path, range(first, first + 100))


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(11))
def test_matrix_optimizers_equal_a_plain_loop(ranks: Any, tmp_path: Path, part: int) -> None:
    """The first part is small and fixed. The others are a campaign of 200 new cases."""
    first = random.SystemRandom().randrange(10**6) * 1000 if part else 0
    print(f"numbers {first} on")
    check(ranks, tmp_path, range(first, first + (20 if part else 1)), None if part else 4, draw_matrix_case)


def test_all_features_are_drawn() -> None:
    text = "\n".join(str(draw(number)) for number in range(400))
    names = [*BODIES, *FORMS, *filter(None, STARTS), *SCHEDULES, "core.sgd", "core.adamw", "torch.optim:NAdam", "clip_norm"]
    names += ["drawn_model:Squares", "dp.bucketed", "core.recompute", "vocabulary", "hidden"]
    missing = [name for name in names if f'"{name}"' not in text]
    assert not missing, f"never drawn: {missing}"


def test_a_small_error_is_found(tmp_path: Path) -> None:
    case = draw_valid(5, tmp_path, 1)
    results = train(case, tmp_path)
    compare(case, [results])
    largest = max(results.gradients[1], key=lambda name: float(results.gradients[1][name].norm()))
    values: Any = ((results.rows[1], "loss"), (results.rows[0], "grad_norm"), (results.gradients[1], largest))
    for container, key in (*values, (results.initial_weights, largest)):
        correct = container[key]
        container[key] = correct * (1 + 1e-7)
        with pytest.raises(AssertionError, match=key.replace(".", r"\.")):
            compare(case, [results])
        container[key] = correct
