"""A small decoder in pipeline stages on gloo ranks, one thread each: ours, PyTorch's same schedule, and the perfect one.

Forward, backward and messages of a step, without optimizer. Perfect is the simulator's step with the action times of other
steps of ours and links that take nothing. Targets: ours / PyTorch's <= 1.00 in time, <= 0.90 for the zero-bubble
schedules; ours / perfect <= 1.05, with PyTorch's ratio to the same perfect beside; live tensors and RSS not above PyTorch's.
"""

import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from contestants import Sley, plan
from peaks import peak_live_mb, peak_resident_mb
from protocol import compare, interleave, noise_of, parser, report, slowest
from schedules import SCHEDULES
from sley_core.actions.action import Kind, Schedule
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, TimedAction, simulate
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import SchedulerHook
from sley_testing.ranks import Ranks
from sley_trainer.run import Run

STAGES = (2, 4)
SHAPE = {"layers": 8, "hidden": 256, "heads": 4, "sequence": 64}
MICROS = 8
TIME_TARGET = {"zero_bubble_h1": 0.90, "zero_bubble_v": 0.90}
PERFECT_TARGET = 1.05


def tables(name: str, stages: int) -> dict[str, Any]:
    batch = {"global_size": MICROS, "micro_size": 1}
    return plan(SHAPE, MICROS, None, batch=batch, parallel={"pp": stages, "dp": 1}, pipeline={"use": f"pp.{name}"})


class Ours:
    """A run of the plan, ended before the optimizer."""

    def __init__(self, name: str, stages: int) -> None:
        self.sley = Sley(tables(name, stages), backward_only=True)

    def step(self, batch: dict[str, Tensor]) -> object:
        return self.sley.step(batch)


class Clock(SchedulerHook):
    """Notes when the actions of a step ran, without their waits for other stages."""

    def __init__(self, run: Run) -> None:
        self.spans: list[TimedAction] = []
        self._run = run
        self._started_s = 0.0

    def before_forward(self, micro: object, inputs: object) -> None:
        self._started_s = time.perf_counter()

    def before_backward(self, micro: object, output_gradient: object) -> None:
        self._started_s = time.perf_counter()

    def after_forward(self, micro: object, output: object) -> None:
        self._stop()

    def before_loss(self, micro: object, output: object) -> None: ...

    def after_loss(self, micro: object, loss: object) -> None:
        self._stop()

    def after_backward(self, micro: object, input_gradient: object) -> None:
        self._stop()

    def _stop(self) -> None:
        action = self._run.store.state.action
        assert action is not None
        if self.spans and self.spans[-1].action == action:
            self.spans.pop()  # a forward without its loss
        self.spans.append(TimedAction(self._run.stepper.lists.stage, action, self._started_s, time.perf_counter()))


class Clocked(Ours):
    """The same; notes when its actions ran."""

    def __init__(self, name: str, stages: int) -> None:
        super().__init__(name, stages)
        self.clock = Clock(self.sley.run)
        self.sley.run.stepper.executor.hooks = [self.clock]
        self.timelines: list[list[TimedAction]] = []

    def step(self, batch: dict[str, Tensor]) -> object:
        self.clock.spans = []
        done = super().step(batch)
        self.timelines.append(self.clock.spans)
        return done


class Theirs:
    """torch's runtime over the same layers with the same weights, cut alike."""

    def __init__(self, name: str, stages: int) -> None:
        run = Sley(tables(name, stages)).run
        placement, stage = run.stepper.lists.placement, run.stepper.lists.stage
        held = {placement.position(stage, at): chunk for at, chunk in enumerate(run.stepper.executor.chunks)}
        run.close()
        for layer in run.layers:
            for module in layer.module.modules():
                module.__dict__.pop("forward", None)  # a linear that hands its weight gradients to our engine
        total, cpu = placement.num_positions, torch.device("cpu")
        made = [
            PipelineStage(nn.Sequential(*[layer.module for layer in chunk]), position, total, cpu)
            for position, chunk in held.items()
        ]
        chunks, kind = SCHEDULES[name]
        several = chunks > 1 or name.startswith("zero_bubble")
        self.modules = [one.submod for one in made]
        self.is_first, self.is_last = 0 in held, total - 1 in held
        self.schedule = kind(made if several else made[0], MICROS, loss_fn=self._loss)

    def step(self, batch: dict[str, Tensor]) -> object:
        for module in self.modules:
            module.zero_grad()
        given = (batch["tokens"],) if self.is_first else ()
        target = {"target": batch["labels"], "losses": []} if self.is_last else {}
        return self.schedule.step(*given, **target)

    @staticmethod
    def _loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


CONTESTANTS: dict[str, Any] = {"torch": Theirs, "torch again": Theirs, "sley": Ours, "sley, clocked": Clocked}


