"""Records what a factory writes to parameters without memory, so that it can be replayed later on the rank that needs it.

Inside `Recorder`, operations on real tensors run as usual and are recorded as the origin of their results. Operations on meta
tensors are recorded, and only their shapes are computed. If code needs actual numbers (`.item()`, a mask as an index), they are
computed for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from sley_core.model.journal import HOST, META, Journal
from sley_core.model.nested import leaves, map_only
from sley_core.model.steps import Blank, Call, Cell, Ref, tensors_of

_BLANK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_FROM_SHAPES = _BLANK | {f"{kind}_like" for kind in ("zeros", "ones", "full", "rand", "randn", "randint")}
_FROM_SHAPES |= {f"new_{kind}" for kind in ("zeros", "ones", "full")}
_OVERWRITES = {
    "copy_",
    "zero_",
    "fill_",
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "sley_core::read_",
}
_COPIES = {"copy_", "clone", "_to_copy", "lift_fresh_copy", "detach_copy"}
_WRITES_UNSAID = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
    "batch_norm_update_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
}
"""Arguments that operations write although their schemas do not say so; not if they are called with `training=False`."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records in `journal` what one thread's operations write. Enter it in that thread, together with `Surface`."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.journal = journal

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: nothing compiled runs in this mode, and True would import torch's compiler (`uncompiled.py`)."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation and records it; passes it through after the factory has ended and for tensor subclasses."""
        kwargs = kwargs or {}
        if self.journal.is_closed:
            return func(*args, **kwargs)
        if any(is_traceable_wrapper_subclass(leaf) for leaf in leaves((args, kwargs))):
            return func(*args, **kwargs)  # as a parameter it is refused by name
        with self.journal.lock, torch._C.DisableTorchFunction():
            return _Operation(self.journal, func, args, kwargs).run()


