"""Estimated steps against real ones: a decoder that really computes, in 24 layouts of two ranks on two cores.

    calibrate   what two ranks exchange, and the layers, on both at once: in each round once per size of a microbatch,
                policy and axis that cuts layers
    estimate    each layout, from that machine alone; the median of the rounds
    run         each layout, all of them interleaved; the median of its steps
    again       the same layout once more in each round: what it says of the first is the noise

Behind each figure stands how much more the largest of the rounds is than the smallest. Targets: the mean of the errors'
absolute values <= 7 %, the largest <= 15 %.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from contestants import plan
from protocol import parser
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_estimate.calibrate.links import measure_machine
from sley_estimate.machine import MachineFile
from sley_estimate.step.estimate import estimate_plan
from sley_testing.ranks import Ranks
from sley_trainer.assemble import assemble

RANKS = 2
SHAPE = {"layers": 4, "hidden": 256, "heads": 4, "sequence": 128}
SAMPLES = 8
MEAN, WORST = 0.07, 0.15


@dataclass(frozen=True)
class Layout:
    """Two ranks along `axis`. micro: samples of a microbatch. more: tables of the plan.."""

    axis: str
    micro: int
    policy: str = "core.keep"
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        listed = (*self.more.get("gradient_handlers", ()), *self.more.get("offload", ()))
        named = [one["use"] for one in (self.more.get("pipeline"), *listed) if one]
        return " ".join([self.axis, f"micro {self.micro}", self.policy, *named])

    @property
    def measured_by(self) -> Hashable:
        """Layouts with the same need the same layers: stages and replicas have whole ones."""
        return self.micro, self.policy, self.axis if self.axis in ("wp", "sp") else ""

    def tables(self) -> dict[str, Any]:
        batch = {"global_size": SAMPLES, "micro_size": self.micro}
        return plan(SHAPE, 1, None, batch=batch, parallel={self.axis: RANKS}, activations={"use": self.policy}, **self.more)

    @property
    def copies(self) -> bool:
        """Whether it copies to the host and back in each step."""
        return self.policy == "memory.host" or "offload" in self.more

    def tables_to_measure(self) -> dict[str, Any]:
        return self.tables() if self.axis in ("wp", "sp") else Layout("dp", self.micro, self.policy, REDUCED).tables()


@dataclass(frozen=True)
class Row:
    """Seconds of a layout's step, of each round."""

    estimated: list[float] = field(default_factory=list)
    real: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """How much longer the estimate is than the real step."""
        return statistics.median(self.estimated) / statistics.median(self.real) - 1

    @property
    def noise(self) -> float:
        """How much longer the same step is, taken again."""
        return statistics.median(self.again) / statistics.median(self.real) - 1


def spread(found: Sequence[float]) -> float:
    return max(found) / min(found) - 1


REDUCED = {"gradient_handlers": [{"use": "dp.bucketed"}]}


def layouts() -> Iterator[Layout]:
    """Every axis, reducer, schedule and policy, with few and with many microbatches; the last four copy to the host."""
    for reducer in ("dp.bucketed", "dp.sharded"):
        for micro, policy in ((1, "core.keep"), (4, "core.keep"), (2, "core.recompute")):
            yield Layout("dp", micro, policy, {"gradient_handlers": [{"use": reducer}]})
    for schedule in ("one_f_one_b", "gpipe", "interleaved", "zero_bubble_h1", "zero_bubble_v"):
        for micro, policy in ((1, "core.keep"), (2, "core.recompute")):
            yield Layout("pp", micro, policy, {"pipeline": {"use": f"pp.{schedule}"}})
    for axis, table in (("wp", {"weights": {"use": "isp.communicator"}}), ("sp", {"sequence": {"use": "isp.all_to_all"}})):
        for micro in (1, 4):
            yield Layout(axis, micro, more=table)
    for micro in (1, 4):
        yield Layout("dp", micro, "memory.host", REDUCED)
    between = {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 2}
    for manager in (between, {"use": "memory.host_optimizer", "bucket_mb": 2}):
        yield Layout("dp", 4, more=REDUCED | {"offload": [manager]})


def measured(layout: Layout) -> MachineFile | None:
    """This machine with the layers of a layout, as `train-cli calibrate` measures it; None on all but rank 0."""
    with World.join("cpu") as world:
        return measure_machine(world, plan_from_dict(layout.tables_to_measure()), timeout_s=120)


def taken(layout: Layout, steps: int) -> float:
    """The median seconds of a step, without the first two."""
    with World.join("cpu") as world, assemble(plan_from_dict(layout.tables()), world) as run:
        found = []
        for _ in range(2 + steps):
            began = time.perf_counter()
            run.step()
            found.append(time.perf_counter() - began)
        return statistics.median(found[2:])


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=3)
    options.add_argument("--steps", type=int, default=7, help="of a layout in each round (default 7)")
    chosen = options.parse_args()
    ranks, rows = Ranks(RANKS, timeout_s=600), [(layout, Row()) for layout in layouts()]
    for _ in range(chosen.rounds):
        machines: dict[Hashable, MachineFile] = {}
        for layout, row in rows:
            if layout.measured_by not in machines:
                machine = ranks(measured, layout)[0]
                assert machine is not None, layout
                machines[layout.measured_by] = machine
            step = estimate_plan(plan_from_dict(layout.tables()), RANKS, machines[layout.measured_by]).step
            row.estimated.append(step.seconds)
            row.real.append(max(ranks(taken, layout, chosen.steps)))
        for layout, row in rows:
            row.again.append(max(ranks(taken, layout, chosen.steps)))
    for layout, row in rows:
        told = ", ".join(f"{name} {statistics.median(one):.3f} s (+{spread(one):.0%})" for name, one in vars(row).items())
        print(f"{layout!s:<50} {told}: {row.error:+6.1%}, noise {row.noise:+6.1%}", flush=True)
    copying = [row for layout, row in rows if layout.copies]
    for label, some, targets in (
        ("layouts", [row for _, row in rows if row not in copying], f" (targets {MEAN:.0%}, {WORST:.0%})"),
        ("layouts that copy", copying, ""),
    ):
        for name, aims in (("error", targets), ("noise", "")):
            found = [abs(getattr(row, name)) for row in some]
            print(f"{name} of {len(found)} {label}: mean {statistics.mean(found):.1%}, largest {max(found):.1%}{aims}")


if __name__ == "__main__":
    main()
