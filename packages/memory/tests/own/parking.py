"""A plan's run whose memory leaves and comes back, and a digest of what it has come to."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch

from sley_core.assemble import assemble
from sley_core.comm import copies
from sley_core.comm.world import World
from sley_core.memory.inventory import StorageEntry
from sley_core.memory.state import COPIED
from sley_core.plan.load import plan_from_dict
from sley_testing.drawn_copies import storage_guard

EVERYTHING = [{"use": "memory.everything", "bucket_mb": 0.002}]
BETWEEN = [{"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.002}]


def whole(tensor):
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextmanager
def poisoned():
    """What was freed comes back as NaN, and is NaN before it is freed: a copy that is missing is seen in the numbers."""

    def free(entry):
        whole(entry.memory).fill_(255)
        return copies.free(entry.memory)

    def grow(entry):
        copies.grow(entry.memory, entry.memory.numel())
        whole(entry.memory).fill_(255)

    with patch.object(StorageEntry, "free", free), patch.object(StorageEntry, "grow", grow):
        yield


@contextmanager
def running(tables, folder=None, guards=True):
    """The run of a plan on this rank, poisoned. guards: whether what reads freed memory is an error that names it, and not the
    process's end.
    """
    plan = plan_from_dict(tables, folder)
    with (
        storage_guard() if guards else nullcontext(),
        poisoned(),
        World.join(plan.run.device) as world,
        assemble(plan, world) as run,
    ):
        yield run


def sha(run):
    """A digest of everything that this rank keeps between two steps but gradients, wherever it is."""
    found = hashlib.sha256()
    for part in COPIED:
        for name, tensor in run.memory.host(part):
            found.update(name.encode())
            found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def cycle(run):
    """Everything leaves, and comes back."""
    run.memory.offload().wait()
    here = {part: size for part, size in run.memory.bytes.items() if size and part not in ("pools", "messages")}
    assert not here, f"still here: {here}"
    run.memory.onload()


def steps(tables, folder, num_steps=10, moves=False):
    """The digest after `num_steps`, each row's loss and norm, and the bytes that were copied to the host."""
    with running(tables, folder) as run:
        rows = []
        for _ in range(num_steps):
            row = run.step()
            rows.append((row["loss"], row["grad_norm"]))
            if moves:
                cycle(run)
        copied = sum(moved.copied_out for moved in run.memory.report.values())
        return sha(run), rows, copied


def three_ways(tables, folder):
    """`steps` of the plan as it is, with everything away between two steps, and with states away but in the update."""
    plain = {name: table for name, table in tables.items() if name != "offload"}
    return [
        steps(plain, folder),
        steps({**plain, "offload": EVERYTHING}, folder, moves=True),
        steps({**plain, "offload": BETWEEN}, folder),
    ]
