"""Moves the parts of a run's memory that a table `[[offload]]` names: one mover for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sley_core.api.memory import MemoryInventory, Moved, OffloadManager, Part, Stepped, StorageEntry, Where, is_away, storage_id
from sley_core.api.parts import Param, Parts
from sley_memory.arena import HostArena
from sley_memory.config import OffloadConfig
from sley_memory.movers import MB, Gradients, HostCopy, Mover, Pieces, Streams, Trimmed, by_bytes, packed
from sley_memory.shared import SharedCopies

OF_LAYERS: tuple[Part, ...] = ("weights", "buffers")  # parts that a layer's forward needs


class BetweenSteps(Mover):
    """Steps the optimizer bucket by bucket, with only the bucket's states on the device; registers itself with the run's step.

        tail of the backward    update of 0      update of 1                  update of 2      next forward
        0 comes ............... 1 comes ........ 0 leaves, 2 comes .......... 1 leaves ....... 2 leaves

    At most two buckets are on the device at once. bucket_bytes: of the parameters that are stepped together; AdamW's states are
    twice as large. Calls of `offload` and `onload` only count.
    """

    comes_back = True

    def __init__(
        self, inventory: MemoryInventory, parts: Parts, streams: Streams, arena: HostArena, bucket_bytes: int, moved: Moved
    ) -> None:
        super().__init__(moved)
        self._inventory = inventory
        self._copies = partial(HostCopy, streams=streams, arena=arena, bucket_bytes=bucket_bytes, moved=moved, makes_room=False)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[tuple[list[Stepped], HostCopy]] = []
        self._is_first = False
        parts.events.step_in_buckets = self._step
        parts.events.began.append(self._began)
        parts.events.after_update.append(self._leave)
        parts.store.on_ready.append(self._gradient_ready)

    @property
    def where(self) -> Where:
        """Returns where the states are: away, between two steps; else where the first bucket is that is not away."""
        return next((states.where for _, states in self._buckets if states.where is not Where.AWAY), Where.AWAY)

    def wait(self) -> None:
        for _, states in self._buckets:
            states.wait()

    def host(self) -> Mapping[int, Tensor]:
        return {key: copy for _, states in self._buckets for key, copy in states.host().items()}

    def _began(self) -> None:
        """Sends away states that a failed step left on the device; the next gradient is the step's first."""
        self._leave()
        self._is_first = True

    def _gradient_ready(self, _param: Param) -> None:
        """Starts to bring the first bucket at the step's first gradient, while the rest of the backward runs."""
        if self._is_first:
            self._is_first = False
            self._come(0)

    def _step(self, stepped: Sequence[Stepped]) -> Iterator[Sequence[Stepped]]:
        """Yields each bucket of weights once its states are here; meanwhile the next one's come, afterwards its own leave."""
        # New buckets: all in the first step, later those of weights that were unfrozen.
        known = {id(each.parameter) for bucket, _ in self._buckets for each in bucket}
        for bucket in by_bytes([each for each in stepped if id(each.parameter) not in known], self._bucket_bytes):
            self._buckets.append((bucket, self._copies(self._states(bucket))))
        self._come(0)
        for at, (bucket, states) in enumerate(self._buckets):
            self._come(at + 1)
            states.require()
            yield bucket
            states.offload()

    def _come(self, at: int) -> None:
        """Starts to bring the states of bucket number `at`, if there is one and they are away."""
        if at < len(self._buckets) and self._buckets[at][1].where in (Where.LEAVING, Where.AWAY):
            self._buckets[at][1].onload()

    def _leave(self) -> None:
        """Sends away the states of all buckets that are here or coming."""
        for _, states in self._buckets:
            if states.where in (Where.HERE, Where.COMING):
                states.offload()

    def _states(self, bucket: Sequence[Stepped]) -> Pieces:
        """Returns a function that lists the states of a bucket's weights, small ones laid together: those whose storages
        nothing else uses, so that they can leave while other weights are stepped.
        """
        known: set[int] = set()
        shared: set[int] = set()

        def pieces() -> list[StorageEntry]:
            states = self._inventory.states_of(bucket)
            keys = {storage_id(piece.memory) for piece in states}
            if not keys <= known:  # new in the first step, and where a program has loaded states
                shared.update(keys & self._inventory.shared_with(bucket))
                known.clear()
                known.update(keys)
            own = packed([piece for piece in states if storage_id(piece.memory) not in shared], self._bucket_bytes)
            known.update(storage_id(piece.memory) for piece in own)
            return own

        return pieces


