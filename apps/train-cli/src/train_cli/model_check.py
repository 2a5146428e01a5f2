"""Builds the model and the optimizer on meta before any process starts: the second of the three checks."""

from __future__ import annotations

import os

import torch

from sley_core.assemble import DTYPES, assemble, draft_model
from sley_core.comm.world import World
from sley_core.errors import RunError, SleyError
from sley_core.model.layers import Model
from sley_core.plan.plan import Plan
from train_cli.layer_check import check_layers
from train_cli.on_meta import check_boundaries
from train_cli.progress import MIB, memory, parameters


def check_model(plan: Plan, world: int, *, calls_layers: bool = False) -> list[str]:
    """Assembles rank 0 of `world` ranks in a fake world: the same code as in a run, without memory or peers.

    calls_layers: also call all layers and the loss on meta; a run does that itself on its device. Returns notes: the
    number of parameters, the host memory that first values take, and where a run would differ.

    Raises PlanError or PluginError as `assemble` does, "boundary-type" for a layer whose output cannot be sent to the next
    stage, the errors of `check_layers`, and RunError "no-device", which otherwise only the ranks would find.
    """
    if plan.run.device == "cuda" and not torch.cuda.is_available():
        hint = '`device = "auto"` takes what there is'
        message = "the plan asks for CUDA, but torch finds no CUDA device"
        raise plan.located(RunError("no-device", message, path=("run", "device"), hint=hint))
    with World.fake(0, world) as fake:
        try:
            with assemble(plan, fake) as run:
                notes = [parameters(run.facts.num_parameters, run.facts.num_trained), *run.notes]
                dataset = run.dataset
            model = draft_model(plan, dataset.info)
            notes += host_notes(
                model,
                min(world, torch.cuda.device_count()) if plan.run.device != "cpu" and torch.cuda.is_available() else world,
            )
            dtype = DTYPES[plan.precision.compute]
            found = [check_boundaries(plan, plan.topology(world), model, dataset, dtype)]
            if calls_layers:
                found = [found[0], check_layers(plan, draft_model(plan, dataset.info), dataset, dtype)]
            notes += filter(None, found)
            # Ranks are processes of their own, and open it again: what it holds, such as workers, is not to stay with them.
            if world > 1 and callable(close := getattr(dataset, "close", None)):
                close()
        except SleyError as error:
            raise plan.located(error) from error.__cause__
    return notes


def host_notes(model: Model, on_host: int) -> list[str]:
    """Returns notes on the host memory that the factory of `model`, on meta, takes for first values, of which builders take
    little, and on why it does not run on meta.

    on_host: the number of ranks on a host. A rank of a real run makes all layers without a builder at once.
    """
    tensors = {
        id(tensor): tensor.nbytes
        for layer in model.layers
        if layer.builder is None
        for tensor in (*layer.module.parameters(), *layer.module.buffers())
    }
    notes, each = [], sum(tensors.values())
    if each:
        total, present = each * on_host, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        note = f"each rank makes all first values on its host before it drops those of others: {memory(each / MIB)}"
        note += f", {memory(total / MIB)} for {on_host} ranks on a host" if on_host > 1 else ""
        if total > present:
            note += f"; this one has {memory(present / MIB)}: return builders (docs/save-resume-load.md)"
        notes.append(note)
    if model.recipe is not None and model.recipe.needs_host:
        notes.append(f"the factory does not run without values, and took as much memory here: {model.recipe.needs_host}")
    return notes
