"""What the engine costs: hooks, executor, store, update and metrics against the loop that everybody writes by hand.

One process, the same layers, the same batches, torch's fused AdamW and clipping on both sides, with the same two groups of
parameters (norms do not decay): both have the same losses, which is checked. Target: <= 1.02. On CUDA the loop by hand reads
its loss in every step, as most do.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from protocol import arguments, compare, interleave, noise_of, report
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

THREADS = 1
MICROS = (1, 4)
CPU = {"layers": 4, "hidden": 128, "heads": 4, "sequence": 64, "samples": 4, "compute": "fp32"}
CUDA = {"layers": 8, "hidden": 1024, "heads": 8, "sequence": 1024, "samples": 8, "compute": "fp32"}
TARGET = 1.02
SAME_STEPS, SAME = 5, 1e-5
"""In how many steps both loops must have the same loss, and how close, relative: one sums microbatches in fp32."""


def plan(size: dict[str, Any], device: str, micros: int) -> dict[str, object]:
    return {
        "run": {"name": "overhead", "steps": 1_000_000, "device": device},
        "model": {"use": "models.llama", "num_layers": size["layers"], "hidden": size["hidden"], "heads": size["heads"]},
        "data": {"use": "data.text", "source": "python-stdlib", "sequence": size["sequence"], "documents": "cut"},
        "batch": {"global_size": size["samples"], "micro_size": size["samples"] // micros},
        "precision": {"compute": size["compute"]},
        "optimizer": {"use": "core.adamw", "lr": 1e-4, "clip_norm": 1.0},
    }


class PlainLoop:
    """Accumulates over microbatches, clips, steps, reads the loss."""

    def __init__(self, run: Run, micros: int) -> None:
        run.store.close()
        assert run.feed is not None
        self.feed = run.feed
        self.device = run.world.device.torch_device
        self.layers = torch.nn.Sequential(*[layer.module for layer in run.layers])
        self.micros = micros
        options = ("params", "lr", "betas", "eps", "weight_decay")
        groups = [{key: group[key] for key in options} for group in run.stepper.update.optimizer.param_groups]
        self.optimizer = torch.optim.AdamW(groups, fused=True)

    def step(self) -> float:
        batch = {name: value.to(self.device) for name, value in self.feed.next().items()}
        self.optimizer.zero_grad()
        weight = batch["labels"].numel()
        total = 0.0
        parts = zip(batch["tokens"].chunk(self.micros), batch["labels"].chunk(self.micros), strict=True)
        for tokens, labels in parts:
            logits = self.layers(tokens)
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / weight
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.layers.parameters(), 1.0)
        self.optimizer.step()
        return total


def main() -> None:
    options = arguments(__doc__ or "", rounds=200)
    torch.set_num_threads(THREADS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size: dict[str, Any] = CUDA if device == "cuda" else CPU
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    for micros in MICROS:
        tables = plan(size, device, micros)
        runs = [assemble(plan_from_dict(tables), World.alone(device)) for _ in range(3)]
        contestants: dict[str, Callable[[], Any]] = {
            "plain loop": PlainLoop(runs[0], micros).step,
            "plain loop again": PlainLoop(runs[1], micros).step,
            "sley": runs[2].step,
        }
        for _ in range(SAME_STEPS):
            losses = [contestants["plain loop"](), contestants["plain loop again"](), runs[2].step()["loss"]]
            assert all(math.isclose(loss, losses[0], rel_tol=SAME) for loss in losses), losses
        rows = compare(interleave(contestants, options.rounds, warmup=10), "plain loop")
        device_name = str(runs[0].world.device)
        noise = noise_of(rows, "plain loop again")
        facts: dict[str, object] = {
            "device": device_name,
            "noise": round(noise, 4),
            f"sley <= {TARGET}": rows[-1].meets(TARGET, noise),
        }
        title = f"overhead, {micros} microbatches of {size['samples'] // micros} x {size['sequence']} tokens"
        report(title, rows, facts, options.json)
        for run in runs:
            run.close()


if __name__ == "__main__":
    main()
