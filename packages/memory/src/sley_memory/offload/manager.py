"""Moves the parts of a run's memory that a table `[[offload]]` names: one mover for each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sley_core.api.memory import Moved, OffloadManager, Part, Where, is_away
from sley_memory.offload.arena import Arena
from sley_memory.offload.between_steps import BetweenSteps
from sley_memory.offload.parked import Parked, Pieces, Streams, packed
from sley_memory.offload.shared import SharedCopies

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from sley_core.api.memory import Holdings
    from sley_core.api.parts import Parts
    from sley_memory.config import OffloadConfig


class Freed:
    """Discards gradients by an offload, and makes zeroed memory for them by an onload. free, build: the gradient store's.

    num_bytes: what they take now.
    """

    def __init__(self, free: Callable[[], None], build: Callable[[], None], num_bytes: Callable[[], int], moved: Moved) -> None:
        self._free = free
        self._build = build
        self._num_bytes = num_bytes
        self._moved = moved
        self.where = Where.HERE

    def offload(self) -> None:
        """Frees the gradients' memory; of memory that is away, only counts the call."""
        if self.where is Where.AWAY:
            self._moved.num_no_ops += 1
            return
        self._moved.given_back = self._num_bytes()
        self._free()
        self.where = Where.AWAY

    def onload(self) -> None:
        """Makes the gradients' memory again, zeroed; of memory that is here, only counts the call."""
        if self.where is Where.HERE:
            self._moved.num_no_ops += 1
            return
        self._build()
        self.where = Where.HERE

    def require(self) -> None: ...

    def wait(self) -> None: ...

    def host(self) -> Mapping[int, Tensor]:
        """Returns nothing: there is no copy."""
        return {}


class Trimmed:
    """Frees what its owner allocates anew when it needs it: such a part is never away."""

    def __init__(self, trim: Callable[[], int], moved: Moved) -> None:
        self._trim = trim
        self._moved = moved
        self.where = Where.HERE

    def offload(self) -> None:
        """Frees what is not lent, and counts its bytes."""
        self._moved.given_back = self._trim()

    def onload(self) -> None: ...

    def require(self) -> None: ...

    def wait(self) -> None: ...

    def host(self) -> Mapping[int, Tensor]:
        """Returns nothing: there is no copy."""
        return {}


