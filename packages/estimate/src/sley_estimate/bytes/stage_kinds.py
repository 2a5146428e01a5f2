"""Finds stages that are alike: with layers of the same kinds they do the same in each action. Those that also do so in the same
order hold as much as each other.
"""

from __future__ import annotations

from collections.abc import Hashable
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING

from sley_core.actions.action import Action, Kind, Step
from sley_core.assemble import dtypes
from sley_core.plan.write import leaves
from sley_estimate.bytes.micros import fewest_micros, least_micros
from sley_estimate.bytes.simulation import foretold
from sley_estimate.layers.distinct import layer_keys
from train_cli.on_meta import meta_micro_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sley_core.assemble import Draft
    from sley_core.engine.stage import Lists
    from sley_core.model.layers import Layer
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology


def stage_kinds(plan: Plan, topology: Topology, draft: Draft) -> list[Hashable]:
    """Returns the kind of every stage, equal for stages whose ranks hold as much as each other: alike stages with the same
    list, but for their neighbours' numbers. Raises as `alike_stages`.
    """
    lists, of_micros = draft.stage.lists, plan.num_micros(topology)
    alike = alike_stages(plan, topology, draft)
    return [(kind, _does(lists.at(number), of_micros)) for number, kind in enumerate(alike)] if topology.pp > 1 else alike


def alike_stages(plan: Plan, topology: Topology, draft: Draft) -> list[Hashable]:
    """Returns for every stage what is equal for stages that do the same in an action: with layers of one kind, which the plan
    calls by no name of its own; the same messages; and no parameter in common with another stage.

    Raises RunError `estimate-layer` for a layer that cannot be called on meta.
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
    placement = stage.lists.placement
    found: list[Hashable] = []
    for number in range(topology.pp):
        positions = [placement.position(number, chunk) for chunk in range(placement.chunks)]
        held = tuple((at and outputs[at - 1], parts[at], outputs[at]) for at in positions)
        found.append((held, number if number in tied else None))
    return found


def representatives(plan: Plan, topology: Topology, draft: Draft) -> list[tuple[int, ...]]:
    """Returns for every stage the numbers of the stages whose steps tell its seconds, the nearest first. Raises as
    `alike_stages`.

    Of alike stages these are one in which the most forwards wait for their backward at once, and which so holds the most bytes;
    and, where weights are sharded, one in which the fewest do: a gather ahead depends on the action behind it, and the lists of
    these two have nearly all pairs of actions that others have.
    """
    lists = draft.stage.lists
    alike, micros = alike_stages(plan, topology, draft), fewest_micros(lists, plan.num_micros(topology))
    waiting = [most_waiting(steps) for steps in lists.of_all_stages(micros)]
    ends: dict[Hashable, tuple[int, ...]] = {}
    for number in sorted(range(topology.pp), key=lambda stage: (-waiting[stage], stage)):
        known = ends.get(alike[number], ())
        ends[alike[number]] = (*known[:1], number) if plan.parallel.wp > 1 else known or (number,)
    return [tuple(sorted(ends[kind], key=lambda one: abs(one - number))) for number, kind in enumerate(alike)]


WAITING = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRADIENT: -1}
"""By how many the forwards that wait for their backward, or for the second half of it, change with an action."""


def most_waiting(steps: Sequence[Step]) -> int:
    """Returns how many forwards of a stage's list wait at once at most. The list need not be lowered."""
    changes = (WAITING.get(step.kind, 0) for step in steps if isinstance(step, Action))
    return max(accumulate(changes, initial=0))


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
