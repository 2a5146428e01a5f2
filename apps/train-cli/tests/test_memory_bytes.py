"""`run.memory.bytes` counts all memory that a run keeps between two steps: no other tensor lives, but those of the data."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_memory.leaks import find_leaks
from sley_testing.plans import Tables, changed

EXAMPLES = {path.stem: path for path in (Path(__file__).parents[3] / "examples" / "plans").glob("*.toml")}
KEPT = ("dp-bf16", "on-host", "isp", "pipeline")
"""Those of each run; a campaign has all."""

SMALL = 1024
"""Bytes. The words that ranks exchange beside tensors are fewer."""


def example(name: str) -> Tables:
    """The tables of an example, over few samples of the test's own texts."""
    tables = tomllib.loads(EXAMPLES[name].read_text())
    del tables["plan"]
    data = {"use": "data.text", "files": ["text/*.txt"], "sequence": 32, "separator": "\n\n"}
    return changed(tables, data=data, evaluation=None, checkpoint=None, run__device="cpu", run__steps=2)


def uncounted(tables: Tables, folder: Path) -> tuple[list[str], dict[str, int]]:
    """What lives after two steps on this rank and is in no part, and the bytes of each part."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, assemble(plan, world) as run:
        run.step()
        run.step()
        of_data = (".feed.", ".dataset.", "PrefetchThread")
        leaks = [str(leak) for leak in find_leaks(run, SMALL) if not any(word in leak.path for word in of_data)]
        return leaks, run.memory.bytes


@pytest.mark.sample(len(KEPT))
@pytest.mark.parametrize("name", [*KEPT, *sorted(EXAMPLES.keys() - KEPT)])
def test_every_buffer_is_in_a_part(ranks: Any, texts: Path, name: str) -> None:
    tables = example(name)
    parallel = tables.get("parallel", {})
    replicas = parallel.get("dp", 1) * parallel.get("sp", 1)
    for leaks, num_bytes in ranks(parallel.get("pp", 1) * replicas, fresh=True)(uncounted, tables, texts):
        assert not leaks
        assert num_bytes["weights"] > SMALL
        assert bool(num_bytes["messages"]) == ("reduction" in str(tables.get("gradient_handlers")))
