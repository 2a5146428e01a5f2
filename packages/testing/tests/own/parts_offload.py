"""Offload managers: the simplest correct one, and some with one bug each."""

from sley_core.api.memory import Moved, OffloadManager, Where, storage_id
from sley_core.errors import StateError

PARTS = ("weights", "buffers", "masters", "optimizer_states")


class Naive(OffloadManager):
    """Copies each storage to the host and back, and waits for each copy immediately."""

    parts = PARTS

    def __init__(self, config) -> None:
        self._away = {}
        self._moved = {part: Moved() for part in PARTS}

    def attach(self, parts, inventory) -> None:
        self._device = parts.world.device
        self._inventory = inventory
        self._stream = self._device.copy_stream()

    def offload(self, part):
        moved = self._moved[part]
        if part in self._away:
            return lambda: None
        self._stream.wait_for_device()
        self._away[part] = [(piece, self._copied(piece.memory)) for piece in self._inventory.storages(part)]
        self._hold(self._stream.record())
        moved.given_back = sum(piece.free() for piece, _ in self._away[part])
        moved.copied_out += moved.given_back
        return lambda: None

    def onload(self, part):
        if part not in self._away:
            return lambda: None
        copies = self._away.pop(part)  # keeps host memory until its copies are complete
        for piece, copy in copies:
            piece.reallocate()
            self._stream.wait_for_device()
            self._stream.copy(piece.memory, copy.data)
        self._hold(self._stream.record())
        return lambda: None

    def require(self, part, caller) -> None:
        if part in self._away:
            raise StateError.offloaded_error(part, caller)

    def where(self, part):
        return Where.AWAY if part in self._away else Where.HERE

    def moved(self, part):
        return self._moved[part]

    def host(self, part):
        return {storage_id(piece.memory): copy.data for piece, copy in self._away.get(part, ())}

    def detach(self) -> None:
        for part in PARTS:
            self.onload(part)

    def _copied(self, memory):
        copy = self._device.host_memory(memory.nbytes)
        self._stream.copy(copy.data, memory)
        return copy

    def _hold(self, event) -> None:
        event.make_device_wait()
        event.wait()


class Careless(Naive):
    """Does not wait for copies."""

    def _hold(self, event) -> None:
        pass


class Skips(Naive):
    """Copies blocks of 256 bytes and omits the remainder."""

    def _copied(self, memory):
        copy = self._device.host_memory(memory.nbytes)
        end = memory.nbytes // 256 * 256
        self._stream.copy(copy.data[:end], memory[:end])
        return copy


class Open(Naive):
    """Accepts the use of offloaded parts."""

    def require(self, part, caller) -> None:
        pass


class Twice(Naive):
    """Copies offloaded parts again."""

    def offload(self, part):
        if part in self._away:
            self.onload(part)
        return super().offload(part)


class Stays(Naive):
    """Does not reload memory when the run closes."""

    def detach(self) -> None:
        pass


class Half(Naive):
    """Frees only every second storage."""

    def offload(self, part):
        wait = super().offload(part)
        for piece, _ in self._away[part][::2]:
            if not piece.memory.untyped_storage().nbytes():
                piece.reallocate()
        return wait


class Silent(Naive):
    """Reports no bytes."""

    def moved(self, part):
        return Moved()
