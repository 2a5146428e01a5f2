"""`isp.all_to_all`: any causal or full attention over sequences that are split into one slice per rank.

    q, k, v [b, s/n, h, d] ──all_to_all──> [b, s, h/n, d] ──attention──> context [b, s, h/n, d] ──all_to_all──> [b, s/n, h, d]

Here n is the number of ranks, b the batch size, s the length of the full sequence, h the number of heads, and d the size of a
head. The attention receives full sequences of some heads. Its other arguments, such as `cu_seqlens` or a mask, must describe
the full sequence, so that packed documents stay separate. Position-dependent operations on q and k, such as rotary embeddings,
must be applied before the attention. Heads must be independent of one another and of their indices, since each rank counts its
heads from 0. No check proves this, but `train-cli verify` compares the model with a run of one process.

Each exchange is one all-to-all of one buffer (Ulysses: Jacobs et al. 2023, arXiv 2309.14509, section 3.1). The backward of the
first exchange is the second exchange, and vice versa. w is the number of elements that one rank receives for a position:

    by heads       [b, s/n, ..., h, d]  ──>  buffer [n, b, s/n, w]    row i: the heads of rank i
    by positions   [b, s, ..., h/n, d]  ──>  buffer [n, b, s/n, w]    row i: the positions of slice i

After the all-to-all, row i comes from rank i. So a buffer that is packed by heads is unpacked by positions, and vice versa. All
ranks of a group run the same layers of the same microbatch, so their exchanges have the same order. A label and a checksum
identify each exchange. If they differ between ranks, all ranks raise an error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten

from sley_core.api.comm import Group, checksum
from sley_core.api.data import DataInfo
from sley_core.api.model import Attention, ForwardPatch, Layer
from sley_core.errors import PlanError, RunError
from sley_core.protocols import LayerCall, SequenceCommunicator
from sley_isp.mixing import RUNNING_PROBE, PositionProbe, check_module_types
from sley_isp.plugin import AllToAllConfig


class SequenceAttention(nn.Module):
    """Wraps an attention for a custom model: `self.attend = SequenceAttention(attention)`.

    attention: a module or a function. Its first positional arguments are `q, k, v`, each [b, s, h, d], or `q, kv` with kv
    [b, s, 2, h_kv, d], or `qkv` [b, s, 3, h, d]. Other arguments are passed on unchanged. It must return only the context,
    [b, s, h, d] or [b, s, h x d].

    A run that splits sequences replaces the module's forward.
    """

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.attention(*args, **kwargs)


def wrap_attention(attention: Callable[..., Tensor], group: Group) -> Callable[..., Tensor]:
    """Returns a function that computes `attention` over full sequences from slices, for training loops that use
    `run.groups["sp"]`.

    attention: takes q, k, v [b, s, h, d] (or q, kv, or qkv), and returns the context. group: the ranks that hold the slices of
    the same samples, in the order of the slices. A call makes one exchange before and one after the attention, and two more in
    its backward.

    The returned function raises RunError "sequence-attention" for unsupported shapes, "sequence-heads" for unsupported numbers
    of heads, and "ranks-differ" if functions, options or shapes differ between ranks.
    """
    return attention if group.size == 1 else partial(_attend, attention, group)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(attention: Callable[..., Tensor], group: Group, /, *args: Any, **kwargs: Any) -> Tensor:
    """Returns this rank's slice of the attention's output. Runs outside of compiled graphs, which cannot contain exchanges."""
    tensors, probe = _select_tensors(args, group.size), RUNNING_PROBE.get()
    call = partial(_exchange_and_attend, attention, group, tensors, args[len(tensors) :], kwargs)
    return call() if probe is None else probe.attend(tensors, call)


def _exchange_and_attend(
    attention: Callable[..., Tensor], group: Group, tensors: Sequence[Tensor], options: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """Exchanges `tensors`, slices such as q, k and v, for full sequences of some heads, calls the attention, and returns this
    rank's slice of the output. Raises RunError "sequence-attention" if the output is not a context of the expected shape.
    """
    checksum = _checksum_call(attention, options, kwargs)
    scatter = partial(_Exchange.apply, group, True, "queries, keys and values", checksum)
    repeated = [repeat_heads(tensor, group.size) for tensor in tensors]
    is_one_dtype = len({tensor.dtype for tensor in tensors}) == 1
    full = scatter(*repeated) if is_one_dtype else tuple(scatter(tensor)[0] for tensor in repeated)
    try:
        context = attention(*full, *options, **kwargs)
    except Exception as error:  # an error in the user's attention
        error.add_note("with `sp` each rank attends with some heads over full sequences, so masks must cover the full sequence")
        raise
    shape = *full[0].shape[:2], full[0].shape[-2]
    is_flat = isinstance(context, Tensor) and context.ndim == 3
    heads = torch.unflatten(context, -1, (shape[2], -1)) if is_flat and context.shape[2] % shape[2] == 0 else context
    if not isinstance(heads, Tensor) or heads.ndim != 4 or heads.shape[:3] != shape:
        result = f"{list(context.shape)}" if isinstance(context, Tensor) else f"a {type(context).__name__}"
        raise RunError(
            "sequence-attention",
            f"an attention of {shape[0]} x {shape[1]} positions and {shape[2]} heads must return a context [b, s, h, d] or "
            f"[b, s, h d], but returned {result}",
            hint="return only the context",
        )
    (local_context,) = _Exchange.apply(group, False, "the context", checksum, heads)  # type: ignore[no-untyped-call]
    return cast(Tensor, local_context.flatten(-2) if is_flat else local_context)


def _select_tensors(args: Sequence[Any], num_ranks: int) -> tuple[Tensor, ...]:
    """Returns the leading tensors of `args`: qkv, or q and kv, or q, k and v. Raises RunError "sequence-attention" for
    unsupported shapes, and "sequence-heads" if the number of query heads is not a multiple of `num_ranks`.
    """
    ndims = [arg.ndim if isinstance(arg, Tensor) else 0 for arg in args[:3]]
    num_tensors = next((len(form) for form in ([5], [4, 5], [4, 4, 4]) if ndims[: len(form)] == form), 0)
    tensors = tuple(args[:num_tensors])
    heads = tensors[0].shape[-2] if tensors else 0
    if not tensors or any(tensor.shape[:2] != tensors[0].shape[:2] or heads % tensor.shape[-2] for tensor in tensors):
        shapes = ", ".join(str(list(arg.shape)) if isinstance(arg, Tensor) else type(arg).__name__ for arg in args[:3])
        raise RunError(
            "sequence-attention",
            f"an attention over slices was called with {shapes or 'no positional arguments'}",
            hint="pass `q, k, v` [b, s, h, d], or `q, kv` with kv [b, s, 2, h, d], or `qkv` [b, s, 3, h, d], as positional "
            "arguments with the same b and s; the number of query heads must be a multiple of the number of key heads",
        )
    if heads % num_ranks:
        message = f"the number of heads must be a multiple of sp = {num_ranks}, but is {heads}"
        raise RunError("sequence-heads", message, hint="use a smaller `sp`, since every rank needs at least one head")
    return tensors


def _checksum_call(attention: Callable[..., Tensor], options: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Returns a checksum of the name of the attention and of the arguments of a call, without the values of tensors."""
    function = attention if hasattr(attention, "__qualname__") else type(attention)
    leaves, structure = tree_flatten((options, kwargs))
    texts = [repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__ for leaf in leaves]
    return checksum([f"{function.__module__}.{function.__qualname__}", str(structure), *texts])


