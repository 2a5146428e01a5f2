"""`memory.selective`: recomputes layers in their backward, but keeps the outputs of their attention.

For long sequences, attention takes most of the time of a recomputation. The output of attention is only as large as the layer's
input, so keeping it saves much time for little memory.

    first forward   layer ──> F.scaled_dot_product_attention ──> autograd ──> its operator, results kept
    recomputation   layer ──> the same ──> autograd ──> the kept results, in the same order

A dispatch mode intercepts the operators. It costs about 20 microseconds per operator, more than many kernels take, so it is
only active within calls that may be attention. A function mode recognizes these calls by name.

In a compiled layer, whose backward graph contains the recomputation, torch's own selective checkpointing does the same. Other
layers do not use it: it would intercept every operator, allow only one backward, and silently use the result of another
attention if the recomputation had fewer of them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks  # private: there is no public access to a checkpoint's hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.api.memory import version_of
from sley_core.api.model import Recompute
from sley_core.api.parts import MicroStep
from sley_core.errors import RunError
from sley_memory.plugin import SelectiveConfig, match_layers


class AttentionResults:
    """The attention results of one call of a layer, in the order of its forward, for all backwards of this call. A result that
    must be recomputed is None. stats: counts the results of all calls.
    """

    def __init__(self, stats: "AttentionStats") -> None:
        self.stats = stats
        self.num_bytes = 0
        self._results: list[list[tuple[Any, int]] | None] = []
        self._num_needed = 0
        self._index = 0

    def __del__(self) -> None:
        self.stats.num_bytes -= self.num_bytes

    def add(self, result: Sequence[Any], *, has_dropout: bool) -> None:
        """Keeps the result of an attention, without its history. With dropout, marks the result for recomputation instead,
        since the recomputation must draw the same random numbers.
        """
        if has_dropout:
            self.stats.num_recomputed += 1
            self._results.append(None)
            return
        num_bytes = sum(value.untyped_storage().nbytes() for value in result if isinstance(value, torch.Tensor))
        self.num_bytes += num_bytes
        self.stats.add(num_bytes)
        # The tensors are detached, since their autograd history would keep the graph alive.
        self._results.append([(_detach(v), version_of(v)) if isinstance(v, torch.Tensor) else (v, 0) for v in result])

    def mark_needed(self) -> None:
        """Marks all results so far as needed by a recomputation. Call it when the checkpoint saves a tensor."""
        self._num_needed = len(self._results)

    def rewind(self) -> None:
        """Makes `next_result` start with the first result again."""
        self._index = 0

    def next_result(self) -> list[Any] | None:
        """Returns the next result, or None if it must be recomputed. Raises RunError `saved-in-place` if a tensor of the result
        was written in place, and `attention-differs` if no result is left.
        """
        if self._index == len(self._results):
            raise self._build_count_error("more often")
        result = self._results[self._index]
        self._index += 1
        if result is None:
            return None
        if any(isinstance(value, torch.Tensor) and version_of(value) != version for value, version in result):
            message = "a layer writes in place to the output of its attention, which `memory.selective` saves"
            hint = "use a new tensor in the layer (`h = h * g`), or use `core.recompute`"
            raise RunError("saved-in-place", message, hint=hint)
        return [_detach(value) if isinstance(value, torch.Tensor) else value for value, _ in result]

    def check_all_reused(self) -> None:
        """Raises RunError `attention-differs` if the recomputation had fewer attentions, and may have used wrong results."""
        if self._index < self._num_needed:
            raise self._build_count_error("less often") from None

    def _build_count_error(self, comparison: str) -> RunError:
        """Returns the RunError `attention-differs`. comparison: "more often" or "less often"."""
        count = len(self._results)
        return RunError(
            "attention-differs",
            f"the recomputation of a layer calls its attention {comparison} than its first forward did ({count} times)",
            hint="call attention the same number of times in each call of the layer, or use `core.recompute`",
        )


class AttentionStats:
    """Counts kept and recomputed attentions. num_bytes, max_bytes: the current and the maximum size in bytes of the results
    kept for microbatches in flight. total_bytes: the size in bytes of all results that were ever kept.
    """

    def __init__(self) -> None:
        self.num_bytes = self.max_bytes = self.total_bytes = self.num_kept = self.num_recomputed = 0

    def add(self, num_bytes: int) -> None:
        """Counts a kept attention of `num_bytes`."""
        self.num_bytes += num_bytes
        self.max_bytes = max(self.max_bytes, self.num_bytes)
        self.total_bytes += num_bytes
        self.num_kept += 1


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without its history. The guard makes both share a version counter, even in a dispatch mode."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


_OPERATOR_NAMES = (  # the operators of `ATTENTION_OPERATORS`; a version of torch may lack some of them
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
ATTENTION_OPERATORS = frozenset(
    getattr(torch.ops.aten, name).default for name in _OPERATOR_NAMES if hasattr(torch.ops.aten, name)
)
"""The operators of `F.scaled_dot_product_attention`, without its math backend, whose results are not kept."""

VARLEN_OPERATOR = "torch_attn::_varlen_attn"
"""The name of variable-length attention on CUDA, which torch registers at its first use."""


class _KeepAttentionMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of attention operators in the first forward, and returns them in the recomputation."""

    def __init__(self, kept: AttentionResults, *, is_first_forward: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._is_first_forward = is_first_forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = func in ATTENTION_OPERATORS or func.name() == VARLEN_OPERATOR
        if is_attention and not self._is_first_forward and (result := self._kept.next_result()) is not None:
            return tuple(result)
        result = func(*args, **(kwargs or {}))
        if is_attention and self._is_first_forward:
            names = [argument.name for argument in func._schema.arguments]
            options = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            self._kept.add(result, has_dropout=float(options.get("dropout_p") or 0.0) > 0)
        return result


class _AttentionMode(TorchFunctionMode):
    """Intercepts torch functions in one run of a layer, and activates the operator mode in calls that may be attention. In the
    first forward, it counts the attentions before the last tensor that the checkpoint saves, where the recomputation stops.
    """

    def __init__(self, kept: AttentionResults, *, is_first_forward: bool) -> None:
        super().__init__()
        self._kept = kept
        self.is_first_forward = is_first_forward
        self._operators = _KeepAttentionMode(kept, is_first_forward=is_first_forward)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").lower()  # operators that a library has registered have such names, too
        if "attention" not in name and "attn" not in name:
            return func(*args, **(kwargs or {}))
        with self._operators:
            return func(*args, **(kwargs or {}))

    def __enter__(self) -> "_AttentionMode":
        kept = self._kept
        kept.rewind()
        if self.is_first_forward:
            # These are the checkpoint's hooks, which were entered just before. Hooks within the layer save other tensors.
            pack, unpack = _top_saved_tensors_default_hooks(False)

            def save(tensor: torch.Tensor) -> Any:
                kept.mark_needed()
                return pack(tensor)

            self._hooks = saved_tensors_hooks(save, unpack)
            self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        if self.is_first_forward:
            self._hooks.__exit__(kind, *error)
            del self._hooks  # they refer to the kept results, which must be freed with the graph
        elif kind is None or kind is checkpoint._StopRecomputationError:
            self._kept.check_all_reused()


def _choose_policy(_context: Any, operator: Any, *_args: Any, **_options: Any) -> checkpoint.CheckpointPolicy:
    """Tells torch to save the results of attention operators in a compiled layer, and to recompute all other results."""
    is_attention = operator in ATTENTION_OPERATORS or operator.name() == VARLEN_OPERATOR
    return checkpoint.CheckpointPolicy.MUST_SAVE if is_attention else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


class SelectiveRecompute(Recompute):
    """The policy `memory.selective`: recomputes chosen layers like `core.recompute`, but keeps the outputs of their attention.
    layer_names: the names of all layers of the model, in order.
    """

    def __init__(self, config: SelectiveConfig, layer_names: Sequence[str]) -> None:
        super().__init__(match_layers(config.layers, layer_names))
        self.stats = AttentionStats()
        self._compiled_names: set[str] = set()

    def compiled_forward(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls `forward` in a checkpoint, to be compiled as a whole. Its backward recomputes
        everything except the attention. Returns `forward` itself if the policy does not recompute the layer `name`.
        """
        if name not in self.names:
            return forward
        self._compiled_names.add(name)
        contexts = partial(checkpoint.create_selective_checkpoint_contexts, _choose_policy)
        return lambda *args, **fields: checkpoint.checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **fields)

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        return layer(*args, **fields) if name in self._compiled_names else super().call(name, layer, args, fields, micro)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Returns a context for a layer's first forward, which keeps attention results, and one for its recomputation."""
        results = AttentionResults(self.stats)
        return _AttentionMode(results, is_first_forward=True), _AttentionMode(results, is_first_forward=False)

    def counts(self) -> Mapping[str, float]:
        """Returns the numbers of kept and recomputed attentions and the kept bytes. Omits compiled layers."""
        return {
            "kept_bytes": self.stats.total_bytes,
            "max_kept_bytes": self.stats.max_bytes,
            "kept_attentions": self.stats.num_kept,
            "recomputed_attentions": self.stats.num_recomputed,
        }
