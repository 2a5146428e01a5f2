"""The steps of a row of the parity table, in a module that ranks import without computing the table."""

import math
from contextlib import nullcontext
from pathlib import Path

from sley_testing.collectives import late_exchanges
from sley_testing.plans import Tables
from sley_testing.runs import RunRecord, gradients, running, weights

NUM_STEPS = {"all taken": 2, "second skipped": 3}


def train(tables: Tables, folder: Path, step: str, *, late: bool = False) -> RunRecord:
    """Takes two or three steps on this rank. step: "second skipped" makes the gradients of the second step NaN. late: whether
    exchanges happen as late as the waits allow, since on CUDA only waits order them.
    """
    recorded = RunRecord()
    with late_exchanges() if late else nullcontext(), running(tables, folder) as run:
        recorded.initial_weights = weights(run)
        if step == "second skipped" and run.world.rank == run.world.size - 1:
            param = next(param for param in run.registry if "norm" in param.name)
            param.parameter.register_hook(lambda grad: grad * math.nan if run.store.state.step == 1 else grad)
        for number in range(NUM_STEPS[step]):
            row = run.step()
            assert row.get("skipped", 0) == (step == "second skipped" and number == 1)
            if not row.get("skipped"):
                recorded.rows.append(row)
                recorded.gradients.append(gradients(run))
            if "memory.everything" in str(tables.get("offload")):
                run.memory.offload()
                run.memory.onload()
        recorded.weights, recorded.held_out = weights(run), run.evaluate()
    return recorded
