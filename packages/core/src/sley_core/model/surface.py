"""Handles what a factory does to parameters without torch's dispatcher, the only thing that `Recorder` sees.

That is: assigning `.data`, exposing or reading memory, Python loops over elements, and asking for a parameter's device (code
that is told "meta", such as torch's own `nn.init`, would do nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sley_core.errors import PlanError
from sley_core.model.autocast import check_autocast
from sley_core.model.convert import CONVERTS, MAKES, Conversions
from sley_core.model.journal import META, Journal, unwatched
from sley_core.model.layers import MODEL
from sley_core.model.record import draw_seed
from sley_core.model.saved import deep_copied, reads_by_address, saved_with_values
from sley_core.model.steps import Call

_EXPOSES = {"numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_"}
_READS = {"numpy", "__array__", "tolist", "__dlpack__", "__format__"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_BY_ELEMENT = {"apply_", "map_", "map2_"}
_TENSOR: Any = torch.Tensor
_PLACES: dict[Any, Callable[[torch.device], Any]] = {
    _TENSOR.device.__get__: lambda device: device,
    _TENSOR.is_meta.__get__: lambda device: device.type == "meta",
    _TENSOR.is_cpu.__get__: lambda device: device.type == "cpu",
    _TENSOR.is_cuda.__get__: lambda device: device.type == "cuda",
}
"""Attributes that depend on a parameter's device. torch's own `nn.init` reads them too, and does nothing on meta."""


class Surface(TorchFunctionMode):
    """Intercepts calls that do not reach the dispatcher: `.data = `, and all that exposes or reads a tensor's memory."""

    def __init__(self, journal: Journal, registered: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.journal = journal
        self.conversions = Conversions(journal)
        self.registered = registered  # the parameter on meta that stands for a real one

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one torch function as plain PyTorch would on a tensor with memory, although the parameter is on meta.

        For a real tensor that was registered, hooks go to the meta parameter that replaces it, and `requires_grad_` to both.
        """
        kwargs = kwargs or {}
        if self.journal.is_closed:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__" and args[0].is_meta and func in _PLACES:
            with self.journal.lock, unwatched():
                shown = self.journal.shown(args[0])
            return _PLACES[func](shown)
        if name == "__set__" and len(args) == 2:
            return self._set(func, *args)
        check_autocast(name, args, kwargs)
        if func in MAKES:
            return self.conversions.make(func, args, kwargs)
        if not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        if name in CONVERTS:
            return self.conversions.convert(func, args, kwargs)
        if name in {"new", "new_tensor"}:
            return self.conversions.new(func, args, kwargs)
        if name == "requires_grad_" and (twin := self.registered(args[0])) is not None:
            func(twin, *args[1:], **kwargs)
        if name in _HOOKS and (twin := self.registered(args[0])) is not None:
            return func(twin, *args[1:], **kwargs)
        if name in {"__getitem__", "__setitem__"} and args[0].is_meta:
            return func(args[0], self.conversions.index(args[1]), *args[2:], **kwargs)
        if name in _BY_ELEMENT:
            return self._by_element(func, args, kwargs)
        if name in _READS and args[0].is_meta:
            return self._read(func, args, kwargs)
        if name == "__deepcopy__" and type(args[0]) is Tensor and args[0].is_leaf and args[0].is_meta:
            return deep_copied(self.journal, *args)
        if name == "data_ptr" and args[0].is_meta:
            with self.journal.lock, unwatched():  # code that compares addresses wants to know whether memory is shared
                if reads_by_address():
                    return self.journal.lend(args[0].detach(), keep=True).data_ptr()
                return (id(self.journal.cell(args[0])) << 40) + args[0].storage_offset() * args[0].element_size()
        if name == "share_memory_" and args[0].is_meta:
            return args[0]  # a run gives it memory of its own
        if name in _EXPOSES and not args[0].is_meta:
            with self.journal.lock, unwatched():
                self.journal.expose(args[0])
        return func(*args, **kwargs)

    def _set(self, func: Any, tensor: Tensor, value: Any) -> None:
        """Assigns `.data` or `.requires_grad` to the tensor and to the meta parameter that replaces it."""
        attribute, twin = getattr(func, "__self__", None), self.registered(tensor)
        if attribute is torch.Tensor.data and isinstance(value, Tensor):
            _check_bits(tensor if twin is None else twin, value)
            with self.journal.lock, unwatched():
                if twin is not None:
                    twin.data = self.journal.twin(value)
                if tensor.is_meta != value.is_meta:
                    value = self.journal.twin(value) if tensor.is_meta else self.journal.realised(value)
        elif attribute is torch.Tensor.requires_grad and twin is not None:
            twin.requires_grad = value
        func(tensor, value)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function that reads values, such as `.numpy()`, on a copy with values; a numpy result is read-only."""
        with self.journal.lock, unwatched():
            found = func(self.journal.realised(args[0].detach()), *args[1:], **kwargs)
        if hasattr(found, "setflags"):
            found.setflags(write=False)  # a numpy array: writes to this copy would be lost
        return found

    def _by_element(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Runs `apply_`, `map_` or `map2_` on copies with values and copies the result back, so that the write is recorded."""
        target: Tensor = args[0]
        with self.journal.lock, unwatched(), torch.no_grad():
            real = [self.journal.realised(one.detach()) if one.is_meta else one.detach().clone() for one in args[:-1]]
            func(*real, args[-1], **kwargs)
        target.copy_(real[0])
        return target


def _check_bits(parameter: Tensor, value: Tensor) -> None:
    """Raises PlanError for a conjugated or negated `.data`, which torch refuses on meta, unlike plain PyTorch on the host."""
    if parameter.is_meta and (value.is_conj(), value.is_neg()) != (parameter.is_conj(), parameter.is_neg()):
        shape = list(parameter.shape)
        message = f"a parameter of shape {shape} was given a view of conjugates or negatives as `.data`"
        hint = "give it numbers of its own: `.resolve_conj()`, `.resolve_neg()`"
        raise PlanError("model-init", message, path=MODEL, hint=hint)


@contextmanager
def whole_functions(journal: Journal) -> Iterator[None]:
    """Returns a context manager that records `nn.init.trunc_normal_` as one operation, and gives pickled tensors their values.

    Its separate operations could not be replayed: it reads what it drew, and draws again as often as necessary.
    """
    original: Any = torch.nn.init._no_grad_trunc_normal_

    def truncated(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """Records the call for a tensor on meta, advancing the user's generator; else calls the original."""
        with journal.lock, unwatched():
            ref = journal.ref(tensor) if tensor.is_meta and journal.shown(tensor) != META else None
            if ref is not None:
                seed = draw_seed() if generator is None else generator.get_state()
                if generator is not None:  # it goes on as if the numbers had been drawn now
                    original(torch.empty(ref.size, dtype=ref.dtype), mean, std, a, b, generator=generator)
                step = Call(func=original, args=(ref, mean, std, a, b), kwargs={}, results=[None], seed=seed)
                step.own_generator, step.writes = generator is not None, [ref.cell]
                step.overwrites = [ref.cell] if ref.is_whole else []
                journal.note(step, [], [tensor])
                return tensor
        found: Tensor = original(tensor, mean, std, a, b, generator=generator)
        return found

    torch.nn.init._no_grad_trunc_normal_ = truncated
    try:
        with saved_with_values(journal):
            yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original
