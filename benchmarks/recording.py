"""What it costs to record who is slow: how often each part of the recorder is called in a step, times what a call takes.

A difference of half a percent between two runs is less than the noise of most machines, so calls are counted in real steps and
timed by themselves, on the thread's own clock. Target: <= 0.5 % of a step.
"""

import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from overhead import CPU, CUDA, THREADS, plan
from protocol import arguments
from sley_core.actions.action import Action, Kind
from sley_core.comm.exchanges import BEGINNING, BETWEEN_STEPS, begin_turn
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_doctor.work_record import WorkRecorder
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

CALLS, REPEATS = 2000, 9
TARGET = 0.005


def counted(run: Run, steps: int) -> tuple[Counter[str], float]:
    """How often each method is called in a step on average, and the median of a step in seconds."""
    counts: Counter[str] = Counter()

    class Counting(WorkRecorder):
        def on_entry(self, entry: object) -> None:
            counts["on_entry"] += 1
            super().on_entry(entry)

        def on_wait(self, turn: Any, since: float) -> None:
            counts["on_wait"] += 1
            super().on_wait(turn, since)

    recorder = Counting(run.parts, run.feed, lambda _: None)
    recorder.attach()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        run.step()
        seconds.append(time.perf_counter() - begin)
    counts["on_entry"] -= steps  # those that end a step, timed apart
    counts["end of a step"] = steps
    recorder.detach()
    return Counter({name: count / steps for name, count in counts.items()}), median(seconds)


def costs(run: Run) -> dict[str, float]:
    """Returns the seconds of one call of each method. The end of a step includes its share of the windows that are written."""
    recorder = WorkRecorder(run.parts, run.feed, lambda _: None)
    step_progress = run.groups.progress.step_progress
    recorder.attach()
    action, turn = Action(Kind.FORWARD, 0, 0), begin_turn("all-reduce", run.groups["all"], "a tensor")
    run.step()  # which makes the places that a window has

    def end_step() -> None:
        step_progress.step += 1
        recorder.on_entry(BETWEEN_STEPS)
        recorder.on_entry(BEGINNING)

    seconds = {
        "on_entry": _seconds(lambda: recorder.on_entry(action)),
        "on_wait": _seconds(lambda: recorder.on_wait(turn, 0.0)),
        "end of a step": _seconds(end_step, 50),
    }
    recorder.detach()
    return seconds


def _seconds(call: Callable[[], Any], calls: int = CALLS) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.thread_time()
        for _ in range(calls):
            call()
        best = min(best, (time.thread_time() - begin) / calls)
    return best


def main() -> None:
    options = arguments(__doc__ or "", rounds=40)
    torch.set_num_threads(THREADS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size: dict[str, Any] = CUDA if device == "cuda" else CPU
    with assemble(plan_from_dict(plan(size, device, 4)), World.alone(device)) as run:
        times, step_s = counted(run, options.rounds)
        found = costs(run)
    total = sum(times[name] * found[name] for name in times)
    share = total / step_s
    for name, seconds in found.items():
        print(f"{name:<16}{seconds * 1e6:9.2f} us{times.get(name, 0):9.1f} a step")
    print(f"{total * 1e6:.0f} us per step of {step_s * 1e3:.1f} ms: {share:.2%}")
    print("target met" if share <= TARGET else f"target {TARGET:.1%} missed")


if __name__ == "__main__":
    main()
