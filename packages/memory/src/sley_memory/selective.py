"""`memory.selective`: layers are recomputed in their backward, except for their attention, whose output is kept.

Attention costs most of a long sequence's second run, and its output is as large as the layer's input, so keeping it saves much
time for few bytes.

    first run     layer ──> F.scaled_dot_product_attention ──> autograd ──> its operator, whose results are kept
    second run    layer ──> the same ──> autograd ──> the results that were kept, in the same order

A mode below autograd sees the operators. It costs the host some 20 microseconds for each, more than many kernels take, so it is
only there within calls that may be attention, which a mode above autograd tells by their names.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks  # torch's: nothing public tells those of a checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _StopRecomputationError  # by which a second run ends once all is there; not public

from sley_core.api.memory import version_of
from sley_core.api.model import Recompute
from sley_core.errors import RunError
from sley_memory.config import SelectiveConfig, chosen


class KeptAttention:
    """Holds the results of attention in one call of a layer, first to last; None for one that is recomputed. It is kept as long
    as the layer's graph, so that the layer may run again as often as its backward does.
    """

    def __init__(self, tally: KeptTally) -> None:
        self.tally = tally
        self.num_bytes = 0
        self._results: list[list[tuple[Any, int]] | None] = []
        self._num_needed = 0
        self._at = 0

    def __del__(self) -> None:
        self.tally.num_bytes -= self.num_bytes

    def put(self, result: Sequence[Any], *, is_drawn: bool) -> None:
        """Keeps the result of an attention, without its history, if the budget allows it; else notes that it must be computed
        again. is_drawn: whether it drew random numbers: then it must run again, or later draws would differ.
        """
        num_bytes = sum(value.untyped_storage().nbytes() for value in result if isinstance(value, Tensor))
        if not self.tally.keep(num_bytes, is_drawn=is_drawn):
            self._results.append(None)
            return
        self.num_bytes += num_bytes
        # Without the history that autograd gives the layer's own: that would keep the graph alive.
        self._results.append([(_detached(v), version_of(v)) if isinstance(v, Tensor) else (v, 0) for v in result])

    def saved(self) -> None:
        """Notes that the checkpoint saves a tensor: the second run goes on until it has saved as many, so it attends before."""
        self._num_needed = len(self._results)

    def rewind(self) -> None:
        """Lets `take` begin with the first result again."""
        self._at = 0

    def take(self) -> list[Any] | None:
        """Returns the next result, in the order in which they were kept; None if it must be computed again. Raises RunError
        `saved-in-place` if it was written on since it was kept, and `attention-differs` if there is none.
        """
        if self._at == len(self._results):
            raise self._differs("more")
        result = self._results[self._at]
        self._at += 1
        if result is None:
            return None
        if any(isinstance(value, Tensor) and version_of(value) != version for value, version in result):
            raise RunError(
                "saved-in-place",
                "a layer writes in place on what its attention gave, which `memory.selective` keeps for its second run",
                hint="let it make a new tensor (`h = h * g`), or take `core.recompute`",
            )
        return [_detached(value) if isinstance(value, Tensor) else value for value, _ in result]

    def check_taken(self) -> None:
        """Raises RunError `attention-differs` if the second run attended less often: a result may have been another's."""
        if self._at < self._num_needed:
            raise self._differs("less") from None

    def _differs(self, how: str) -> RunError:
        return RunError(
            "attention-differs",
            f"{len(self._results)} attentions of a layer's first run were kept, and its second run, which `memory.selective` "
            f"makes in its backward, has {how}",
            hint="let the layer attend equally often in each call, or take `core.recompute`",
        )


class KeptTally:
    """Counts bytes of attention kept, now and at most, over all micro-batches in flight; and how often. budget_bytes: the most
    bytes kept at one time; None for no limit.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = self.max_bytes = self.total_bytes = self.again_bytes = self.num_kept = self.num_again = 0
        self.seconds = 0.0

    def keep(self, num_bytes: int, *, is_drawn: bool) -> bool:
        """Counts an attention; returns whether it is kept: it drew no random numbers, and the budget has room."""
        if is_drawn or (self.budget_bytes is not None and self.num_bytes + num_bytes > self.budget_bytes):
            self.again_bytes += num_bytes
            self.num_again += 1
            return False
        self.num_bytes += num_bytes
        self.max_bytes = max(self.max_bytes, self.num_bytes)
        self.total_bytes += num_bytes
        self.num_kept += 1
        return True

    def counts(self) -> Mapping[str, float]:
        """Returns totals by name: bytes kept, attentions kept and recomputed, the host's seconds in second runs."""
        return {
            "kept_bytes": self.total_bytes,
            "max_kept_bytes": self.max_bytes,
            "kept_attentions": self.num_kept,
            "recomputed_attentions": self.num_again,
            "recomputed_attention_bytes": self.again_bytes,
            "recompute_host_s": self.seconds,
        }


