"""The draft of a run: the plan's model on meta, with frozen parameters marked, and the costs of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sley_core.data.batches import POSITIONS, sliced_info
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.engine.book import ParameterBook
from sley_core.engine.stage import by_parameters, costs_are_timed, stage_of, timed_costs
from sley_core.errors import KeyPath, PlanError
from sley_core.model import modes
from sley_core.model.build import build_on_meta
from sley_core.model.formats import is_kept
from sley_core.optim.build import frozen
from sley_core.records import steps_on_host

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.data.dataset import AnyDataset, DataInfo
    from sley_core.engine.shards import Shards
    from sley_core.engine.stage import Stage
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Draft:
    """Holds what a plan's run is made of before anything has memory. The model, on meta, and the dataset are for one run only.

    stage: of any rank. notes: for the user. found: values of the resolved plan that only a run could determine, by their path.
    """

    dataset: AnyDataset
    model: Model
    stage: Stage
    notes: list[str]
    found: dict[KeyPath, Any]


def draft_of(plan: Plan, world: World) -> Draft:
    """Returns the draft of a run on `world`. If the plan wants layers timed, it times them, and is a collective.

    Raises what `open_dataset`, `draft_model` and `stage_of` raise.
    """
    with world.all_or_none(plan.limits.collective_timeout_s):  # one host may lack a file, or what a factory needs
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        model = draft_model(plan, dataset.info)
    costs, found = by_parameters(model), dict[KeyPath, Any]()
    notes = [*modes.notes_of(model.layers)]
    if costs_are_timed(plan) and world.simulation is None:
        costs = timed_costs(plan, world, partial(draft_model, plan), dtypes(plan)[0])
        found["partition", "layer_costs"] = costs
    elif costs_are_timed(plan):
        name = plan.partition.name if plan.partition else ""
        notes.insert(0, f"`{name}` times layers in a run; here they are cut by parameters")
    return Draft(dataset, model, stage_of(plan, plan.topology(world.size), world.rank, model, costs), notes, found)


def draft_model(plan: Plan, info: DataInfo) -> Model:
    """Builds the model on meta, in training mode, with the parameters frozen that the plan freezes.

    Raises PlanError as `sliced_info`, `build_on_meta` and `frozen` do, and "sequence-positions" for a model that would count
    the positions of every slice from 0.
    """
    plan.model.load()  # imported before the build, so that parameters made by an import are no part of it
    model = build_on_meta(plan.model, sliced_info(info, plan.parallel.sp), plan.run.seed)
    _check_positions(plan, model)
    book = ParameterBook([model.layers])
    optimizer: Any = plan.optimizer.config
    aliases = {alias: entry.name for entry in book for alias in entry.aliases}
    for name in frozen(book.names, optimizer, aliases):
        book[name].parameter.requires_grad_(False)
    modes.train(model)
    return model


def _check_positions(plan: Plan, model: Model) -> None:
    """Raises PlanError "sequence-positions" if sequences are sliced and no layer takes the positions of its slice."""
    if plan.sequence is None or plan.parallel.sp == 1 or not plan.sequence.config.positions:
        return
    if not any(POSITIONS in layer.fields for layer in model.layers):
        message = (
            f"no layer takes the field `{POSITIONS}`, so each of `sp = {plan.parallel.sp}` slices would count from 0"
        )
        hint = f"name `{POSITIONS}` in the forward that needs them; or `[sequence] positions = false` if none does"
        raise PlanError.many([plan.diagnostic("sequence-positions", message, ("parallel", "sp"), hint)])


def dtypes(plan: Plan) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtype of the working weights, and that of the weights that the optimizer steps: at least fp32."""
    working = DTYPES[plan.precision.compute]
    return working, torch.promote_types(working, torch.float32)


def formats_of(plan: Plan, model: Model, shards: Shards) -> list[str]:
    """Returns a note on the formats of parameters and buffers, if the plan computes in a narrow one.

    Raises PlanError "precision-keep" for a pattern of `[precision] keep` that matches no parameter, and for what needs all
    weights in one format: sharded weights, parts of weights, masters on the host.
    """
    working, stepped = dtypes(plan)
    keep = plan.precision.keep
    named = {name: parameter for layer in model.layers for name, parameter in layer.module.named_parameters(layer.name)}
    kept = [name for name in named if is_kept(name, keep)]
    wrong = [f"`{one}` matches no parameter" for one in keep if not any(is_kept(name, [one]) for name in named)]
    if kept and working != stepped:
        if sharded := [name for name in kept if id(named[name]) in shards]:
            wrong.append(f"`{sharded[0]}` is sharded by `{plan.weights.name if plan.weights else ''}`, in one format")
        of_parts = [one.name for one in plan.gradient_handlers if getattr(one.record, "result", "") == "shard"]
        of_host = [one.name for one in plan.offload if steps_on_host(one.record)]
        wrong += [f"`{name}` lays all weights side by side in one format" for name in (*of_parts, *of_host)]
    if wrong:
        hint = "name parameters as `train-cli show` does, or take a layout that leaves them whole"
        raise PlanError.many([plan.diagnostic("precision-keep", one, ("precision", "keep"), hint) for one in wrong])
    if working == stepped:
        return []
    buffers = {name: buffer for layer in model.layers for name, buffer in layer.module.named_buffers(layer.name)}
    others = [
        f"`{name}` ({_short(one.dtype)})"
        for name, one in buffers.items()
        if one.is_floating_point() and one.dtype != working
    ]
    note = f"{len(named) - len(kept)} parameters compute in {_short(working)} and are stepped in {_short(stepped)}"
    note += f", {len(kept)} stay in {_short(stepped)}" if kept else ""
    if others:
        note += f"; buffers keep their format: {', '.join(others[:5])}{', ...' if len(others) > 5 else ''}"
    return [note]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
