"""Descriptions of models that fit a layout: which bodies and forms may follow one another, ties, sharing, what is frozen."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from drawn_cases import CARRIES, STARTS, WIDTH, Traits, draw_names
from drawn_catalogue import BODIES, BY_DATA, MAY_BE_CHANGED, POSITION_WISE, WRITES
from drawn_forms import FORMS, ONE_MICRO_BATCH, UNSENT

if TYPE_CHECKING:
    from drawn_layouts import Layout

SQUARE = {
    "linear": "inner",
    "bare": "inner",
    "adds": "one",
    "begins": "inner",
    "twice": "inner",
    "detaches": "inner",
    "broadcasts": "inner",
    "chooses": "one",
    "counts": "inner",
    "turned": "",
    "half_frozen": "other",
    "reads": "inner",
    "unused": "never",
}
"""Bodies with a square matrix, and the module that holds it: what can be tied to one another."""


def draw_model(r: random.Random, traits: Traits, layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the factory, and the table of the loss."""
    count = max(traits.parts - 2, 1) + r.choice([0, 0, 1, 2])
    bodies = [r.choice(list(POSITION_WISE if traits.is_sliced else BODIES)) for _ in range(count)]
    if traits.is_sliced:
        bodies[r.randrange(count)] = "attends"
    sizes = layout.tables["parallel"]
    if sizes["wp"] > 1 and sizes["pp"] > 1 and may_exchange_other_things(bodies, layout.tables["weights"]):
        # told by the time limit: each rank waits for another, in a stage or across them
        bodies = ["linear" if body in BY_DATA else body for body in bodies]
    gives = [_form(r, traits) for _ in range(count + 1)]
    layers: list[dict[str, Any]] = []
    for at, body in enumerate(bodies):
        carry, start = r.choice(CARRIES), r.choice(STARTS)
        layers.append({"body": body, "take": gives[at], "give": gives[at + 1], "carry": carry, "start": start})
    shared = [] if traits.is_sliced else _shared(r, layers)
    _keep_writable(layers, gives, shared)
    embed = {"give": gives[0], "padding": r.random() < 0.2, "positions": r.random() < 0.3}
    own = r.choice(["", "", "", "squares", "size"])
    vocabulary = layout.tables.get("weights", {}).get("head") == "vocabulary"
    if vocabulary:
        own = ""
    head = {"take": gives[-1], "bias": r.random() < 0.5, "aux": own == "size"}
    loss = {
        "": {"use": "core.cross_entropy", "label_smoothing": r.choice([0.0, 0.1])},
        "squares": {"factory": "drawn_models:Squares"},
        "size": {"factory": "drawn_models:WithSize"},
    }[own]
    model: dict[str, Any] = {"width": WIDTH, "layers": layers, "embed": embed, "head": head}
    model["shared"] = shared
    model["ties"] = _ties(r, model, layout)
    model["frozen"] = draw_names(r, model) if r.random() < 0.25 else []
    if traits.is_sliced and not embed["positions"]:
        layout.tables["sequence"]["positions"] = False
    return model, loss


def _form(r: random.Random, traits: Traits) -> str:
    if r.random() < 0.35:
        return "tensor"
    return r.choice([form for form in FORMS if not (traits.is_sliced and form in ONE_MICRO_BATCH)])


def _keep_writable(layers: list[dict[str, Any]], gives: list[str], shared: list[list[int]]) -> None:
    """What a layer writes on is nobody else's: no other output's memory, and of no backward."""
    for at, one in enumerate(layers):
        if one["body"] != WRITES or any(at in places for places in shared):
            continue
        before = layers[at - 1] if at else {"body": "linear", "carry": "made"}
        fresh = before["body"] in MAY_BE_CHANGED and (not FORMS[gives[at]].carries or before["carry"] == "made")
        if not fresh or FORMS[gives[at]].views or gives[at] in ("detached", "nested", "output", "masked", "many", "scaled"):
            one["body"] = "linear"
        elif one["carry"] == "input" or (one["carry"] == "kept" and FORMS[gives[at]].carries):
            one["carry"] = "made"  # what it keeps was made of what it writes on, and a backward reads that


def _shared(r: random.Random, layers: list[dict[str, Any]]) -> list[list[int]]:
    """Two to four layers with one body, which the first of them makes."""
    if len(layers) < 2 or r.random() < 0.75:
        return []
    first, *others = sorted(r.sample(range(len(layers)), r.randint(2, min(4, len(layers)))))
    if layers[first]["body"] == WRITES:
        return []
    for other in others:
        layers[other]["body"], layers[other]["start"] = layers[first]["body"], ""
    return [[first, *others]]


def _ties(r: random.Random, model: dict[str, Any], layout: Layout) -> list[list[str]]:
    found = []
    if r.random() < 0.3 and layout.tables.get("weights", {}).get("embedding") != "hidden":
        found.append(["embed.table.weight", "head.scores.weight"])
    taken = {place for places in model["shared"] for place in places}
    names = [
        ".".join(filter(None, ("blocks", str(at), "body", SQUARE[one["body"]], "weight")))
        for at, one in enumerate(model["layers"])
        if one["body"] in SQUARE and at not in taken
    ]
    if len(names) > 1 and r.random() < 0.5:
        found.append(sorted(r.sample(names, r.randint(2, min(4, len(names))))))
    return found


def refusals(model: dict[str, Any], layout: Layout) -> frozenset[str]:
    """Codes of what this case holds and Sley may refuse by name."""
    found: set[str] = set()
    sizes = layout.tables["parallel"]
    if "activations" in layout.tables and any(one["body"] == WRITES for one in model["layers"]):
        found.add("recompute-in-place")
    if sizes["pp"] > 1:
        found |= {UNSENT[form] for form in _forms(model) if form in UNSENT}
    if sizes["wp"] > 1:
        if any(one["body"] == "reads" for one in model["layers"]):
            found.add("sharded-weight-read")
        bodies = [one["body"] for one in model["layers"]]
        found |= {"ranks-differ"} if may_exchange_other_things(bodies, layout.tables["weights"]) else set()
    return frozenset(found)


def may_exchange_other_things(bodies: list[str], weights: dict[str, Any]) -> bool:
    """Whether the data decide which units a rank gathers or how many gradients it sends, and not only what it computes."""
    return "chooses" in bodies or ("counts" in bodies and weights["unit"] == "module")


def _forms(model: dict[str, Any]) -> set[str]:
    return {model["embed"]["give"], *(one["give"] for one in model["layers"])}
