"""Compares estimated with real steps of a decoder in 24 layouts of two ranks on two cores.

    calibrate   the links and the layers on both ranks, once per round, microbatch size, policy and axis that cuts layers
    estimate    each layout, from this machine file only; the median of the rounds
    run         each layout, interleaved with the others; the median of its steps
    repeat      each layout once more in each round; its difference from the first run is the noise

After each figure, the benchmark prints the excess of the largest round over the smallest. Targets: the mean absolute error is
at most 7 %, and the largest at most 15 %.
"""

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
    """A layout of two ranks along `axis`. micro: the samples of a microbatch. more: further tables of the plan."""

    axis: str
    micro: int
    policy: str = "core.keep"
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        handlers = (*self.more.get("gradient_handlers", ()), *self.more.get("offload", ()))
        records = [table["use"] for table in (self.more.get("pipeline"), *handlers) if table]
        return " ".join([self.axis, f"micro {self.micro}", self.policy, *records])

    @property
    def calibration_key(self) -> Hashable:
        """Returns a key of the layers; layouts with equal keys share a calibration. Stages and replicas have whole layers."""
        return self.micro, self.policy, self.axis if self.axis in ("wp", "sp") else ""

    def tables(self) -> dict[str, Any]:
        """Returns the tables of the plan."""
        batch = {"global_size": SAMPLES, "micro_size": self.micro}
        return plan(SHAPE, 1, None, batch=batch, parallel={self.axis: RANKS}, activations={"use": self.policy}, **self.more)

    @property
    def copies(self) -> bool:
        """Returns whether each step copies memory to the host and back."""
        return self.policy == "memory.host" or "offload" in self.more

    def calibration_tables(self) -> dict[str, Any]:
        """Returns the tables of a plan with the same layers, which needs no stages."""
        return self.tables() if self.axis in ("wp", "sp") else Layout("dp", self.micro, self.policy, REDUCED).tables()


@dataclass(frozen=True)
class Row:
    """The seconds of a layout's step in each round."""

    estimated: list[float] = field(default_factory=list)
    real: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Returns the relative error of the estimate."""
        return statistics.median(self.estimated) / statistics.median(self.real) - 1

    @property
    def noise(self) -> float:
        """Returns the relative difference of the repeated step."""
        return statistics.median(self.repeated) / statistics.median(self.real) - 1


def spread(seconds: Sequence[float]) -> float:
    """Returns the relative excess of the largest value over the smallest."""
    return max(seconds) / min(seconds) - 1


REDUCED = {"gradient_handlers": [{"use": "dp.bucketed"}]}


def layouts() -> Iterator[Layout]:
    """Yields every axis, reducer, schedule and policy, with few and many microbatches. The last four copy to the host."""
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


def calibrate(layout: Layout) -> MachineFile | None:
    """Returns the machine file with the layers of a layout, as `train-cli calibrate` writes it; None on ranks other than 0."""
    with World.join("cpu") as world:
        return measure_machine(world, plan_from_dict(layout.calibration_tables()), timeout_s=120)


def time_step(layout: Layout, steps: int) -> float:
    """Returns the median seconds of `steps` steps after two warm-up steps."""
    with World.join("cpu") as world, assemble(plan_from_dict(layout.tables()), world) as run:
        seconds = []
        for _ in range(2 + steps):
            start_s = time.perf_counter()
            run.step()
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds[2:])


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], rounds=3)
    arguments.add_argument("--steps", type=int, default=7, help="steps of a layout in each round (default 7)")
    options = arguments.parse_args()
    ranks, rows = Ranks(RANKS, timeout_s=600), [(layout, Row()) for layout in layouts()]
    for _ in range(options.rounds):
        machines: dict[Hashable, MachineFile] = {}
        for layout, row in rows:
            if layout.calibration_key not in machines:
                machine = ranks(calibrate, layout)[0]
                assert machine is not None, layout
                machines[layout.calibration_key] = machine
            step = estimate_plan(plan_from_dict(layout.tables()), RANKS, machines[layout.calibration_key]).step
            row.estimated.append(step.seconds)
            row.real.append(max(ranks(time_step, layout, options.steps)))
        for layout, row in rows:
            row.repeated.append(max(ranks(time_step, layout, options.steps)))
    for layout, row in rows:
        figures = [f"{name} {statistics.median(seconds):.3f} s (+{spread(seconds):.0%})" for name, seconds in vars(row).items()]
        print(f"{layout!s:<50} {', '.join(figures)}: {row.error:+6.1%}, noise {row.noise:+6.1%}", flush=True)
    copying_rows = [row for layout, row in rows if layout.copies]
    for label, group, targets in (
        ("layouts", [row for layout, row in rows if not layout.copies], f" (targets {MEAN:.0%}, {WORST:.0%})"),
        ("layouts that copy", copying_rows, ""),
    ):
        for name, target in (("error", targets), ("noise", "")):
            values = [abs(getattr(row, name)) for row in group]
            print(f"{name} of {len(values)} {label}: mean {statistics.mean(values):.1%}, largest {max(values):.1%}{target}")


if __name__ == "__main__":
    main()
