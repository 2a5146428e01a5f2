"""How much `optim.muon` differs from torch's classes in a plain loop, in each layout, and how long its update takes.

python benchmarks/muon.py               # both parts; --part difference or --part time for one
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sley_core.data.dataset import DataInfo, Field
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.plan.load import plan_from_dict
from sley_core.plugin import CrossEntropyConfig
from sley_testing.plain import PlainLoop
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import RunRecord, record, running

STEPS = 10
ROWS = Field("int64", sequence_dim=1)
INFO = DataInfo({"tokens": ROWS, "labels": ROWS}, vocab_size=256, sequence=32)
MUON: Tables = {"use": "optim.muon", "lr": 0.02, "adamw": {"lr": 3e-3}}
PLAN = small_plan(
    run__steps=STEPS,
    model={"use": "models.llama", "num_layers": 4, "hidden": 64, "heads": 4, "ffn_hidden": 171, "tie_embeddings": True},
    data={"factory": "noise:Noise", "options": {"sequence": 32}},
    batch={"global_size": 12, "micro_size": 1},
    optimizer=MUON,
)
SHARDED: Tables = {"gradient_handlers": [{"use": "dp.sharded"}]}
TIES = {"use": "pp.shared_modules"}
WP: Tables = {"weights": {"use": "isp.communicator"}}
LAYOUTS: dict[str, Tables] = {
    "one process": {},
    "dp 2": {"parallel__dp": 2, "gradient_handlers": [{"use": "dp.bucketed"}]},
    "dp 3": {"parallel__dp": 3, "gradient_handlers": [{"use": "dp.bucketed"}]},
    "dp 2, dp.sharded": {"parallel__dp": 2, **SHARDED},
    "dp 3, dp.sharded": {"parallel__dp": 3, **SHARDED},
    "dp 2 x wp 2": {"parallel__dp": 2, "parallel__wp": 2, **WP},
    "dp 4 x wp 2, dp.sharded": {"parallel__dp": 4, "parallel__wp": 2, **WP, **SHARDED},
    "pp 2, pp.one_f_one_b": {"parallel__dp": 1, "parallel__pp": 2, "pipeline": {"use": "pp.one_f_one_b"}},
    "pp 2, pp.zero_bubble_h1": {"parallel__dp": 1, "parallel__pp": 2, "pipeline": {"use": "pp.zero_bubble_h1"}},
    "dp 2 x pp 2, pp.zero_bubble_h1, dp.sharded": {
        "parallel__dp": 2,
        "parallel__pp": 2,
        "pipeline": {"use": "pp.zero_bubble_h1"},
        "gradient_handlers": [*SHARDED["gradient_handlers"], TIES],
    },
}


def global_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(256, (12, 33), generator=generator) for _ in range(STEPS)]
    return [{"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()} for rows in ids]


def make_optimizers(named: list[tuple[str, torch.nn.Parameter]]) -> Any:
    """Returns torch.optim.Muon and torch.optim.AdamW, each over its parameters, as one object with their methods."""
    hidden = [parameter for name, parameter in named if parameter.ndim == 2 and name.startswith("blocks.")]
    norms = [parameter for _, parameter in named if parameter.ndim < 2]
    tables = [parameter for name, parameter in named if parameter.ndim == 2 and not name.startswith("blocks.")]
    groups: Any = [{"params": tables, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return Both(torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95)))


class Both:
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def train_plainly(tables: Tables, first: dict[str, Tensor]) -> dict[str, Tensor]:
    loop = PlainLoop(plan_from_dict(tables).model.build(INFO), CrossEntropy(CrossEntropyConfig()), optimizer=make_optimizers)
    for _, module in loop.layers:
        module.to(next(iter(first.values())).dtype)
    loop.load(first)
    for batch in global_batches():
        loop.step([{name: value[row : row + 1] for name, value in batch.items()} for row in range(12)])
    return loop.weights


def num_ranks(tables: Tables) -> int:
    parallel = tables.get("parallel", {})
    return int(parallel.get("dp", 1) * parallel.get("pp", 1))


def train_layout(tables: Tables) -> list[RunRecord]:
    return Ranks(num_ranks(tables), 600)(record, tables, STEPS, batches=global_batches(), folder=Path(__file__).parent)


def largest_difference(expected: dict[str, Tensor], ranks: list[RunRecord]) -> float:
    differences = [
        float((value - expected[name]).abs().max())
        for recorded in ranks
        for name, value in recorded.weights.items()
        if name in expected
    ]
    return max(differences)


def print_differences() -> None:
    print("| Layout | fp64 | fp32 | fp32, canonical sums: from one process |\n|---|---|---|---|")
    references = {}
    canonical = changed(PLAN, precision__compute="fp32", parallel__reduction="canonical")
    (one_process,) = train_layout(canonical)
    for compute in ("fp64", "fp32"):
        plan = changed(PLAN, precision__compute=compute)
        references[compute] = train_plainly(plan, train_layout(plan)[0].initial_weights)
    for name, changes in LAYOUTS.items():
        cells = [
            f"{largest_difference(references[compute], train_layout(changed(PLAN, precision__compute=compute, **changes))):.1e}"
            for compute in ("fp64", "fp32")
        ]
        exact = largest_difference(one_process.weights, train_layout(changed(canonical, **changes)))
        print(f"| {name} | {' | '.join(cells)} | {exact:.1e} |".replace("0.0e+00", "0"), flush=True)


def update_times(tables: Tables) -> list[float]:
    """Returns the seconds of each update on this rank, after norm and clipping, except for the first two."""
    seconds: list[float] = []
    with running(tables, Path(__file__).parent) as run:
        masters = run.stepper.update.masters
        starts: list[float] = []
        gather, write_back = masters.set_gradients, masters.write_back

        def timed_gather() -> None:
            starts.append(time.perf_counter())
            gather()

        def timed_write_back(**options: Any) -> None:
            write_back(**options)
            masters.weights.settle()
            seconds.append(time.perf_counter() - starts[-1])

        masters.set_gradients, masters.write_back = timed_gather, timed_write_back  # type: ignore[method-assign]
        for _ in range(STEPS + 2):
            run.step()
    return seconds[2:]


def print_times(hidden: int) -> None:
    """Prints the time of the fastest update, since other processes use the same cores."""
    shape = {"use": "models.llama", "num_layers": 4, "hidden": hidden, "heads": 4}
    plan = changed(PLAN, run__steps=STEPS + 2, model=shape, precision__compute="fp32")
    print("| Layout | optim.muon | core.adamw |\n|---|---|---|")
    for name in ("one process", "dp 2", "dp 2, dp.sharded", "dp 2 x wp 2"):
        cells = []
        for optimizer in (MUON, {"use": "core.adamw", "lr": 3e-3}):
            tables = changed(plan, optimizer=optimizer, **LAYOUTS[name])
            slowest = [max(times) for times in zip(*Ranks(num_ranks(tables), 600)(update_times, tables), strict=True)]
            cells.append(f"{min(slowest) * 1000:.0f} ms")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["difference", "time"])
    parser.add_argument("--hidden", type=int, default=512, help="the width of the model whose update is timed")
    arguments = parser.parse_args()
    for part, show in (("difference", print_differences), ("time", partial(print_times, arguments.hidden))):
        if arguments.part in (None, part):
            show()


if __name__ == "__main__":
    main()