def _detached(tensor: Tensor) -> Tensor:
    """Returns the tensor without a history. Below autograd, where a mode runs, its version would be lost without the guard."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


_NAMES = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
ATTENTION = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name))
"""What `F.scaled_dot_product_attention` and its callers end in. Its plain form is many operations, none of which is kept."""

VARLEN = "torch_attn::_varlen_attn"
"""Attention over documents on CUDA, by name: torch registers it when it is first used. It is one operator: what that calls is
not seen."""


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Sees operators below autograd: the first run keeps results of attention, the second gives them out in order."""

    def __init__(self, kept: KeptAttention, *, is_first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._kept = kept
        self._is_first = is_first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = func in ATTENTION or func.name() == VARLEN
        if is_attention and not self._is_first and (result := self._kept.take()) is not None:
            return tuple(result)
        result = func(*args, **(kwargs or {}))
        if is_attention and self._is_first:
            names = [argument.name for argument in func._schema.arguments]
            options = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            self._kept.put(result, is_drawn=float(options.get("dropout_p") or 0.0) > 0)
        return result


class _Run(TorchFunctionMode):
    """One run of a layer: calls that may be attention are seen operator by operator, all others pass."""

    def __init__(self, kept: KeptAttention, *, is_first: bool) -> None:
        super().__init__()
        self.kept = kept
        self._operators = _Operators(kept, is_first=is_first)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").lower()  # also of an operator that a library has registered
        if "attention" not in name and "attn" not in name:
            return func(*args, **(kwargs or {}))
        with self._operators:
            return func(*args, **(kwargs or {}))


class _First(_Run):
    """The first run: notes how many of its attentions come before the last tensor that the checkpoint saves. The second run
    makes these, and stops when it has saved as many.
    """

    def __init__(self, kept: KeptAttention) -> None:
        super().__init__(kept, is_first=True)

    def __enter__(self) -> _First:
        # The checkpoint's own, which it has entered just before. Hooks within the layer save other tensors.
        pack, unpack = _top_saved_tensors_default_hooks(False)
        kept = self.kept

        def save(tensor: Tensor) -> Any:
            kept.saved()
            return pack(tensor)

        self._hooks = saved_tensors_hooks(save, unpack)
        self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        self._hooks.__exit__(*error)
        del self._hooks  # it has the kept results, which end with the graph


class _Second(_Run):
    """The second run: begins with the first result, and measures the time of the run."""

    def __init__(self, kept: KeptAttention) -> None:
        super().__init__(kept, is_first=False)

    def __enter__(self) -> _Second:
        self._began = time.perf_counter()
        self.kept.rewind()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.kept.tally.seconds += time.perf_counter() - self._began
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]  # torch's
        if kind is None or kind is _StopRecomputationError:
            self.kept.check_taken()


class SelectiveRecompute(Recompute):
    """Recomputes the layers `names` as `core.recompute` does, except for their attention."""

    def __init__(self, config: SelectiveConfig, names: frozenset[str]) -> None:
        super().__init__(names)
        self.tally = KeptTally(config.budget_bytes)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Returns two contexts for a call of a layer: the first run keeps attention, the second reuses it."""
        kept = KeptAttention(self.tally)
        return _First(kept), _Second(kept)

    def counts(self) -> Mapping[str, float]:
        """Returns how much attention was kept, and recomputed, and the host's seconds in second runs."""
        return self.tally.counts()


def build(config: SelectiveConfig, layer_names: Sequence[str]) -> SelectiveRecompute:
    """Returns `memory.selective`, for those of `layer_names` (the whole model's, in order) that `config.layers` chooses."""
    return SelectiveRecompute(config, chosen(config.layers, layer_names))
