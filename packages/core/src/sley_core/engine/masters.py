"""The weights that the optimizer steps: the parameters themselves, or fp32 masters of narrower ones.

A bf16 weight of 1.0 cannot take an update of 0.001; its master can, and the working weight follows when enough have come
together. What a gradient is accumulated in is the store's business and does not depend on the weights' type.

Between two steps a working weight is the user's: what is written to it then (`load_state_dict` on a layer, `p.copy_` under
no_grad, `p.data = `) its master takes over before the next step. A weight that nobody wrote keeps its master's digits. Writes
through `p.data` itself (`p.data.copy_`) count up no version, so nobody can see them: use `p.copy_` or `Run.load_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sley_core.engine.book import Entry
from sley_core.engine.flat import FlatBuffer
from sley_core.engine.store import GradientStore
from sley_core.errors import RunError

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Stepped:
    """The parameter that the optimizer steps for one entry; its gradient is the entry's slot in the store.

    original: the working weight that the entry's modules hold; the same object if there is no master.
    """

    entry: Entry
    parameter: nn.Parameter
    original: nn.Parameter

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def decays(self) -> bool:
        return self.entry.decays


class Masters:
    """What the optimizer steps for each entry, in the order in which entries were added.

    dtype: of the working weights. wide: of what is stepped; where it is the same, that is the parameters themselves.
    Else parameters are narrowed to `dtype`, and what they were stays, in one flat buffer for each call of `add`.

    home: the device on which masters lie, and are stepped; None for that of the parameters. With a home there are always
    masters, and whoever steps them brings gradients there, weights back.
    """

    def __init__(self, dtype: torch.dtype, wide: torch.dtype, home: torch.device | None = None) -> None:
        self.dtype = dtype
        self.wide = wide
        self.home = home
        self.stepped: list[Stepped] = []
        self._flats: list[FlatBuffer] = []
        self._masters: list[Tensor] = []
        self._working: list[Tensor] = []
        self._parameters: list[nn.Parameter] = []
        self._places: dict[int, int] = {}  # of a parameter in these lists, by its id
        self._seen: list[
            tuple[int, int]
        ] = []  # version and address of each parameter, when it was its master's rounding

    def add(self, entries: Sequence[Entry]) -> list[Stepped]:
        """Takes charge of `entries`, narrowing their parameters if needed; returns what the optimizer steps for them."""
        if self.wide == self.dtype and self.home is None:
            added = [Stepped(entry, entry.parameter, entry.parameter) for entry in entries]
        else:
            added = self._narrowed(entries) if entries else []
        self.stepped += added
        return added

    @property
    def num_bytes(self) -> int:
        """Bytes of the masters; 0 where the parameters are stepped directly."""
        return sum(flat.num_bytes for flat in self._flats)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and value of each master; none where the parameters are stepped directly."""
        for stepped in self.stepped:
            if stepped.parameter is not stepped.original:
                yield stepped.name, stepped.parameter

    def take_gradients(self, store: GradientStore) -> None:
        """Sets `grad` of each stepped parameter to the entry's slot, a view and no copy; None while the entry is
        frozen. With a `home`, whoever steps sets it.

        First copies into the masters what a program wrote to weights since the last step. Raises RunError
        `weight-replaced`.
        """
        self._follow()
        if self.home is not None:
            return
        for stepped in self.stepped:
            stepped.parameter.grad = store.gradient(stepped.entry) if stepped.entry in store else None

    def write_back(self) -> None:
        """Copies masters, rounded, into the working weights; drops the masters' references to gradients. With a `home`,
        whoever steps has copied them.
        """
        if self._working:
            if self.home is None:
                torch._foreach_copy_(self._working, self._masters)
            self._seen = [(parameter._version, parameter.data_ptr()) for parameter in self._parameters]
            for stepped in self.stepped:
                stepped.parameter.grad = None

    @torch.no_grad()
    def set(self, entry: Entry, value: Tensor) -> None:
        """Sets the entry's weight and its master to `value`, of its parameter's shape, at the master's full precision."""
        parameter = entry.parameter
        parameter.copy_(value)
        at = self._places.get(id(parameter))
        if at is not None:
            self._masters[at].copy_(value)
            self._working[at] = parameter.detach()
            parameter.copy_(self._masters[at])
            self._seen[at] = parameter._version, parameter.data_ptr()

    def _follow(self) -> None:
        """Copies values that a program wrote to working weights into their masters; found by version and address,
        without a device sync.
        """
        for stepped in self.stepped:
            now = stepped.entry.parameter
            if now is not stepped.original or now.dtype != self.dtype:
                raise RunError(
                    "weight-replaced",
                    f"the parameter {stepped.name!r} is another object, or of another type, than what the optimizer steps",
                    hint="write into it under torch.no_grad() (`parameter.copy_(value)`), or use `run.load_weights`",
                )
        for at, (parameter, seen) in enumerate(zip(self._parameters, self._seen, strict=True)):
            if (parameter._version, parameter.data_ptr()) != seen:
                self._working[at] = parameter.detach()
                master = self._masters[at]
                working = self._working[at].to(master.device)
                # only where it is another number: the digits that the working weight cannot hold stay
                master.copy_(torch.where(working != master.to(working.dtype), working.to(master.dtype), master))

    def _narrowed(self, entries: Sequence[Entry]) -> list[Stepped]:
        """Moves the entries' values into a wide flat buffer, and narrows their parameters to the working dtype."""
        device = self.home or entries[0].parameter.device
        flat = FlatBuffer([entry.parameter.shape for entry in entries], self.wide, device)
        self._flats.append(flat)
        narrowed = []
        for entry, view in zip(entries, flat.views, strict=True):
            working = entry.parameter
            view.copy_(working.detach())
            working.data = working.detach().to(self.dtype)
            self._masters.append(view)
            self._working.append(working.detach())
            self._places[id(working)] = len(self._parameters)
            self._parameters.append(working)
            self._seen.append((working._version, working.data_ptr()))
            narrowed.append(Stepped(entry, nn.Parameter(view), working))
        return narrowed
