"""Runs that offload memory and fill freed memory with NaN, and a digest of their state."""

import hashlib
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch

from sley_core.comm import device
from sley_core.comm.world import World
from sley_core.memory import COPIED_PARTS, StorageEntry
from sley_core.plan.load import plan_from_dict
from sley_testing.drawn_copies import storage_guard
from sley_trainer.assemble import assemble

EVERYTHING = [{"use": "memory.everything", "bucket_mb": 0.002}]
BETWEEN = [{"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.002}]


def whole(tensor):
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextmanager
def poison_freed_memory():
    """Fills memory with NaN before it is freed and after it is allocated again, so that a missing copy changes the numbers."""

    def free(entry):
        whole(entry.memory).fill_(255)
        return device.free(entry.memory)

    def reallocate(entry):
        device.reallocate(entry.memory, entry.memory.numel())
        whole(entry.memory).fill_(255)

    with patch.object(StorageEntry, "free", free), patch.object(StorageEntry, "reallocate", reallocate):
        yield


@contextmanager
def running(tables, folder=None, guards=True):
    """Yields the run of a plan on this rank, with poisoned memory. guards: whether reads of freed memory raise an error
    with a name instead of ending the process.
    """
    plan = plan_from_dict(tables, folder)
    with (
        storage_guard() if guards else nullcontext(),
        poison_freed_memory(),
        World.join(plan.run.device) as world,
        assemble(plan, world) as run,
    ):
        yield run


def state_digest(run):
    """Returns a digest of the rank's weights, buffers, master weights and optimizer states, wherever they are."""
    found = hashlib.sha256()
    for part in COPIED_PARTS:
        for name, tensor in run.memory.host(part):
            found.update(name.encode())
            found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def offload_and_onload(run):
    """Offloads all memory, and onloads it."""
    run.memory.offload().wait()
    here = {part: size for part, size in run.memory.bytes.items() if size and part != "pools"}
    assert not here, f"still here: {here}"
    run.memory.onload()


def run_steps(tables, folder, num_steps=10, moves=False):
    """Returns the digest after `num_steps`, the loss and norm of each step, and the bytes that were copied to the host."""
    with running(tables, folder) as run:
        rows = []
        for _ in range(num_steps):
            row = run.step()
            rows.append((row["loss"], row["grad_norm"]))
            if moves:
                offload_and_onload(run)
        copied = sum(moved.copied_out for moved in run.memory.report.values())
        return state_digest(run), rows, copied


def run_three_variants(tables, folder):
    """Returns the results of `run_steps` without offload, with an offload of all memory between steps, and with states that
    are on the device only in the update.
    """
    plain = {name: table for name, table in tables.items() if name != "offload"}
    return [
        run_steps(plain, folder),
        run_steps({**plain, "offload": EVERYTHING}, folder, moves=True),
        run_steps({**plain, "offload": BETWEEN}, folder),
    ]
