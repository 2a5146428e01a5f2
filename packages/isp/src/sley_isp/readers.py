"""Who reads a shard as if it were the whole weight is named in the first forwards, before a number is wrong.

    layer's forward ── watched ──> torch function of a shard ──> refused
          └── a sharded module's forward, which gathers ── not watched ──> fine

A backward would find only some of them (`sharded-weight-read` of core): of what is frozen, and in an evaluation, none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sley_core.engine.slot import check_not_sharded

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from sley_core.engine.book import Entry

LIKE = (torch.Tensor.to, torch.Tensor.type_as)
"""Functions that look at their second tensor's dtype and device only."""


class Readers(TorchFunctionMode):
    """Watches the forwards of `layers` between `watch` and `leave`, but for those of `sites`, the sharded modules.

    Raises RunError `sharded-weight-read` where a function that returns a tensor, or fails, is given one of `shards`.
    Until `close`, torch's transformer layers call their linears in evaluations too, where they would read weights instead.
    """

    def __init__(self, layers: Iterable[nn.Module], sites: Iterable[nn.Module], shards: Iterable[Entry]) -> None:
        super().__init__()
        self._layers = list(dict.fromkeys(layers))
        self._sites = list(dict.fromkeys(sites))
        self._entries = {id(entry.parameter): entry for entry in shards}
        self._hooks: list[RemovableHandle] = []
        self._num_allowed = 0
        self._had_fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def watch(self) -> None:
        """From the next forward on."""
        self.leave()
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(self._enter))
            self._hooks.append(layer.register_forward_hook(self._exit, always_call=True))
        for module in self._sites:
            self._hooks.append(module.register_forward_pre_hook(self._enter_site))
            self._hooks.append(module.register_forward_hook(self._exit_site, always_call=True))

    def leave(self) -> None:
        """No forward is watched any more, and none is slowed down."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def close(self) -> None:
        self.leave()
        torch.backends.mha.set_fastpath_enabled(self._had_fastpath)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Whoever runs within may read shards."""
        self._num_allowed += 1
        try:
            yield
        finally:
            self._num_allowed -= 1

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._num_allowed:
            return function(*args, **kwargs)
        given = args[:1] if function in LIKE else (*args, *kwargs.values())
        try:
            result = function(*args, **kwargs)
        except Exception:
            self._check(given)
            raise
        if any(isinstance(one, Tensor) for one in _flat((result,))):
            self._check(given)
        return result

    def _check(self, given: Sequence[Any]) -> None:
        for one in _flat(given):
            if id(one) in self._entries:
                check_not_sharded(self._entries[id(one)])

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]  # torch's

    def _exit(self, module: nn.Module, args: Any, result: Any) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's

    def _enter_site(self, module: nn.Module, args: Any) -> None:
        self._num_allowed += 1

    def _exit_site(self, module: nn.Module, args: Any, result: Any) -> None:
        self._num_allowed -= 1


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and those of lists and tuples among them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