class AllToAllAttention(SequenceCommunicator):
    """Makes attentions work on slices: core's `Attention`, `SequenceAttention`, and modules that the plan names."""

    def __init__(self, config: AllToAllConfig, group: Group) -> None:
        self.patterns = config.modules
        self.unchecked_layers: Sequence[str] = config.unchecked_layers
        self.group = group
        self._undo = ExitStack()

    def prepare(self, data: DataInfo) -> None:
        """Creates the probe that checks each layer's first call in training."""
        self._probe = PositionProbe(data, self.group.size, self.unchecked_layers)

    def attach(self, layers: Sequence[Layer]) -> None:
        """Patches every attention in `layers`, or none if an error is raised. Raises PlanError "sequence-attention" if a
        pattern matches nothing or there is no attention, and "sequence-mixing" for torch modules of types that mix positions.
        In the first step, `call_layer` finds any other layer that mixes positions.
        """
        with ExitStack() as undo:
            modules = [item for layer in layers for item in layer.module.named_modules(prefix=layer.name)]
            submodules: set[nn.Module] = set()
            for name, module in modules:
                is_named = any(fnmatchcase(name, pattern) for pattern in self.patterns)
                if (is_named or isinstance(module, SequenceAttention | Attention)) and module not in submodules:
                    submodules.update(module.modules())
                    attention = module.attention if type(module) is SequenceAttention else module.forward
                    undo.callback(ForwardPatch(module, wrap_attention(attention, self.group)).undo)
            for layer in layers:
                if not any(fnmatchcase(layer.name, pattern) for pattern in self.unchecked_layers):
                    check_module_types(layer, submodules)
            for key, patterns, names in (
                ("modules", self.patterns, [name for name, _ in modules]),
                ("unchecked_layers", self.unchecked_layers, [layer.name for layer in layers]),
            ):
                for pattern in patterns:
                    if not any(fnmatchcase(name, pattern) for name in names):
                        message = f"the pattern `{pattern}` in `{key}` matches nothing in the model"
                        hint = "use names that `train-cli show` prints"
                        raise PlanError("sequence-attention", message, path=("sequence", key), hint=hint)
            if not submodules:
                raise PlanError(
                    "sequence-attention",
                    "the model has no attention that `isp.all_to_all` supports, so no position could attend to another slice",
                    path=("sequence", "use"),
                    hint="list its attention modules in `modules`, wrap them in sley_isp.attention.SequenceAttention, or "
                    "use sley_core.model.attention.Attention",
                )
            self._undo = undo.pop_all()  # after an error, the `with` block undoes the patches instead

    def call_layer(
        self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], call: LayerCall, rerun: LayerCall
    ) -> Any:
        """Returns `call(args, fields)`. The first call of a layer raises RunError "sequence-mixing" if the layer mixes
        positions outside its attention.
        """
        return self._probe.call(layer, args, fields, call, rerun)

    def detach(self) -> None:
        self._undo.close()


