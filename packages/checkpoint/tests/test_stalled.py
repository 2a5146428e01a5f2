"""A read that does not go on, on one rank: all ranks say on which, and of which file."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_checkpoint.folders import LocalFolder, StalledError, TimedFolder, TimedReads
from sley_core.api.state import bytes_of
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.checkpointer_contract import stretch
from sley_testing.plans import changed, small_plan

LIMIT_S = 6.0
PLAN = changed(
    small_plan(batch__micro_size=4),
    parallel={"dp": 2},
    gradient_handlers=[{"use": "core.each"}],
    limits__collective_timeout_s=LIMIT_S,
)


def loaded_with_a_stall(folder: Path, path: Path, name: str, at: int) -> tuple[str, float, bool]:
    """Loads; on rank 1 the `at`-th read of the file `name` stalls. Returns the error, after how long, and whether the run has
    changed.
    """
    plain, seen, gate = LocalFolder.read_into, [], threading.Event()

    def stalls(self: LocalFolder, file: str, first: int, memory: memoryview) -> int:
        seen.append(file)
        if os.environ["RANK"] == "1" and file == name and seen.count(name) == at:
            gate.wait(30)
        return plain(self, file, first, memory)

    with World.join("cpu") as world, assemble(plan_from_dict(PLAN, folder), world) as run:
        LocalFolder.read_into = stalls
        before = [param.parameter.detach().clone() for param in run.registry]
        began = time.monotonic()
        with pytest.raises(RunError) as raised:
            run.load_checkpoint(path)
        lasted_s = time.monotonic() - began
        same = all(one.equal(param.parameter) for one, param in zip(before, run.registry, strict=True))
        gate.set()
        return str(raised.value), lasted_s, same


@pytest.mark.parametrize(("name", "at"), [("rank-00001.safetensors", 1), ("rank-00000.safetensors", 2), ("checkpoint.json", 1)])
def test_the_rank_and_the_file_are_named_by_all_ranks(texts: Path, tmp_path: Path, ranks: Any, name: str, at: int) -> None:
    """As it looks for damages, and as it takes what it needs."""
    ranks(2)(stretch, PLAN, 1, folder=texts, save=tmp_path / "saved")
    found = ranks(2)(loaded_with_a_stall, texts, tmp_path / "saved", name, at)
    for told, lasted_s, is_same in found:
        assert "rank 1 could not load the checkpoint" in told
        assert f"reading {tmp_path / 'saved' / name} has not gone on for 3 s" in told
        assert lasted_s < LIMIT_S + 10
        assert is_same or name == "rank-00000.safetensors"


def test_what_a_stalled_read_was_to_fill_is_still_its_own(tmp_path: Path) -> None:
    """It may come to its end when nobody waits for it any more."""
    (tmp_path / "file").write_bytes(bytes(range(64)))
    gate, done = threading.Event(), threading.Event()

    class Slow(LocalFolder):
        def read_into(self, name: str, first: int, memory: memoryview) -> int:
            gate.wait(30)
            got = super().read_into(name, first, memory)
            seen.append(bytes(memory))
            done.set()
            return got

    seen: list[bytes] = []
    with TimedReads(0.1) as reads:
        folder = TimedFolder(Slow(tmp_path), reads)
        target = torch.zeros(64, dtype=torch.uint8)
        memory = bytes_of(target)
        assert memory.obj.tensor is target
        with pytest.raises(StalledError, match="has not gone on"):
            folder.read_into("file", 0, memory)
        del target, memory
        with pytest.raises(StalledError, match="has not gone on"):
            folder.names()
        gate.set()
        assert done.wait(10)
    assert seen == [bytes(range(64))]
