"""Finds stages that hold as much as each other: those that do the same, in the same order, with layers of the same kinds."""

from __future__ import annotations

from collections.abc import Hashable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from sley_core.actions.action import Action
from sley_core.draft import dtypes
from sley_core.engine.on_meta import meta_micro_batch
from sley_core.plan.write import leaves
from sley_estimate.bytes.micros import fewest_micros, least_micros
from sley_estimate.bytes.simulation import foretold
from sley_estimate.layers.distinct import layer_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sley_core.draft import Draft
    from sley_core.engine.lists import Lists
    from sley_core.model.layers import Layer
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology


def stage_kinds(plan: Plan, topology: Topology, draft: Draft) -> list[Hashable]:
    """Returns the kind of every stage; equal for stages whose ranks hold as much as each other.

    They have the same lists, but for their neighbours' numbers; layers of one kind, which the plan calls by no name of its
    own; the same messages; and no parameter in common with another stage. Raises RunError `estimate-layer` for a layer that
    cannot be called on meta.
    """
    if topology.pp == 1:
        return [0]
    model, stage = draft.model, draft.stage
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, meta_micro_batch(plan, draft.dataset))
    named = _named(plan, model.layers)
    known = {layer.name: (key, named[layer.name]) for layer, key in zip(model.layers, keys, strict=True)}
    parts = [tuple(known[layer.name] for layer in layers) for _, layers in stage.stages]
    outputs = [*map(repr, foretold(plan, stage, draft.dataset, dtypes(plan)[0]).outputs), None]
    tied = {number for stages in stage.ties for number in stages}
    placement, of_micros = stage.lists.placement, plan.num_micros(topology)
    found: list[Hashable] = []
    for number in range(topology.pp):
        positions = [placement.position(number, chunk) for chunk in range(placement.chunks)]
        held = tuple((at and outputs[at - 1], parts[at], outputs[at]) for at in positions)
        found.append((held, _does(stage.lists.at(number), of_micros), number if number in tied else None))
    return found


def _does(lists: Lists, of_micros: int) -> Hashable:
    """Returns the actions and transfers of the one or two steps that an estimate of this stage takes; a transfer's peer stands
    there as its distance from this stage, so that alike stages have equal ones.
    """
    taken = {least_micros(lists, of_micros), fewest_micros(lists, of_micros)}
    return tuple(
        tuple(step if isinstance(step, Action) else step._replace(peer=step.peer - lists.stage) for step in steps)
        for steps in map(lists.training, sorted(taken))
    )


def _named(plan: Plan, layers: Sequence[Layer]) -> dict[str, Hashable]:
    """Returns for each layer, by name, the texts of the plan that match a name in it (of a module or parameter), each with the
    part of that name behind the layer's: equal for layers that the plan means alike.
    """
    texts = {text for _, value in leaves(plan.tables) for text in _texts(value)}
    return {
        layer.name: frozenset(
            (text, name.removeprefix(layer.name))
            for name in [
                *(name for name, _ in layer.module.named_modules(prefix=layer.name)),
                *(name for name, _ in layer.module.named_parameters(prefix=layer.name)),
            ]
            for text in texts
            if fnmatchcase(name, text)
        )
        for layer in layers
    }


def _texts(value: object) -> list[str]:
    """Returns the texts in a value: itself, or those in a list, however deep; none of any other."""
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) else []