def batch_of() -> dict[str, Tensor]:
    numbers = torch.randint(256, (2, MICROS, SHAPE["sequence"]), generator=torch.Generator().manual_seed(0))
    return {"tokens": numbers[0], "labels": numbers[1]}


def times(name: str, stages: int, rounds: int) -> tuple[dict[str, list[float]], list[list[TimedAction]]]:
    """Seconds of this rank's steps, and the actions of the clocked ones."""
    torch.set_num_threads(1)
    batch = batch_of()
    made = {who: make(name, stages) for who, make in CONTESTANTS.items()}
    steps = {who: (lambda one=one: one.step(batch)) for who, one in made.items()}
    seconds = interleave(steps, rounds, barrier=dist.barrier)
    return seconds, made["sley, clocked"].timelines[-rounds:]


def perfect(name: str, stages: int, by_rank: list[list[list[TimedAction]]]) -> float:
    """Seconds of the simulated step with the median times of what was clocked. by_rank: spans per rank and step."""
    pipeline = plan_from_dict(tables(name, stages)).pipeline
    assert pipeline is not None, name
    schedule: Schedule = pipeline.build()
    placement = schedule.placement(stages)
    seconds: dict[Kind, list[list[float]]] = defaultdict(lambda: [[] for _ in placement.route])
    for span in (span for steps in by_rank for spans in steps for span in spans):
        seconds[span.action.kind][placement.position(span.stage, span.action.chunk)].append(span.end_s - span.start_s)
    medians = {kind: tuple(median(times) if times else 0.0 for times in at) for kind, at in seconds.items()}
    none = (0,) * stages * placement.chunks
    costs = Costs(medians, (0.0,) * (len(none) - 1), none, none, none[1:])
    return simulate(lower(schedule.lists(stages, MICROS), placement, MICROS), placement, costs).timeline.makespan_s


def live(name: str, stages: int, who: str) -> float:
    """Peak of live tensor bytes in three steps of `who` alone, in MiB, construction included."""
    return peak_live_mb(lambda: three_steps(name, stages, who))


def resident(name: str, stages: int, who: str) -> float:
    """High-water RSS of three steps of `who` alone above the state after imports, in MiB."""
    return peak_resident_mb(lambda: three_steps(name, stages, who))


def three_steps(name: str, stages: int, who: str) -> None:
    batch = batch_of()
    contestant = CONTESTANTS[who](name, stages)
    for _ in range(3):
        contestant.step(batch)


def report_times(name: str, stages: int, rounds: int, path: Path | None) -> None:
    everyone = Ranks(stages, timeout_s=3000)(times, name, stages, rounds)
    seconds = slowest([rank_seconds for rank_seconds, _ in everyone])
    seconds["perfect"] = [perfect(name, stages, [spans for _, spans in everyone])] * rounds
    rows = compare(seconds, "torch")
    noise = noise_of(rows, "torch again")
    by_name = {row.name: row for row in rows}
    to_perfect = {row.name: row for row in compare(seconds, "perfect")}
    ours, theirs = to_perfect["sley"], to_perfect["torch"]
    target = TIME_TARGET.get(name, 1.00)
    facts = {
        "noise": round(noise, 4),
        "sley / perfect": f"{ours.ratio:.3f} [{ours.low:.3f}, {ours.high:.3f}]",
        "torch / perfect": f"{theirs.ratio:.3f} [{theirs.low:.3f}, {theirs.high:.3f}]",
        f"sley <= {target} x torch": by_name["sley"].meets(target, noise),
        f"sley <= {PERFECT_TARGET} x perfect": ours.meets(PERFECT_TARGET, noise),
    }
    report(f"{name}, {stages} stages, {MICROS} microbatches of {SHAPE['sequence']} tokens", rows, facts, path)


def report_memory(name: str, stages: int, path: Path | None) -> None:
    facts: dict[str, object] = {}
    ranks = Ranks(stages, timeout_s=600)
    for who in ("torch", "sley"):
        for label, measure in (("live tensors", live), ("RSS above imports", resident)):
            facts[f"{who}, {label} of each rank"] = [round(found, 1) for found in ranks(measure, name, stages, who)]
    report(f"peak MiB of three steps, {name}, {stages} stages", [], facts, path)


def main() -> None:
    found = parser(__doc__ or "", rounds=40)
    found.add_argument("--stages", type=int, nargs="*", default=STAGES, help="numbers of ranks")
    found.add_argument("--schedule", nargs="*", default=list(SCHEDULES), choices=SCHEDULES, help="schedules of sley-pp")
    found.add_argument("--part", nargs="*", default=("time", "memory"), choices=("time", "memory"), help="what to measure")
    options = found.parse_args()
    for stages in options.stages:
        for name in options.schedule:
            if "time" in options.part:
                report_times(name, stages, options.rounds, options.json)
            if "memory" in options.part:
                report_memory(name, stages, options.json)


if __name__ == "__main__":
    main()
