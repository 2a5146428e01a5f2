"""The same decoder trained by everybody: Sley's reducers, torch's DDP and FSDP2, and nobody who reduces at all.

Each contestant has `backward`, forward to reduced gradients of one optimizer step, and `step`, which also steps the
optimizer that its users usually take. All get the same layers, the same weights and the same batches.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from sley_core.comm.device import Device
from sley_core.comm.world import World
from sley_core.engine.totals import LOSS, TYPICAL_TOTALS, WEIGHT, StepTotals, Votes
from sley_core.plan.load import plan_from_dict
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

LR = 1e-4
Batch = Mapping[str, Tensor]


class Contestant(Protocol):
    def backward(self, batch: Batch) -> object: ...
    def step(self, batch: Batch) -> object: ...


def plan(shape: Mapping[str, int], micros: int, handlers: list[dict[str, Any]] | None, **tables: Any) -> dict[str, Any]:
    """A plan of `shape` (layers, hidden, heads, sequence), one sample per microbatch; None is core's default handlers.

    tables: those that are not the usual ones, and `device`.
    """
    usual = {} if "batch" in tables else {"batch": {"global_size": micros * dist.get_world_size(), "micro_size": 1}}
    found: dict[str, Any] = {
        "run": {"name": "benchmark", "steps": 1_000_000, "device": tables.pop("device", "cpu")},
        "model": {"use": "models.llama", "num_layers": shape["layers"], "hidden": shape["hidden"], "heads": shape["heads"]},
        "data": {"factory": "noise:Noise", "options": {"sequence": shape["sequence"]}},
        "optimizer": {"use": "core.adamw", "lr": LR},
        **usual,
        **tables,
    }
    return found if handlers is None else {**found, "gradient_handlers": handlers}


class Sley:
    """A run, stepped by its own engine."""

    def __init__(self, tables: dict[str, Any], *, backward_only: bool = False) -> None:
        self.run: Run = assemble(plan_from_dict(tables), World.join(tables["run"]["device"]))
        if backward_only:
            self.run.stepper.update = _NoUpdate(self.run.stepper.device)  # type: ignore[assignment]  # the same engine, ended earlier

    def batch(self) -> Batch:
        """This rank's samples of the next step."""
        assert self.run.feed is not None
        return self.run.feed.next()

    def step(self, batch: Batch) -> object:
        return self.run.step(batch)

    backward = step


class _NoUpdate:
    """Stands where the optimizer step stands."""

    lr = LR
    scale = None
    skips = None
    sources = None
    was_taken = True

    def __init__(self, device: Device) -> None:
        self.device = device

    def step(self, step: int, loss: Tensor, weight: float, votes: Votes) -> StepTotals:
        values = loss.new_zeros(len(TYPICAL_TOTALS))
        values[LOSS], values[WEIGHT] = loss, 1.0
        return StepTotals(values, local_loss=loss, local_exchanges={}, device=self.device)


class Torch:
    """A module in the hand-written loop. kind: ddp, ddp-static, ddp-zero (its optimizer sharded), fsdp2, fsdp2-host (with its
    CPUOffloadPolicy) or none. With "-compiled" behind it, layers are compiled.
    """

    def __init__(self, tables: dict[str, Any], kind: str, micros: int, *, fused: bool | None = None) -> None:
        model, device = _layers(tables)
        self.kind = kind
        for layer in list(model) if kind.endswith("-compiled") else ():
            layer.compile()
        self.micros = micros
        # torch asserts where a static graph's very first backward runs under `no_sync`.
        self.syncs_always = kind == "ddp-static"
        self.model: Any = model
        if kind.startswith("ddp"):
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=kind == "ddp-static")
        elif kind.startswith("fsdp2"):
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if kind == "fsdp2-host" else OffloadPolicy()
            for layer in list(model)[1:-1]:
                fully_shard(layer, mesh=mesh, offload_policy=policy)
            self.model = fully_shard(model, mesh=mesh, offload_policy=policy)
        self.device = device
        options: dict[str, Any] = {"lr": LR, "fused": fused}
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = (
            ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options)
            if kind == "ddp-zero"
            else torch.optim.AdamW(parameters, **options)
        )

    def backward(self, batch: Batch) -> object:
        total = torch.zeros((), device=self.device)
        syncs_always, self.syncs_always = self.syncs_always, False
        for number in range(self.micros):
            tokens, labels = (batch[name][number : number + 1].to(self.device) for name in ("tokens", "labels"))
            with self._synced(syncs_always or number == self.micros - 1):
                logits = self.model(tokens)
                loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten()) / self.micros
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total.item()

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def step(self, batch: Batch) -> object:
        self.optimizer.zero_grad()
        loss = self.backward(batch)
        self.optimizer.step()
        return loss

    def _synced(self, last: bool) -> Any:
        if self.kind.startswith("fsdp2"):
            self.model.set_requires_gradient_sync(last)
        if self.kind.startswith("ddp") and not last:
            return self.model.no_sync()
        return nullcontext()


class Cleared:
    """`backward` of a Torch contestant with the clearing of gradients that its next step would begin with."""

    def __init__(self, contestant: Torch) -> None:
        self.contestant = contestant

    def backward(self, batch: Batch) -> object:
        self.contestant.zero()
        return self.contestant.backward(batch)

    step = backward


def _layers(tables: dict[str, Any]) -> tuple[nn.Sequential, torch.device]:
    """The layers of the plan, materialised by Sley, without anything of Sley around them."""
    run = assemble(plan_from_dict(tables), World.join(tables["run"]["device"]))
    modules = [layer.module for layer in run.layers]
    device = run.world.device.torch_device
    run.close()
    return nn.Sequential(*modules), device
