"""Makes a run's groups, and checks over them that all ranks have the same plan, versions, groups, samples and model.

lines of the topology ──> ties of stages ──> groups of plugins, in the plan's order ──> groups ──> agree
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from sley_core.comm.agree import agree
from sley_core.data.factory import samples_per_epoch
from sley_core.engine.stage import Stage, tie_groups
from sley_core.errors import PluginError, SleyError
from sley_core.plan.write import digested
from sley_core.records import ProcessGroupRecord
from sley_core.topology import AXES, GroupEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sley_core.comm.groups import Group, Groups
    from sley_core.comm.world import World
    from sley_core.data.dataset import AnyDataset
    from sley_core.model.layers import Model
    from sley_core.plan.loader import Plugin
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology


def join(plan: Plan, world: World, topology: Topology, model: Model, stage: Stage, dataset: AnyDataset) -> Groups:
    """Makes and returns this rank's groups; a collective over the world.

    model: on meta. Raises PluginError "plugin-failed" if a plugin lists invalid groups, and RunError "ranks-disagree", on every
    rank, if ranks have different plans, versions, groups, samples or models.
    """
    extra = [*tie_groups(stage, topology), *plugin_groups(plan, topology)]
    attaches = plan.parallel.cross_memory_attach
    groups = world.groups(topology, plan.limits.collective_timeout_s, extra, attaches=attaches)
    if world.simulation is None:
        _agree(plan, [*topology.groups(), *extra], groups["control"], model, dataset)
    return groups


def plugin_groups(plan: Plan, topology: Topology) -> Iterator[GroupEntry]:
    """Yields the lines of the groups that the plan's plugins list, in the plan's order, the same on all ranks."""
    taken: dict[str, Plugin] = {}
    for plugin, records in plan.call("sley_process_groups", plan=plan, topology=topology):
        for record in records:
            if fault := _fault(record, topology, taken):
                message = f"{plugin.label} failed in sley_process_groups: {fault}"
                raise PluginError("plugin-failed", message, hint="report this to the plugin's authors")
            taken[record.axis] = plugin
            for ranks in record.ranks:
                for lane in record.lanes:
                    yield GroupEntry(record.axis, lane, tuple(ranks), attaches=record.attaches)


def _fault(record: object, topology: Topology, taken: dict[str, Plugin]) -> str:
    """Returns what is wrong with a plugin's group; "" if nothing is."""
    if not isinstance(record, ProcessGroupRecord):
        return f"{record!r} is no ProcessGroupRecord"
    named = f"the group {record.axis!r}"
    if record.axis in AXES or record.axis.startswith("tie[") or not record.axis:
        return f"{named} has the name of one of core's own"
    if record.axis in taken:
        return f"{named} is there twice, once from `{taken[record.axis].name}`"
    members = [rank for ranks in record.ranks for rank in ranks]
    if not record.lanes or any(list(ranks) != sorted(set(ranks)) for ranks in record.ranks):
        return f"{named} has no lane, or ranks that do not ascend"
    if len(members) != len(set(members)) or not set(members) <= set(range(topology.world)):
        return f"{named} has a rank twice, or one that is not among the {topology.world} of the world"
    return ""


def _agree(plan: Plan, table: Sequence[GroupEntry], control: Group, model: Model, dataset: AnyDataset) -> None:
    """Compares plan, versions, group table, samples and model over all ranks; a blocking collective on `control`."""
    try:
        num_samples = samples_per_epoch(dataset, plan.data.config)
    except SleyError as error:
        raise plan.located(error) from error.__cause__
    facts = {
        "the plan": plan.digest,
        "torch": torch.__version__,
        "the group table": sha256("\n".join(entry.label for entry in table).encode()).hexdigest(),
        "samples per epoch:": str(num_samples),
        "the model": _digest(model),
    }
    if control.size > 1 and hasattr(dataset, "data_digest"):
        facts["data with the digest"] = str(dataset.data_digest)
    facts |= {f"plugin {name}": str(plugin) for name, plugin in plan.plugins.items()}
    agree(facts, control, {"the plan": partial(digested, plan)})


def _digest(model: Model) -> str:
    """Returns a hash of the names, shapes and dtypes of all parameters and buffers: a factory may build a different model per
    rank.
    """
    held = sha256()
    for layer in model.layers:
        for kind in (layer.module.named_parameters, layer.module.named_buffers):
            for name, value in kind(layer.name, remove_duplicate=False):
                held.update(f"{name} {list(value.shape)} {value.dtype}\n".encode())
    return held.hexdigest()