class Gate:
    """Hooks on every module of `modules` while it is closed; none while it is open, so that a step pays nothing.

    check: called before a module's forward; makes weights that are coming usable, or raises for what is away.
    """

    def __init__(self, modules: Sequence[nn.Module], check: Callable[[], None]) -> None:
        self._modules = modules
        self._check = check
        self._hooks: list[RemovableHandle] = []

    @property
    def is_closed(self) -> bool:
        """Whether calls of the modules are checked."""
        return bool(self._hooks)

    def close(self) -> None:
        """Puts the hooks on, before those that the program has."""
        if not self._hooks:
            for layer in self._modules:
                for module in layer.modules():
                    self._hooks.append(module.register_forward_pre_hook(self._before, prepend=True))
                    self._hooks.append(module.register_state_dict_pre_hook(self._before_reading))  # type: ignore[no-untyped-call]  # torch's

    def open(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_reading(self, *_: Any) -> None:
        self._check()

    def _before(self, _module: nn.Module, _args: Any) -> None:
        self._check()


TRIMMED: tuple[Part, ...] = ("pools", "messages")
OF_LAYERS: tuple[Part, ...] = ("weights", "buffers")
"""What a layer's forward needs."""

MB = 10**6


class Mover(Protocol):
    """Moves one part. `where`: where it is."""

    @property
    def where(self) -> Where:
        """Returns where the part is: here, leaving, away or coming."""
        ...

    def offload(self) -> None:
        """Starts to move the part off the device; of one that is away, only counts the call."""
        ...

    def onload(self) -> None:
        """Starts to bring the part back; of one that is here, only counts the call."""
        ...

    def require(self) -> None:
        """Makes the device's work wait for the part if it is coming."""
        ...

    def wait(self) -> None:
        """Waits, on the host, for copies in flight."""
        ...

    def host(self) -> Mapping[int, Tensor]:
        """Waits for copies to the host; returns those of what is away or coming, by `storage_id`, uint8 [bytes]."""
        ...


class Manager(OffloadManager):
    """Moves the parts that its table names to host memory and back.

    With `when = "between_steps"` optimizer states are away except during the update, whatever is called; other parts move by
    call.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self._movers: dict[Part, Mover] = {}
        self._moved: dict[Part, Moved] = {part: Moved() for part in config.moves}
        self._is_attached = False

    @property
    def parts(self) -> Sequence[Part]:
        return self.config.moves

    def attach(self, parts: Parts, holdings: Holdings) -> None:
        """Makes the mover of each part, and its copy streams and host memory."""
        device = parts.world.device
        budget = self.config.host_budget_mb
        streams, bucket = Streams(device.copy_stream), int(self.config.bucket_mb * MB)
        arena = Arena(device.host_memory, streams.wait, None if budget is None else int(budget * MB))
        self._streams = streams
        self._gate = Gate([layer.module for layer in parts.layers], self._check_layers)
        for layer in parts.layers:
            # For what gathers shards in a backward by hand, whose forward came before they left. In steps and evaluations
            # the gate is open on all ranks.
            check = partial(self._check_layers, "a use of a layer's weights")
            parts.waits.before_layer(layer.name, check, lambda: self._gate.is_closed)
        for part in self.parts:
            moved = self._moved[part]
            if part == "gradients":
                of_store = partial(holdings.num_bytes, part)
                self._movers[part] = Freed(parts.store.free, parts.store.build, of_store, moved)
            elif part in TRIMMED:
                self._movers[part] = Trimmed(partial(holdings.trim, part), moved)
            elif part == "optimizer_states" and self.config.steps_in_buckets:
                self._movers[part] = BetweenSteps(holdings, parts, streams, arena, bucket, moved)
            elif self.config.is_shared and parts.groups["wdp"].size > 1:
                groups = parts.groups["wdp"], parts.groups["control"]
                self._movers[part] = SharedCopies(part, _pieces(holdings, part, bucket), *groups, streams, arena, bucket, moved)
            else:
                pieces = _pieces(holdings, part, bucket)
                self._movers[part] = Parked(pieces, streams, arena, bucket, moved)
        self._is_attached = True

    def offload(self, part: Part) -> Callable[[], None]:
        """Starts to move `part` off the device; returns what waits for it. While weights or buffers are away, calls of layers
        are refused. Does nothing on a device without memory.
        """
        if not self._is_attached:
            return _nothing
        if part in OF_LAYERS:
            self._gate.close()
        self._movers[part].offload()
        return self._movers[part].wait

    def onload(self, part: Part) -> Callable[[], None]:
        if not self._is_attached:
            return _nothing
        self._movers[part].onload()
        self._open()
        return self._movers[part].wait

    def host(self, part: Part) -> Mapping[int, Tensor]:
        return self._movers[part].host() if self._is_attached else {}

    def require(self, part: Part, what: str) -> None:
        """Makes the device's work wait for `part` if it is coming. Raises StateError `memory-away` if it is away, or on its way
        there; states that come for their step by themselves are never missing.
        """
        if not self._is_attached:
            return
        mover = self._movers[part]
        if mover.where in (Where.LEAVING, Where.AWAY) and not isinstance(mover, BetweenSteps):
            raise is_away(part, what)
        mover.require()
        self._open()

    def where(self, part: Part) -> Where:
        return self._movers[part].where if self._is_attached else Where.HERE

    def moved(self, part: Part) -> Moved:
        return self._moved[part]

    def detach(self) -> None:
        """Brings weights and buffers back, so that layers are ordinary modules again, and waits for all copies."""
        if not self._is_attached:
            return
        for part in OF_LAYERS:
            mover = self._movers.get(part)
            if isinstance(mover, SharedCopies):
                mover.close()
            elif mover is not None:
                mover.onload()
                mover.wait()
        self._gate.open()
        self._streams.wait()  # what the device waits for reads host memory too, which goes with this object

    def _open(self) -> None:
        """Takes the gate away once weights and buffers are here for the device's next work."""
        movers = [self._movers[part] for part in OF_LAYERS if part in self._movers]
        if all(mover.where is Where.HERE for mover in movers):
            self._gate.open()

    def _check_layers(self, what: str = "a layer's forward") -> None:
        for part in OF_LAYERS:
            if part in self._movers:
                self.require(part, what)


def _nothing() -> None: ...


def _pieces(holdings: Holdings, part: Part, bucket_bytes: int) -> Pieces:
    """Returns a function that lists the storages of `part`, each once; small optimizer states it lays together first."""
    if part == "optimizer_states":
        return lambda: packed(holdings.pieces(part), bucket_bytes)
    return partial(holdings.pieces, part)