class Gate:
    """Hooks on every module of `modules` while it is closed; none while it is open, so that a step pays nothing.

    check: called before a module's forward; makes weights that are coming usable, or raises for weights that are away.
    """

    def __init__(self, modules: Sequence[nn.Module], check: Callable[[], None]) -> None:
        self._modules = modules
        self._before = lambda *_: check()
        self.hooks: list[RemovableHandle] = []

    def close(self) -> None:
        """Puts the hooks on, before those that the program has."""
        for layer in () if self.hooks else self._modules:
            for module in layer.modules():
                self.hooks.append(module.register_forward_pre_hook(self._before, prepend=True))
                self.hooks.append(module.register_state_dict_pre_hook(self._before))  # type: ignore[no-untyped-call]  # torch's

    def open(self) -> None:
        """Takes the hooks off."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


class Manager(OffloadManager):
    """Moves the parts that its table names to host memory and back.

    With `when = "between_steps"` optimizer states are away except during the update, whatever is called; other parts move by
    call. On a device without memory it is not attached, and does nothing.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self._moved: dict[Part, Moved] = {part: Moved() for part in config.moves}
        self._movers: dict[Part, Mover] = {part: Mover(moved) for part, moved in self._moved.items()}
        self._gate = Gate((), self._check_layers)
        self._streams: Streams | None = None

    @property
    def parts(self) -> Sequence[Part]:
        return self.config.moves

    def attach(self, parts: Parts, inventory: MemoryInventory) -> None:
        """Makes the mover of each part, and its copy streams and host memory."""
        device, budget = parts.world.device, self.config.host_budget_mb
        self._streams = Streams(device.copy_stream)
        arena = HostArena(device.host_memory, self._streams.wait, None if budget is None else int(budget * MB))
        self._gate = Gate([layer.module for layer in parts.layers], self._check_layers)
        for layer in parts.layers:
            # For code that gathers shards in a backward by hand, whose forward came before they left. In steps and evaluations
            # the gate is open on all ranks.
            check = partial(self._check_layers, "a use of a layer's weights")
            parts.waits.before_layer(layer.name, check, lambda: bool(self._gate.hooks))
        for part in self.parts:
            self._movers[part] = self._mover(part, parts, inventory, arena)

    def _mover(self, part: Part, parts: Parts, inventory: MemoryInventory, arena: HostArena) -> Mover:
        assert self._streams is not None, "not attached"
        moved, bucket_bytes = self._moved[part], int(self.config.bucket_mb * MB)
        if part == "gradients":
            return Gradients(parts.store.free, parts.store.build, partial(inventory.num_bytes, part), moved)
        if part in ("pools", "messages"):
            return Trimmed(partial(inventory.trim, part), moved)
        if part == "optimizer_states" and self.config.steps_in_buckets:
            return BetweenSteps(inventory, parts, self._streams, arena, bucket_bytes, moved)
        pieces: Pieces = partial(inventory.pieces, part)
        if part == "optimizer_states":
            pieces = lambda: packed(inventory.pieces(part), bucket_bytes)  # noqa: E731
        copies = HostCopy(pieces, self._streams, arena, bucket_bytes, moved)
        if not self.config.is_shared or parts.groups["wdp"].size == 1:
            return copies
        return SharedCopies(
            part, pieces, parts.groups["wdp"], parts.groups["control"], self._streams, arena, bucket_bytes, moved
        )

    def offload(self, part: Part) -> Callable[[], None]:
        """Starts to move `part` off the device; returns what waits. Without weights or buffers, calls of layers are refused."""
        if part in OF_LAYERS:
            self._gate.close()
        self._movers[part].offload()
        return self._movers[part].wait

    def onload(self, part: Part) -> Callable[[], None]:
        self._movers[part].onload()
        self._open()
        return self._movers[part].wait

    def host(self, part: Part) -> Mapping[int, Tensor]:
        return self._movers[part].host()

    def require(self, part: Part, what: str) -> None:
        """Makes the device's work wait for `part` if it is coming. Raises StateError `memory-away` if it is away, or on its way
        there, and does not come back by itself.
        """
        mover = self._movers[part]
        if mover.where in (Where.LEAVING, Where.AWAY) and not mover.comes_back:
            raise is_away(part, what)
        mover.require()
        self._open()

    def where(self, part: Part) -> Where:
        return self._movers[part].where

    def moved(self, part: Part) -> Moved:
        return self._moved[part]

    def detach(self) -> None:
        """Brings weights and buffers back, so that layers are ordinary modules again, and waits for all copies."""
        for part in OF_LAYERS:
            if part in self._movers:
                self._movers[part].close()
        self._gate.open()
        if self._streams is not None:
            self._streams.wait()  # copies of host memory, which goes with this object

    def _open(self) -> None:
        """Opens the gate once weights and buffers are here for the device's next work."""
        if all(self._movers[part].where is Where.HERE for part in OF_LAYERS if part in self._movers):
            self._gate.open()

    def _check_layers(self, what: str = "a layer's forward") -> None:
        for part in OF_LAYERS:
            if part in self._movers:
                self.require(part, what)
