"""The engine against the loop that everybody writes by hand: same model, same batches, torch's own loss and clipping."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.testing.runs import weights

PLAN = {
    "run": {"name": "plain", "steps": 4, "device": "cpu"},
    "model": {"use": "core.llama", "num_layers": 2, "hidden": 16, "heads": 2, "tie_embeddings": True},
    "data": {"use": "core.text", "source": "python-stdlib", "sequence": 16, "documents": "cut"},
    "batch": {"global_size": 6, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5},
    "learning_rate": {"use": "core.linear", "warmup_steps": 2},
    "precision": {"compute": "fp64"},
}


def test_three_micro_batches_of_the_engine_are_one_batch_by_hand():
    with (
        assemble(plan_from_dict(PLAN), World.alone("cpu")) as run,
        assemble(plan_from_dict(PLAN), World.alone("cpu")) as own,
    ):
        own.store.close()  # the loop by hand has no hooks
        layers = [layer.module for layer in own.layers]
        matrices = [entry.parameter for entry in own.book if entry.parameter.ndim > 1]
        vectors = [entry.parameter for entry in own.book if entry.parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        for _ in range(4):
            batch = own.feed.next()
            optimizer.zero_grad()
            hidden = layers[0](batch["tokens"])
            for layer in layers[1:]:
                hidden = layer(hidden)
            loss = F.cross_entropy(hidden.flatten(0, -2), batch["labels"].flatten(), ignore_index=-100)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(matrices + vectors, 0.5)
            row = run.step()
            for group in optimizer.param_groups:
                group["lr"] = row["lr"]
            optimizer.step()
            torch.testing.assert_close(row["loss"], loss.item(), rtol=1e-12, atol=0)
            torch.testing.assert_close(row["grad_norm"], norm.item(), rtol=1e-9, atol=0)
        for (name, ours), theirs in zip(weights(run).items(), weights(own).values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)
