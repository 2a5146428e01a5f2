"""Stage links that are wrong in one way each, to show that the contract of links finds it; plugin `broken`."""

from __future__ import annotations

import torch

from sley_core.hookspecs import hookimpl
from sley_core.records import StageLinkRecord
from sley_wave.config import LinkConfig
from sley_wave.link import Link


class Reusing(Link):
    """Receives into the memory of the walk before, whatever has that."""

    def __init__(self, config):
        super().__init__(config)
        self._memory = {}

    def _received(self, transfer):
        description, tensors = super()._received(transfer)
        places = [self._memory.setdefault((transfer, at, each.shape), each) for at, each in enumerate(tensors)]
        return description, [place.copy_(each) for place, each in zip(places, tensors, strict=True)]


class Disorderly(Link):
    """Gives out what comes first, whatever is asked for."""

    def take(self, transfer):
        way = "up" if transfer.peer < self._stage else "down"
        return self._received(self._due[way].popleft())


class Rigid(Link):
    """Takes all messages of a boundary for ones like the first."""

    def __init__(self, config):
        super().__init__(config)
        self._known = {}

    def _received(self, transfer):
        description, tensors = super()._received(transfer)
        return self._known.setdefault((transfer.flow, transfer.chunk), description), tensors


class Late(Link):
    """Reads what it sends when it is next called, and not at once."""

    def __init__(self, config):
        super().__init__(config)
        self._late = []

    def send(self, *message):
        self._flush()
        self._late.append(message)

    def post(self, transfer, key):
        self._flush()
        super().post(transfer, key)

    def take(self, transfer):
        self._flush()
        return super().take(transfer)

    def drain(self):
        self._flush()
        super().drain()

    def _flush(self):
        while self._late:
            super().send(*self._late.pop(0))


class Deaf(Link):
    """Hears what its neighbours walk through, and does not compare."""

    def _agree(self, peer):
        if peer not in self._agreed:
            self._hear(torch.empty_like(self._word), peer)
            self._agreed.add(peer)


class Patient(Link):
    """Waits for its neighbours before it aborts."""

    def abort(self, why):
        self.drain()


@hookimpl
def sley_records():
    kinds = (Reusing, Disorderly, Rigid, Late, Deaf, Patient)
    return [
        StageLinkRecord(name=kind.__name__.lower(), config=LinkConfig, build=f"broken_links:{kind.__name__}") for kind in kinds
    ]
