"""What a step frees, the next step finds again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from sley_core import assemble as assembly
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.process import keep_freed_memory
from sley_testing.plans import small_plan

FAULTS = """
import ctypes
import resource
from sley_core.process import keep_freed_memory

libc = ctypes.CDLL(None)
libc.aligned_alloc.restype = ctypes.c_void_p
BLOCK = 8 << 20

def step():
    blocks = [ctypes.c_void_p(libc.aligned_alloc(64, BLOCK)) for _ in range(20)]  # as torch takes them
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks:
        libc.free(block)

keep_freed_memory()
for _ in range(3):
    step()
counts = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts))
"""
"""Page faults of the best of three steps that hold 160 MiB, 40960 pages: a busy system may take some away."""


def faults(**environ: str) -> int:
    program = [sys.executable, "-c", FAULTS]  # an interpreter of its own: glibc reads its variables once
    result = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return int(result.stdout)


needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


@needs_glibc
def test_a_step_finds_the_memory_of_the_one_before():
    assert faults() < 1000


@needs_glibc
def test_whoever_tunes_malloc_is_left_alone():
    """And pays as before: this threshold is the one that glibc begins with."""
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > 20000
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
    assert keep_freed_memory({"MALLOC_ARENA_MAX": "1"}), "this says nothing of what is kept"


@pytest.mark.parametrize("keeps", [True, False])
def test_a_plan_says_whether(monkeypatch, texts, keeps):
    """`mallopt` is for the whole process and for good: a program that hosts a run may not want it."""
    told: list[bool] = []
    monkeypatch.setattr(assembly, "keep_freed_memory", lambda: told.append(True))
    tables = small_plan(run__keep_freed_memory=keeps)
    with World.alone("cpu") as world, assembly.assemble(plan_from_dict(tables, texts), world):
        pass
    assert told == [True] * keeps