class _Operation:
    """Runs and records one operation, with the arguments that the dispatcher passes."""

    def __init__(self, journal: Journal, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Collects the tensors that the operation reads and writes, and whether it draws random numbers."""
        self.journal = journal
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.name: str = func._schema.name.removeprefix("aten::")
        self.inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.written = self._written()
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.generator: torch.Generator | None = kwargs.get("generator")

    def run(self) -> Any:
        """Runs the operation on real memory, on meta or on copies with values, records it, and returns its result."""
        if self.name == "set_" and any(tensor.is_meta for tensor in self.inputs):
            return self.func(*map_only(Tensor, self.journal.twin, self.args), **self.kwargs)
        if self._stays_real():
            return self._run_real(self.args, self.kwargs)
        if all(tensor.is_meta for tensor in self.written):
            try:
                return self._run_on_meta()
            except Exception:  # it probably needs values; any other error will be raised again on real tensors
                pass
        return self._run_with_values()

    def _stays_real(self) -> bool:
        """Returns whether neither inputs nor the requested device are meta, so the operation can run as it is."""
        device = self.kwargs.get("device")
        if self.name in _FROM_SHAPES and device is not None:
            return torch.device(device).type != "meta"
        return not any(tensor.is_meta for tensor in self.inputs) and (
            device is None or torch.device(device).type != "meta"
        )

    def _run_real(self, args: Any, kwargs: Any) -> Any:
        """Runs the operation on real tensors and records it as the origin of its results.

        First brings real memory up to date with what was written to its meta twin.
        """
        for tensor in self.inputs:
            if not tensor.is_meta:
                self.journal.look(tensor, writes=any(tensor is each for each in self.written))
        state = None
        if self.is_random:
            state = (self.generator or torch.default_generator).get_state()
        refs = self._refs()
        found = self.func(*args, **kwargs)
        self._note(refs, found, state)
        return found

    def _run_on_meta(self) -> Any:
        """Runs the operation on the meta twins of its inputs: records it and computes only the shapes of the results."""
        refs = self._refs()
        args, kwargs = map_only(Tensor, self.journal.twin, (self.args, self.kwargs))
        if "device" in kwargs:
            kwargs["device"] = META
        kwargs.pop("generator", None)
        if self.is_random and self.name.endswith("_") and len(self.inputs) == 1:
            # `normal_` and the like: on meta torch runs them in Python, with its compiler. One element checks the arguments.
            self.func(torch.empty(1, dtype=args[0].dtype), *args[1:], **kwargs, generator=torch.Generator())
            found = args[0]
        else:
            found = self.func(*args, **kwargs)
        if not self.func.is_view:
            self._note(refs, found, self._seed() if self.is_random else None)
        return found

    def _run_with_values(self) -> Any:
        """Runs an operation that needs numbers on copies with values; records what it writes and returns real results."""
        refs = self._refs()
        values = {id(tensor): self.journal.realised(tensor) for tensor in self.inputs if tensor.is_meta}
        for tensor in self.inputs:
            if not tensor.is_meta:
                self.journal.look(tensor, writes=any(tensor is each for each in self.written))
        args, kwargs = map_only(Tensor, lambda one: values.get(id(one), one), (self.args, self.kwargs))
        state = (self.generator or torch.default_generator).get_state() if self.is_random else None
        found = self.func(*args, **kwargs)
        originals = {id(values[id(tensor)]): tensor for tensor in self.inputs if id(tensor) in values}
        result = map_only(Tensor, lambda one: originals.get(id(one), one), found)
        self._note(refs, result, state)
        return result

    def _refs(self) -> tuple[Any, dict[str, Any]]:
        """Returns the arguments with each tensor as a view of its cell, as a `Call` step stores them for a replay.

        A meta device becomes the host, and the generator is left out: its state is stored as the seed.
        """
        args, kwargs = map_only(Tensor, self.journal.ref, (self.args, self.kwargs))
        kwargs.pop("generator", None)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs["device"] = HOST
        return args, kwargs

    def _note(self, refs: tuple[Any, dict[str, Any]], found: Any, seed: int | Tensor | None) -> None:
        """Records the operation as a step of the cells that it made or wrote; nothing if it neither made nor wrote
        memory.

        refs: the arguments before it ran. found: its result. seed: what a replay draws its random numbers from.
        """
        journal = self.journal
        known = {tensor.untyped_storage()._cdata for tensor in self.inputs}
        outputs = tensors_of(found)
        is_new = [tensor.untyped_storage()._cdata not in known for tensor in outputs]
        if not self.written and not any(is_new):
            return
        results = [
            journal.made(one, self._shown(one)) if new else None for one, new in zip(outputs, is_new, strict=True)
        ]
        made = [ref.cell for ref in results if ref is not None]
        if self.name in _BLANK:
            for ref in results:
                if ref is not None:
                    ref.cell.steps.append(Blank(cell=ref.cell, dtype=ref.dtype, overwrites=[ref.cell]))
            return
        if self.is_random and any(tensor.device.type not in ("cpu", "meta") for tensor in outputs):
            for tensor in outputs:  # the state of a device's generator is not recorded, so the values are kept
                journal.take_as_it_is(tensor)
            return
        args, kwargs = refs
        if self._lacks("dtype", args, kwargs):
            kwargs["dtype"] = outputs[0].dtype  # it may follow the default type, which the factory may have set
        read = [ref.cell for ref in leaves(refs) if isinstance(ref, Ref)]
        whole = [cell for cell in self._overwritten(args) if read.count(cell) == 1]
        step = Call(func=self.func, args=args, kwargs=kwargs, results=results, seed=seed)
        step.own_generator = self.generator is not None
        step.is_copy = self.name in _COPIES
        step.writes = [journal.cell(tensor) for tensor in self.written]
        step.reads = [] if self.name in _FROM_SHAPES else [cell for cell in read if cell not in whole]
        step.overwrites = [*made, *whole]
        journal.note(step, made, self.written)

    def _lacks(self, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        """Returns whether an operation without tensor inputs has an argument `name` that the caller left out."""
        names = [argument.name for argument in self.func._schema.arguments]
        return not self.inputs and name in names and kwargs.get(name) is None and names.index(name) >= len(args)

    def _shown(self, made: Tensor) -> torch.device:
        """Returns the device that code sees for a result: the requested one, else the device shown for an input."""
        if not made.is_meta:
            return made.device
        if self.kwargs.get("device") is not None:
            return torch.device(self.kwargs["device"])
        return next((shown for one in self.inputs if (shown := self.journal.shown(one)) != META), META)

    def _overwritten(self, args: Any) -> list[Cell]:
        """Returns the target's cell if the operation overwrites all of it, so that its earlier steps no longer matter."""
        if self.name in _OVERWRITES and isinstance(args[0], Ref) and args[0].is_whole:
            return [args[0].cell]
        return []

    def _written(self) -> list[Tensor]:
        """Returns the tensors that the operation writes, by its schema and by `_WRITES_UNSAID`."""
        unsaid = _WRITES_UNSAID.get(self.name, ())
        if unsaid and not self._argument("training", True):
            unsaid = ()
        found: list[Tensor] = []
        for argument in self.func._schema.arguments:
            said = argument.alias_info is not None and argument.alias_info.is_write
            if said or argument.name in unsaid:
                found += [leaf for leaf in leaves(self._argument(argument.name)) if isinstance(leaf, Tensor)]
        return found

    def _argument(self, name: str, default: Any = None) -> Any:
        """Returns the value given for the schema's argument `name`, else `default`."""
        for at, argument in enumerate(self.func._schema.arguments):
            if argument.name == name and at < len(self.args):
                return self.args[at]
        return self.kwargs.get(name, default)

    def _seed(self) -> int | Tensor:
        """Returns the seed that a replay draws from: a new one, or the state of the user's generator.

        The user's generator is advanced as if the numbers had been drawn now, which later draws from it depend on.
        """
        if self.generator is None:
            return draw_seed()
        state = self.generator.get_state()

        def blank(one: Tensor) -> Tensor:
            """Returns uninitialised host memory in place of a meta tensor, for the draw that only advances the generator."""
            return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype) if one.is_meta else one

        args, kwargs = map_only(Tensor, blank, (self.args, self.kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = HOST
        self.func(*args, **kwargs)
        return state


def draw_seed() -> int:
    """Draws a seed from torch's default generator, which advances by one draw."""
    return int(torch.empty((), dtype=torch.int64).random_())
