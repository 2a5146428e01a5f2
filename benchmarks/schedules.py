"""Schedules that compute by sleeping: the real executor and real gloo links against the simulator, and against torch's runtime.

A stage sleeps 40 ms for each forward (F), input gradient (D) and weight gradient (W), shared by its chunks where it has
several. Sleeping uses no core, so that eight ranks overlap on two cores like eight devices: what a step takes beyond
the simulated one, in which links and bookkeeping are free, is what link, executor and message cost. Target: <= 1.03 x the
simulator's step for every schedule, and not slower than torch.distributed.pipelining's same schedule with the same sleeps.
"""

import ctypes
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from contestants import Sley
from protocol import compare, interleave, noise_of, parser, report, slowest
from sley_core.actions.action import Schedule
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, simulate
from sley_core.data.dataset import DataInfo, Field
from sley_core.plan.load import plan_from_dict
from sley_testing.ranks import Ranks

STAGES = (4, 8)
MICROS = 16
SECONDS = 0.040
"""Of each F, D and W of a whole stage."""

WIDTH = 4096
"""Numbers in a sample: a message of 16 KiB."""

TARGET = 1.03
PR_SET_TIMERSLACK = 29
SCHEDULES: dict[str, tuple[int, Any]] = {
    "gpipe": (1, ScheduleGPipe),
    "one_f_one_b": (1, Schedule1F1B),
    "interleaved": (2, ScheduleInterleaved1F1B),
    "zero_bubble_h1": (1, ScheduleInterleavedZeroBubble),
    "zero_bubble_v": (2, ScheduleZBVZeroBubble),
}
"""Ours, by name: chunks per stage, and torch's class."""


class Sleep(torch.autograd.Function):
    """The identity: sleeps in its forward, and in its backward for D; `layer` says what becomes of W.

    _anchor: a parameter, so that there is a backward on the first stage too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, layer: "Sleeper") -> Tensor:
        ctx.layer = layer
        time.sleep(layer.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.layer.seconds)
        ctx.layer.weight_gradient()
        return gradient, None, None


class Sleeper(nn.Module):
    """One chunk of a stage. With `queue`, the engine's, W is put off like that of a linear; else its owner sees to it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.queue: Any = None
        self.anchor = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.anchor)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sleep.apply(x, self.anchor, self)  # type: ignore[no-untyped-call]
        return result

    def weight_gradient(self) -> None:
        if self.queue is None:
            return
        if self.queue.is_collecting:
            self.queue.put(lambda: time.sleep(self.seconds))
        else:
            time.sleep(self.seconds)


def layers(num: int, seconds: float) -> list[nn.Module]:
    return [Sleeper(seconds) for _ in range(num)]


class Rows:
    """Samples of `WIDTH` zeros."""

    info = DataInfo({"x": Field("float32")})

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(WIDTH)}


class Sum:
    """The sum of the output's squares as a loss."""

    fields = ()

    def weight(self, batch: Any) -> float:
        return float(len(batch["x"]))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()


def tables(name: str, stages: int) -> dict[str, Any]:
    chunks = SCHEDULES[name][0]
    options = {"num": stages * chunks, "seconds": SECONDS / chunks}
    return {
        "run": {"name": "schedules", "steps": 1_000_000, "device": "cpu"},
        "model": {"factory": f"{__name__}:layers", "options": options},
        "data": {"factory": f"{__name__}:Rows"},
        "loss": {"factory": f"{__name__}:Sum"},
        "batch": {"global_size": MICROS, "micro_size": 1},
        "optimizer": {"use": "core.sgd", "lr": 1e-3},
        "parallel": {"pp": stages, "dp": 1},
        "pipeline": {"use": f"pp.{name}"},
        "partition": {"use": "pp.uniform"},
    }


class Ours:
    """A run of the plan, whose sleepers know the engine's queue."""

    def __init__(self, name: str, stages: int) -> None:
        self.sley = Sley(tables(name, stages), backward_only=True)
        for layer in self.sley.run.layers:
            module: Any = layer.module
            module.queue = self.sley.run.stepper.executor.queue
        self.batch = {"x": torch.zeros(MICROS, WIDTH)}
        self.number = 0

    def step(self) -> object:
        """What torch's `schedule.step` covers: no rows, no metrics."""
        self.number += 1
        run = self.sley.run
        return run.stepper.step(self.number - 1, run.samples.splitter.split_input(self.batch))


