"""The plugin `broken`: links, schedules and tie handlers with one bug each, based on the plugin `wave`."""

from functools import partial
from itertools import count

import torch

from sley_core.api.actions import Action, Kind, Schedule
from sley_core.api.plan import Table
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, ScheduleRecord, StageLinkRecord
from sley_wave.link import Link
from sley_wave.plugin import NoKeys, Ties

Lists = list[list[Action]]
LINKS = ("reusing", "disorderly", "rigid", "late", "deaf", "patient")


class Reusing(Link):
    """Receives into memory of the previous walk, even if it is still referenced."""

    def __init__(self, config):
        super().__init__(config)
        self._memory = {}

    def _receive_message(self, transfer):
        description, tensors = super()._receive_message(transfer)
        memory = [self._memory.setdefault((transfer, index, tensor.shape), tensor) for index, tensor in enumerate(tensors)]
        return description, [reused.copy_(tensor) for reused, tensor in zip(memory, tensors, strict=True)]


class Disorderly(Link):
    """Returns messages in order of arrival."""

    def receive(self, transfer):
        direction = "up" if transfer.peer < self._stage else "down"
        return self._receive_message(self._posted[direction].popleft())


class Rigid(Link):
    """Describes all messages of a boundary like the first one."""

    def __init__(self, config):
        super().__init__(config)
        self._descriptions = {}

    def _receive_message(self, transfer):
        description, tensors = super()._receive_message(transfer)
        return self._descriptions.setdefault((transfer.flow, transfer.chunk), description), tensors


class Late(Link):
    """Reads sent tensors at its next call instead of at once."""

    def __init__(self, config):
        super().__init__(config)
        self._unsent = []

    def send(self, *message):
        self._flush()
        self._unsent.append(message)

    def post_receive(self, transfer, key):
        self._flush()
        super().post_receive(transfer, key)

    def receive(self, transfer):
        self._flush()
        return super().receive(transfer)

    def drain(self):
        self._flush()
        super().drain()

    def _flush(self):
        while self._unsent:
            super().send(*self._unsent.pop(0))


class Deaf(Link):
    """Receives the walks of its neighbours but does not compare them."""

    def _compare_walks(self, peer):
        if peer not in self._compared_peers:
            self._receive_tensor(torch.empty_like(self._digest), peer)
            self._compared_peers.add(peer)


class Patient(Link):
    """Waits for its neighbours before an abort."""

    def abort(self, why):
        self.drain()


def forwards_first(micros: int) -> list[Action]:
    """Returns all forwards, then all backwards."""
    return [Action(kind, 0, micro) for kind in (Kind.FORWARD, Kind.BACKWARD) for micro in range(micros)]


def one_by_one(stages: int, chunks: int, micros: int) -> Lists:
    """Returns correct, slow lists: each microbatch passes through all stages and back before the next."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [[Action(kind, 0, micro) for micro in range(micros) for kind in kinds] for _ in range(stages)]


def blocked(stages: int, chunks: int, micros: int) -> Lists:
    """Returns lists whose last stage starts with the last microbatch, which deadlocks."""
    lists = one_by_one(stages, chunks, micros)
    if stages > 1:
        lists[-1] = [action for micro in reversed(range(micros)) for action in lists[-1] if action.micro == micro]
    return lists


def careless(stages: int, chunks: int, micros: int) -> Lists:
    """Returns lists without the last backward, from five microbatches on."""
    lists = one_by_one(stages, chunks, micros)
    return [actions[:-1] for actions in lists] if micros >= 5 else lists


def greedy(stages: int, chunks: int, micros: int) -> Lists:
    """Returns lists that hold all microbatches instead of one."""
    return [forwards_first(micros) for _ in range(stages)]


def forgetful(calls: "count[int]", stages: int, chunks: int, micros: int) -> Lists:
    """Returns different lists in every second call."""
    return greedy(stages, chunks, micros) if next(calls) % 2 else one_by_one(stages, chunks, micros)


GENERATORS = {"one_by_one": one_by_one, "blocked": blocked, "careless": careless, "greedy": greedy}


class BugConfig(Table):
    bug: str


def build_schedule(config: BugConfig) -> Schedule:
    return Schedule(GENERATORS.get(config.bug, partial(forgetful, count())))


class Twice(Ties):
    """Sums gradients twice."""

    def finish_step(self, step):
        super().finish_step(step)
        super().finish_step(step)


@hookimpl
def sley_records():
    parts = {"link": "wave.link", "partition": "wave.even"}
    return [
        *(StageLinkRecord(name=name, config=NoKeys, build=f"broken_parts:{name.title()}") for name in LINKS),
        ScheduleRecord(name="schedule", config=BugConfig, build="broken_parts:build_schedule", **parts),
    ]


@hookimpl
def sley_gradient_handlers():
    return [GradientHandlerRecord(name="twice", config=NoKeys, build="broken_parts:Twice", role="tie", after=("reducer",))]
