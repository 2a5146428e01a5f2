"""Builds the model and the optimizer on meta before any process starts: the second of the three checks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.draft import DTYPES, draft_model
from sley_core.engine.canonical.sums import cost_note
from sley_core.errors import PlanError, RunError, SleyError
from sley_core.model.layers import MODEL, Model
from sley_core.model.steps import is_blank
from sley_core.plan.plan import Plan
from train_cli.layer_check import check_layers
from train_cli.on_meta import check_boundaries
from train_cli.progress import parameters


def check_model(plan: Plan, world: int, *, calls_layers: bool = False) -> list[str]:
    """Assembles rank 0 of `world` ranks in a fake world: the same code as in a run, without memory or peers.

    calls_layers: also call all layers and the loss on meta; a run does that itself on its device. Returns notes: the
    number of parameters, and where a run would differ.

    Raises PlanError or PluginError as `assemble` does, PlanError "model-init" for an uninitialised parameter,
    "boundary-type" for a layer whose output cannot be sent to the next stage, the errors of `check_layers`, and
    RunError "no-device", which otherwise only the ranks would find.
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
            check_initialised(model)
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


def canonical_cost(plan: Plan, world: int) -> str:
    """Returns as text what canonical sums cost on rank 0 of `world` ranks, or why that is not known, as where the data are
    missing.
    """
    try:
        with World.fake(0, world) as fake, assemble(plan, fake) as run:
            return cost_note(run.parts, plan.num_micros(plan.topology(world)))
    except SleyError as error:
        return f"what canonical sums take is not known: {error.diagnostics[0].message}"


def check_initialised(model: Model) -> None:
    """Raises PlanError "model-init" for a parameter that neither the factory nor any initialising method sets.

    Such a method is one of a module that holds the parameter, of a module around that, or the model's own.
    """
    if model.init_weights is not None:
        return
    reached = {id(parameter) for layer in model.layers for parameter in _reached(layer.module)}
    for layer in model.layers:
        for name, parameter in layer.module.named_parameters(prefix=layer.name):
            ref = layer.written.get(id(parameter))
            if (ref is None or is_blank(ref)) and id(parameter) not in reached:
                raise PlanError(
                    "model-init",
                    f"the parameter {name!r} has no first value: nothing wrote to it, and its module has no reset_parameters()",
                    path=MODEL,
                    hint="write to it in the factory, or return sley_core.model.layers.Model(layers, init_weights)",
                )


def _reached(module: nn.Module) -> Iterator[nn.Parameter]:
    for each in module.modules():
        if any(callable(getattr(each, name, None)) for name in ("reset_parameters", "_reset_parameters")):
            yield from each.parameters()