class Theirs:
    """torch's runtime over the same sleepers; `dw_builder` is its own way to a W that takes time."""

    def __init__(self, name: str, stages: int) -> None:
        chunks, kind = SCHEDULES[name]
        rank, total = dist.get_rank(), stages * chunks
        places = [rank, total - 1 - rank] if name == "zero_bubble_v" else [rank + stages * at for at in range(chunks)]
        seconds = SECONDS / chunks
        made = [
            PipelineStage(Sleeper(seconds), place, total, torch.device("cpu"), dw_builder=lambda: self._sleep(seconds))
            for place in places
        ]
        several = kind not in (ScheduleGPipe, Schedule1F1B)
        self.is_first, self.is_last = 0 in places, total - 1 in places
        self.schedule = kind(made if several else made[0], MICROS, loss_fn=lambda output, target: output.square().sum())
        self.batch = torch.zeros(MICROS, WIDTH)

    def step(self) -> object:
        given = (self.batch,) if self.is_first else ()
        target = {"target": self.batch, "losses": []} if self.is_last else {}
        return self.schedule.step(*given, **target)

    @staticmethod
    def _sleep(seconds: float) -> Any:
        return lambda: time.sleep(seconds)


CONTESTANTS: dict[str, Any] = {"torch": Theirs, "torch again": Theirs, "sley": Ours}


def sleep_exactly() -> None:
    """Linux may wake a sleeper 50 us late to save interrupts, unless the thread asks for better."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def measured(name: str, stages: int, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of this rank's steps."""
    torch.set_num_threads(1)
    sleep_exactly()
    made = {who: make(name, stages) for who, make in CONTESTANTS.items()}
    steps = {who: contestant.step for who, contestant in made.items()}
    return interleave(steps, rounds, warmup=warmup, barrier=dist.barrier)


def simulated(name: str, stages: int) -> float:
    """Seconds of the step in which nothing but sleeping takes time."""
    pipeline = plan_from_dict(tables(name, stages)).pipeline
    assert pipeline is not None, name
    schedule: Schedule = pipeline.build()
    placement = schedule.placement(stages)
    each = SECONDS / schedule.chunks
    costs = Costs.uniform(placement.num_positions, forward=each, input_gradient=each, weight_gradient=each)
    return simulate(lower(schedule.lists(stages, MICROS), placement, MICROS), placement, costs).timeline.makespan_s


def main() -> None:
    found = parser(__doc__ or "", rounds=40)
    found.add_argument("--stages", type=int, nargs="*", default=STAGES, help="numbers of ranks")
    found.add_argument("--schedule", nargs="*", default=list(SCHEDULES), choices=SCHEDULES, help="schedules of sley-pp")
    found.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
    options = found.parse_args()
    for stages in options.stages:
        for name in options.schedule:
            everyone = Ranks(stages, timeout_s=3000)(measured, name, stages, options.rounds, options.warmup)
            seconds = slowest(everyone)
            perfect = simulated(name, stages)
            seconds["simulator"] = [perfect] * options.rounds
            against_simulator = {row.name: row for row in compare(seconds, "simulator")}
            rows = compare(seconds, "torch")
            noise = noise_of(rows, "torch again")
            ours, theirs = against_simulator["sley"], against_simulator["torch"]
            facts = {
                "sley / simulator": f"{ours.ratio:.4f} [{ours.low:.4f}, {ours.high:.4f}]",
                "torch / simulator": f"{theirs.ratio:.4f} [{theirs.low:.4f}, {theirs.high:.4f}]",
                "noise": round(noise, 4),
                f"sley <= {TARGET} x simulator": ours.meets(TARGET, noise),
                "sley <= 1.0 x torch": next(row for row in rows if row.name == "sley").meets(1.0, noise),
            }
            report(f"{name}, {stages} stages, {MICROS} microbatches", rows, facts, options.json)


if __name__ == "__main__":
    main()