class _Exchange(torch.autograd.Function):
    """The differentiable all-to-all between tensors split by position and tensors split by head. Blocks in both passes."""

    @staticmethod
    def forward(ctx: Any, group: Group, to_heads: bool, label: str, checksum: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = partial(_exchange, group, not to_heads, f"the gradients of {label}", checksum)
        return _exchange(group, to_heads, label, checksum, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *[None] * 4, *ctx.exchange(gradients)


def _exchange(group: Group, to_heads: bool, label: str, checksum: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Exchanges slices of all heads, [b, s/n, ..., h, d], for full sequences of this rank's heads, [b, s, ..., h/n, d], or the
    reverse if `to_heads` is False, and returns the received tensors. Packing and unpacking take one copy each. A collective of
    `group`. checksum: a value that must be equal on all ranks. tensors: tensors of one dtype.
    """
    split_dim, rank_dim = (-2, -3) if to_heads else (1, 1)
    parts = [torch.unflatten(tensor, split_dim, (group.size, -1)).movedim(rank_dim, 0) for tensor in tensors]
    widths = [math.prod(part.shape[3:]) for part in parts]
    buffer = parts[0].new_empty((*parts[0].shape[:3], sum(widths)))
    for target, part in zip(torch.split(buffer, widths, dim=-1), parts, strict=True):
        torch.unflatten(target, -1, part.shape[3:]).copy_(part)
    output = torch.empty_like(buffer)
    # The ranks that hold slices of the same samples call this in the same order (see the module's docstring).
    group.transport().all_to_all(output, buffer, label=label, checksum=checksum).wait_sent()
    received = zip(torch.split(output, widths, dim=-1), parts, strict=True)
    rows = [torch.unflatten(tensor, -1, part.shape[3:]) for tensor, part in received]
    if to_heads:
        return tuple(row.movedim(0, 1).flatten(1, 2) for row in rows)  # views of the buffer if b = 1
    return tuple(row.movedim(0, -3).flatten(-3, -2) for row in rows)


def repeat_heads(tensor: Tensor, num_ranks: int) -> Tensor:
    """Returns `tensor` [b, s, ..., h, d] with its heads repeated until there are lcm(h, num_ranks) heads, which divide evenly
    between the ranks. Copies of a head are adjacent, so each query head still matches a copy of its key head. Autograd sums the
    gradients of the copies.
    """
    num_copies = math.lcm(tensor.shape[-2], num_ranks) // tensor.shape[-2]
    if num_copies == 1:
        return tensor
    return tensor.unsqueeze(-2).expand(*tensor.shape[:-1], num_copies, tensor.shape[-1]).flatten(-3, -2)
