"""Finds habits of a model that are correct in a plain loop but that other ranks or a recomputation would miss.

The first step of the loop inspects each layer: arguments, weights, buffers and generators before and after the call, operations
in the forward and backward, and the output of a second call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sley_core
from sley_core.engine.call import tensors_in
from sley_core.generators import comparable_state, module_generators
from sley_core.model.tensors import fingerprint
from sley_core.optim.shared import has_modes
from sley_testing.plain import PlainLoop
from sley_testing.verify.findings import Habit

TORCH = str(Path(torch.__file__).parent)
KIT_FILES = (str(Path(sley_core.__file__).parent), inspect.getfile(PlainLoop), __file__)
UNSAFE_OPS = ("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
NARROW_BYTES = 2


class HabitLoop(PlainLoop):
    """Trains like a plain loop, seeds each layer as a run does, and collects `habits`."""

    def prepare(
        self,
        seed_layer: Callable[[str, int, int], AbstractContextManager[None]],
        seed_update: Callable[[int], AbstractContextManager[None]],
        eval_modules: set[str],
        habits: list[Habit],
    ) -> None:
        """Prepares the first step, and inspects modules and the optimizer.

        seed_layer: seeds generators for a layer, step and micro-batch. seed_update: seeds generators for the update of a step.
        eval_modules: the names of modules that the factory returned in evaluation mode. habits: the list that receives habits.
        """
        self._seed_layer, self._seed_update = seed_layer, seed_update
        self._step, self._micro_batch = 0, 0
        self.location = "its start"
        self.habits = habits
        for name in sorted(name for name in eval_modules if name.rpartition(".")[0] not in eval_modules):
            self._record_habit(name, "was in evaluation mode when the factory returned it: a run calls `train()` first")
        for name, module in self.layers:
            self._inspect_module(name, module)
        if has_modes(self.optimizer):
            self._record_habit("the optimizer", "has `train()` and `eval()`: a run evaluates and saves between them")

    def begin(self, step: int) -> None:
        """Begins step number `step`, from 1."""
        self._step, self._micro_batch = step, -1

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        self._micro_batch += 1
        inspected_fields = batch if self._is_inspected else {}
        fields_before = {name: (value._version, fingerprint(value)) for name, value in inspected_fields.items()}
        output = super().forward(batch)
        for name, (version, hash_before) in fields_before.items():
            if batch[name]._version != version or bool(fingerprint(batch[name]) != hash_before):
                self._record_habit(name, "is a batch field that a layer writes to: each stage has its own copy")
        return output

    def call(self, name: str, module: nn.Module, args: tuple[Any, ...], fields: Mapping[str, Tensor]) -> Any:
        self.location = f"layer `{name}` ({type(module).__name__})"
        with self._seed_layer(name, self._step, self._micro_batch):
            if not self._is_inspected:
                return module(*args, **fields)
            return self._inspect_call(name, module, args, fields)

    def update(self) -> None:
        self.location = "the optimizer"
        with self._seed_update(self._step - 1):
            state_before = comparable_state()
            super().update()
            if self._step == 1 and comparable_state() != state_before:
                self._record_habit("the optimizer", "draws in `step()`: a run seeds each step, equally on all replicas")

    def backward(self, loss: Tensor) -> None:
        self.location = "the backward"
        if not self._is_inspected:
            super().backward(loss)
            return
        summed: set[int] = set()
        with ExitStack() as stack:
            for parameter in self.parameters.values():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(lambda param: summed.add(id(param)))  # type: ignore[no-untyped-call]  # torch's
                    stack.callback(handle.remove)
            gradients_before = {name: parameter.grad for name, parameter in self.parameters.items()}
            master_gradients = {name: param.grad for name, param in self.stepped.items()}
            stack.enter_context(_InPlace(self._record_habit))
            super().backward(loss)
        for name, parameter in self.parameters.items():
            has_changed = parameter.grad is not gradients_before[name] or self.stepped[name].grad is not master_gradients[name]
            if has_changed and id(parameter) not in summed:
                self._record_habit(name, "gets its gradient by an assignment in a backward, which no autograd hook sees")

    @property
    def _is_inspected(self) -> bool:
        return self._step == 1 and self._micro_batch == 0

    def _record_habit(self, location: str, description: str) -> None:
        if (habit := Habit(location, description)) not in self.habits:
            self.habits.append(habit)

    def _inspect_call(self, name: str, module: nn.Module, args: tuple[Any, ...], fields: Mapping[str, Tensor]) -> Any:
        """Calls a layer and records its side effects."""
        contents, versions, state = _content_ids(args), _versions(args), comparable_state()
        on_fields = _versions(tuple(fields.values()))
        hashes, attributes = _hash_tensors(module), _state(module)
        try:
            module_copy = deepcopy(module)  # with the states of its generators
        except Exception:  # modules may refuse to be copied in any way
            module_copy = None
        with _OpRecorder() as ops:
            output = module(*args, **fields)
        state_after = comparable_state()
        hashes_after = _hash_tensors(module)
        written = [f"{name}.{key}" for key in hashes_after if key not in hashes or bool(hashes[key] != hashes_after[key])]
        if contents != _content_ids(args):
            self._record_habit(name, "modifies a dict or object in its input, which a recomputation would use again")
        elif versions != _versions(args):
            self._record_habit(name, "writes to its input in place, which a recomputation would use again")
        for key in written:
            self._record_habit(key, "is written by the forward: replicas write different values, which depend on their samples")
        if unsafe := ops.names & set(UNSAFE_OPS):
            self._record_habit(name, f"calls `{min(unsafe)}`: the parts share memory but no version counter")
        if any(tensor.is_inference() for tensor in tensors_in([output])):
            self._record_habit(name, "runs under `inference_mode`: its output has no version counter")
        sources = [
            source
            for source, old_state, new_state in zip(("", "random", "numpy"), state, state_after, strict=True)
            if source and old_state != new_state
        ]
        generator_types = {type(generator) for generator in module_generators(module, name)}
        sources += sorted(f"its own {cls.__module__.split('.')[0]} {cls.__name__}" for cls in generator_types)
        if sources:
            self._record_habit(name, f"draws from {', '.join(sources)}: a run seeds it for each layer and micro-batch")
        for key, value in _state(module).items():
            if attributes.get(key) != value:
                self._record_habit(f"{name}.{key}", "is changed by the forward: it differs on replicas and in a recomputation")
        has_changed = contents != _content_ids(args) or versions != _versions(args) or written
        if module_copy is not None and not has_changed and on_fields == _versions(tuple(fields.values())):
            with self._seed_layer(name, self._step, self._micro_batch), torch.no_grad():
                second_output = module_copy(*args, **fields)
            for tensor, second_tensor in zip(tensors_in([output]), tensors_in([second_output]), strict=False):
                is_number = tensor.is_floating_point() or tensor.is_complex()
                limit = max(1e-5, torch.finfo(tensor.dtype).eps) if is_number else 0.0
                if tensor.shape != second_tensor.shape or not torch.allclose(
                    tensor, second_tensor, rtol=limit, atol=limit, equal_nan=True
                ):
                    self._record_habit(name, "returns another output in a second call: it uses a random source without a seed")
        return output

    def _inspect_module(self, name: str, module: nn.Module) -> None:
        """Records habits of a layer that are visible without a call."""
        dtypes = [param.dtype for param in self.parameters.values()]
        common_dtype = max(set(dtypes), key=dtypes.count) if dtypes else torch.float32
        for path, part in module.named_modules(prefix=name):
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                self._record_habit(path, "has `get_extra_state`: a state besides parameters and buffers")
            for key, buffer in part.named_buffers(recurse=False):
                if buffer.dtype.itemsize <= NARROW_BYTES and buffer.is_floating_point() and buffer.dtype != common_dtype:
                    self._record_habit(f"{path}.{key}", f"is a buffer in {str(buffer.dtype).removeprefix('torch.')}")


def _content_ids(values: Any) -> Any:
    """Returns the ids of the contents of containers and objects."""
    if isinstance(values, list | tuple):
        return [_content_ids(value) for value in values]
    if isinstance(values, Mapping):
        return {key: _content_ids(value) for key, value in values.items()}
    if isinstance(values, Tensor) or not hasattr(values, "__dict__"):
        return id(values)
    return {key: id(value) for key, value in vars(values).items()}


def _state(module: nn.Module) -> dict[str, Any]:
    """Returns the numeric and string attributes of a layer and its submodules, by name."""
    return {
        f"{path}.{key}" if path else key: value
        for path, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, bool | int | float | str)
    }


def _versions(args: tuple[Any, ...]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_in(args)]


def _hash_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns hashes of a layer's parameters and buffers."""
    with torch.no_grad():
        named_tensors = (*module.named_parameters(), *module.named_buffers())
        return {name: fingerprint(tensor.detach()) for name, tensor in named_tensors}


class _OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Collects the names of the operations within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _InPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Records in-place operations that hooks and custom backwards call in Python."""

    def __init__(self, record_habit: Callable[[str, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._record_habit = record_habit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_written = name.endswith("_") and not name.endswith("__")
        # A forward that runs again within the backward has gradients enabled.
        if is_written and not torch.is_grad_enabled() and (line := _user_line()):
            self._record_habit(line, f"writes in place in the backward (`{name}`), where other code may read the same gradient")
        return func(*args, **(kwargs or {}))


def _user_line() -> str | None:
    """Returns file and line of the code that called an operation, or None if torch or this loop called it. The backward of a
    device has its own thread, in which no Python code calls torch operations.
    """
    frame: FrameType | None = sys._getframe(1).f_back  # the frame of the dispatch mode
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(KIT_FILES):
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
