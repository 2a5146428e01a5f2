"""Computes a reference that shares nothing with the engine: torch's autograd and optimizer, one document after the other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from sley_core.data.dataset import DataContext
from sley_core.engine.update import CLIP_EPSILON
from sley_core.optim.config import AdamWConfig
from sley_testing.plain import Batch, Named, PlainLoop, decay_groups
from train_cli.league.samples import DrawnSamples
from train_cli.verify.measure import file_of

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


def keep_plain(plan: Plan, num_steps: int, first: Path, folder: Path) -> None:
    """Takes the steps of `plan` in a plain loop and keeps their results in `folder`, as `measure.keep` does for a run.

    first: the folder of a run that began with the same weights. Each micro-batch is one document, so nothing can attend across
    two, and the loop's loss is written without ranks.
    """
    options = plan.data.config.options
    samples, held_out = DrawnSamples(**options), DrawnSamples(DataContext(split="held_out"), **options)
    config = plan.optimizer.config
    assert isinstance(config, AdamWConfig), config

    def adamw(named: Named) -> torch.optim.Optimizer:
        groups = decay_groups([one for one in named if one[1].requires_grad], config.weight_decay)
        first, second = config.betas
        return torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps)

    clip = math.inf if config.clip_norm is None else config.clip_norm
    loop = PlainLoop(plan.model.build(samples.info), _SumOfLabels(), optimizer=adamw, clip_norm=clip)
    loop.load(load_file(file_of(first, 0, "weights")))
    save_file(loop.weights, file_of(folder, 0, "weights"))
    for number in range(num_steps):
        size = plan.batch.global_size
        step = loop.step(_apart(samples, range(number * size, (number + 1) * size)))
        row = {"step": number + 1, "loss": step.loss, "grad_norm": step.grad_norm}
        if plan.evaluation is not None:
            row["held_out_loss"] = loop.evaluate(_apart(held_out, range(len(held_out))))
        (folder / f"row-{number + 1}.json").write_text(json.dumps(row), "utf-8")
        factor = min(1.0, clip / (step.grad_norm + CLIP_EPSILON))
        gradients = {name: gradient / factor for name, gradient in step.gradients.items()}
        save_file(gradients, file_of(folder, number + 1, "gradients"))
        save_file(step.weights, file_of(folder, number + 1, "weights"))


def _apart(samples: DrawnSamples, indices: Iterable[int]) -> list[Batch]:
    """Returns the documents of these samples, a micro-batch each."""
    return [document for index in indices for document in samples.apart(index)]


class _SumOfLabels:
    """Computes cross-entropy directly, as a sum over the labels that count and the number of these."""

    def weight(self, batch: Batch) -> float:
        return float((batch["labels"] >= 0).sum())

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        counts = batch["labels"] >= 0
        return F.cross_entropy(output[counts], batch["labels"][counts], reduction="sum")
