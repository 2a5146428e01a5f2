"""A wire that is late, under sharded weights: what `isp.communicator` hides of a latency that holds no core.

Every exchange arrives `LATENCY_S` after it was started, one gather and one reduction at a time; only then is it read. Each
form is timed with the latency and without, so that only what was injected counts, and a step is over when its last rank is.
Target: at least 80 % hidden at every fraction of recomputed blocks, of at most 1 - `VISIBLE` / exchanges.
"""

import statistics
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from contestants import Sley, plan
from latency import FORMS, Seconds, hidden, time_forms
from protocol import parser, report, slowest
from sley_core.comm.transport import Published, Transport, Work
from sley_testing.ranks import Ranks

SHAPE = {"layers": 8, "hidden": 384, "heads": 6, "sequence": 512}
LATENCY_S = 0.020
FRACTIONS = (0.0, 0.5, 1.0)
TARGET = 0.80
VISIBLE = 4
"""Exchanges beside which nothing is computed: the gathers of the table and of the first block, and their reductions."""

Sleeps = dict[str, list[float]]
"""Seconds that a step slept for each of its exchanges, by its place in the step and its name; one entry per step."""


class Wire:
    """Carries one message at a time; whoever waits for one sleeps."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.is_late = self.is_blocking = False
        self.num_messages = 0
        self.free_at = 0.0
        self.sleeps: Sleeps = defaultdict(list)

    def begin(self, form: str) -> None:
        """A step begins, in one of `FORMS`."""
        self.is_late, self.is_blocking = form.endswith("late"), form.startswith("blocking")
        self.num_messages = 0

    def carry(self, work: Work, label: str) -> Work:
        """Returns the handle of the exchange `work`, which has begun, as of one that takes `LATENCY_S` longer."""
        name = f"{self.operation} {self.num_messages:2d}, {label}"
        self.num_messages += 1
        late = work
        if self.is_late:
            self.free_at = max(self.free_at, time.perf_counter()) + LATENCY_S
            late = _Late(work, self.free_at, [] if self.is_blocking else self.sleeps[name])
        if self.is_blocking:
            late.wait()
        return late


class _Late(Work):
    """An exchange that arrives at `done_at`; `sleeps` is told how long was waited for that."""

    def __init__(self, work: Work, done_at: float, sleeps: list[float]) -> None:
        self.work = work
        self.done_at = done_at
        self.sleeps = sleeps
        self.is_open = True

    def is_completed(self) -> bool:
        return (not self.is_open or time.perf_counter() >= self.done_at) and self.work.is_completed()

    def wait(self) -> None:
        if self.is_open:
            self.is_open = False
            before = time.perf_counter()
            time.sleep(max(0.0, self.done_at - before))
            self.sleeps.append(time.perf_counter() - before if before < self.done_at else 0.0)
        self.work.wait()

    def release(self) -> None:
        self.work.release()

    def wait_sent(self) -> None:
        self.wait()
        self.work.wait_sent()


class _LateGathers(Published):
    """What `transport` has published, gathered over `wire`."""

    def __init__(self, published: Published, wire: Wire) -> None:
        self.published = published
        self.wire = wire

    def all_gather(self, tensors: Any, shards: Any, *, label: str) -> Work:
        return self.wire.carry(self.published.all_gather(tensors, shards, label=label), label)

    def wait_sent(self) -> None:
        self.published.wait_sent()


class _LateTransport:
    """The transport of a channel, whose gathers and reductions go over `wire`."""

    def __init__(self, transport: Transport, wire: Wire) -> None:
        self.transport = transport
        self.wire = wire

    def all_gather(self, tensors: Any, shards: Any, *, label: str) -> Work:
        return self.wire.carry(self.transport.all_gather(tensors, shards, label=label), label)

    def publish(self, shards: Any, *, label: str) -> Published:
        return _LateGathers(self.transport.publish(shards, label=label), self.wire)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def reduce_scatter(self, tensors: Any, scratches: Any, *, label: str, checksum: int = 0) -> Work:
        return self.wire.carry(self.transport.reduce_scatter(tensors, scratches, label=label, checksum=checksum), label)


def measured(fraction: float, rounds: int) -> tuple[dict[str, list[float]], int, Sleeps]:
    """This rank's seconds of each form, the exchanges of a step, and where the overlapped form slept."""
    torch.set_num_threads(1)
    tables = plan(
        SHAPE,
        1,
        [{"use": "dp.bucketed"}],
        parallel={"wp": dist.get_world_size()},
        weights={"use": "isp.communicator"},
        activations={"use": "core.recompute", "fraction": fraction},
    )
    contestant = Sley(tables, backward_only=True)
    transports: Any = contestant.run.groups["wp"].transports
    wires = [Wire(channel) for channel in transports]
    for wire in wires:
        transports[wire.operation] = _LateTransport(transports[wire.operation], wire)
    batch = contestant.batch()

    def step(form: str) -> None:
        for wire in wires:
            wire.begin(form)
        contestant.step(batch)

    for form in (FORMS[0], *FORMS):
        step(form)
    for wire in wires:
        wire.sleeps.clear()
    seconds = time_forms(step, rounds, dist.barrier)
    sleeps = {name: found for wire in wires for name, found in wire.sleeps.items()}
    return seconds, sum(wire.num_messages for wire in wires), sleeps


def facts_of(everyone: list[tuple[dict[str, list[float]], int, Sleeps]]) -> dict[str, object]:
    """The share that is hidden, and the waits of more than 1 ms, of the rank that waited longest."""
    seconds: Seconds = slowest([one[0] for one in everyone])
    _, num_exchanges, sleeps = everyone[0]
    facts = hidden(seconds, num_exchanges, latency_s=LATENCY_S, num_visible=VISIBLE)
    middle = {form: statistics.median(values) for form, values in seconds.items()}
    plain = (middle["blocking, late"] - middle["overlapped, late"]) / (LATENCY_S * num_exchanges)
    facts["hidden, without the forms that are not late"] = round(plain, 3)
    for name in sleeps:
        slept = 1e3 * max(statistics.median(one[2][name]) for one in everyone)
        if slept > 1.0:
            facts[f"slept, ms: {name}"] = round(slept, 1)
    return {**facts, "target": TARGET}


def main() -> None:
    known = parser(__doc__ or "", rounds=40)
    known.add_argument("--worlds", type=int, nargs="*", default=(2,), help="numbers of ranks")
    known.add_argument("--fractions", type=float, nargs="*", default=FRACTIONS, help="of blocks that are recomputed")
    options = known.parse_args()
    for world in options.worlds:
        for fraction in options.fractions:
            everyone = Ranks(world, timeout_s=3000)(measured, fraction, options.rounds)
            title = f"injected latency of {1e3 * LATENCY_S:g} ms per exchange, fraction {fraction}, {world} ranks"
            report(title, [], facts_of(everyone), options.json)


if __name__ == "__main__":
    main()
