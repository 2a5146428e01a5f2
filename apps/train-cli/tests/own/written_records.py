"""Records of ranks as tests write them: what each does in every step, and what it waits in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sley_doctor.reports.work_record import DATA, UPDATE, Queue, SeenMessage, Spread, Start, Usage, Window, WorkRecord

BLOCK = "Block Linearx2 4096"
QUIET = Usage(0.1, 0.01, 10, 0, 0)


def spread(seconds: float, width: float = 0.1) -> Spread:
    return Spread(seconds * (1 - width), seconds, seconds * (1 + width))


def window(number: int, work: Mapping[str, float], waits: Mapping[str, float], **more: Any) -> Window:
    """Ten steps, from `10 * number + 1` on. waits: of the group of all ranks."""
    seconds = sum(work.values()) + sum(waits.values())
    return Window(
        first=10 * number + 1,
        last=10 * number + 10,
        time=float(number),
        seconds=spread(seconds),
        work={place: spread(one) for place, one in work.items()},
        layers=more.get("layers", {}),
        waits={queue: spread(one) for queue, one in waits.items()},
        queues=more.get("queues", {queue: Queue("stage[0, 1]", (0, 1), None, 1.0, 1e5) for queue in waits}),
        usage=more.get("usage", QUIET),
        private_mb=more.get("private_mb", 300.0),
        device_mb=more.get("device_mb", 0.0),
        sent=more.get("sent", {}),
        taken=more.get("taken", {}),
    )


def record(rank: int, windows: Sequence[Window], world: int = 2, stage: int = 0, **more: Any) -> WorkRecord:
    return WorkRecord(Start(rank, world, stage, "here", 1, "cpu", 0.0, **more), windows)


def replicas(*works: Mapping[str, float], num_windows: int = 6) -> list[WorkRecord]:
    """Ranks of one stage that do this in every step, and wait for the slowest of them in their sums."""
    step_s = max(sum(work.values()) for work in works) + 0.002
    queues = {"stage main": Queue("stage", tuple(range(len(works))), None, 1.0, 1e5)}
    return [
        record(
            rank,
            [window(n, work, {"stage main": step_s - sum(work.values())}, queues=queues) for n in range(num_windows)],
            len(works),
        )
        for rank, work in enumerate(works)
    ]


USUAL = {DATA: 0.0001, "F0": 0.02, "B0": 0.04, UPDATE: 0.005}


def stages(*layers: Mapping[str, float], way_s: float = 0.0, num_windows: int = 6) -> list[WorkRecord]:
    """A rank for each stage, whose chunk has these layers; messages up take `way_s`."""
    works = [sum(some.values()) for some in layers]
    step_s = 1.5 * max(works) + 2 * way_s

    def messages(rank: int, number: int) -> dict[str, Any]:
        steps = range(10 * number + 1, 10 * number + 11, 4)
        sent = [SeenMessage(step, step, float(step)) for step in steps]
        taken = [SeenMessage(one.step, one.number, one.time_s + way_s + 0.0002, way_s + 0.01) for one in sent]
        if rank == 0:
            return {"sent": {"pp up 0>1": sent}, "queues": {}}
        return {"taken": {"pp up 0>1": taken}, "queues": {"pp up 0>1": Queue("pp[0, 1]", (0, 1), 0, 1.0, 1e4)}}

    return [
        record(
            rank,
            [
                window(
                    number,
                    {"F0": works[rank]},
                    {"pp up 0>1": step_s - works[rank]},
                    layers={"F0": {name: spread(one) for name, one in some.items()}},
                    **messages(rank, number),
                )
                for number in range(num_windows)
            ],
            len(layers),
            rank,
            layers={name: BLOCK if name.startswith("blocks") else name for name in some},
        )
        for rank, some in enumerate(layers)
    ]
