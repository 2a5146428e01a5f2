"""Finds the parts of a causal language model from transformers, and computes the arguments of its decoder layers.

A transformers decoder has this structure, with names that differ by family:

    causal                     LlamaForCausalLM            GPT2LMHeadModel
      <base>                   model                       transformer
        embeddings             embed_tokens                wte, wpe, drop
        <blocks>               layers                      h
        <norm>                 norm                        ln_f
        other modules          rotary_emb
      head                     lm_head                     lm_head

The forward of the base model computes all arguments of a decoder layer except the hidden states: rotary tables, masks and
positions. `LayerArguments` runs that forward without parameters, and with recorders in place of the decoder layers. Therefore,
no family needs its own code.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.api.model import once_per_field
from sley_core.errors import PlanError


class UnsupportedModelError(ValueError):
    """Raised for a model that cannot be split into layers, or whose load-balancing loss is not supported."""


@dataclass(frozen=True)
class ModuleNames:
    """The names of the parts of a transformers model. base: the attribute of the causal model that holds the base model. stack:
    the path, within the base model, of the owner of the decoder layers, or "" for the base model itself. blocks, norm: the
    owner's attributes that hold the decoder layers and the last norm.
    """

    base: str
    stack: str
    blocks: str
    norm: str

    def find_stack(self, base: nn.Module) -> nn.Module:
        return base.get_submodule(self.stack)

    def list_blocks(self, causal: Any) -> list[nn.Module]:
        """Returns the decoder layers of the causal model `causal`."""
        return list(self.find_stack(getattr(causal, self.base)).get_submodule(self.blocks).children())

    def full_name(self, attribute: str) -> str:
        """Returns the full name of an attribute of the stack, such as `model.layers`."""
        return ".".join(name for name in (self.base, self.stack, attribute) if name)


def find_structure(causal: Any) -> ModuleNames:
    """Returns the names of the parts of a transformers model. Raises UnsupportedModelError if it is not a plain decoder."""
    config = causal.config
    family = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"`{family}` is an encoder-decoder; only decoders can be cut into layers")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(f"`{family}` attends in both directions, so it is not a causal decoder")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        listed = ", ".join(sorted(kinds))
        raise UnsupportedModelError(f"`{family}` has layers of the types {listed}, which keep state across positions")
    base_name = causal.base_model_prefix
    base = getattr(causal, base_name, None)
    if not isinstance(base, nn.Module):
        raise UnsupportedModelError(f"`{family}` has no base model `{base_name}`")
    num_layers = config.num_hidden_layers
    lists = [path for path, module in base.named_modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    lists = [path for path in lists if not any(path.startswith(f"{outer}.") for outer in lists)]
    if len(lists) != 1:
        raise UnsupportedModelError(f"`{family}` must have one list of {num_layers} decoder layers, but has {len(lists)}")
    stack, _, blocks = lists[0].rpartition(".")
    names = [name for name, _ in base.get_submodule(stack).named_children()]
    planned = list(getattr(base, "_pp_plan", None) or ()) if not stack else []
    if blocks in planned:
        norms = planned[planned.index(blocks) + 1 :]
    else:  # modules with parameters after the layers, or else modules with "norm" in their names
        after = names[names.index(blocks) + 1 :]
        norms = [name for name in after if any(True for _ in base.get_submodule(stack).get_submodule(name).parameters())]
        norms = norms or [name for name in names if "norm" in name and "embed" not in name]
    if len(norms) != 1:
        listed = ", ".join(norms) or "none"
        raise UnsupportedModelError(f"`{family}` must have one norm after its decoder layers, but has {listed}")
    return ModuleNames(base_name, stack, blocks, norms[0])


def to_layer_name(name: str, structure: ModuleNames) -> str:
    """Returns Sley's name of the parameter or buffer that transformers calls `name`."""
    blocks, norm = structure.full_name(structure.blocks), structure.full_name(structure.norm)
    if name.startswith(f"{blocks}."):
        index, _, path = name.removeprefix(f"{blocks}.").partition(".")
        return f"blocks.{index}.layer.{path}"
    if name.startswith(f"{norm}."):
        return f"head.norm.{name.removeprefix(f'{norm}.')}"
    if name.startswith(f"{structure.base}."):
        return f"embed.base.{name.removeprefix(f'{structure.base}.')}"
    return f"head.causal.{name}"


class _LastLayerReached(Exception):  # noqa: N818  # not an error
    """Raised by the last recorder, to end the forward of the base model."""


class _Recorder(nn.Module):
    """Replaces the decoder layer `layer`, and records the arguments of its calls. The recorder copies the layer's plain
    attributes, since the base model may read them. is_last: whether a call ends the forward of the base model.
    """

    def __init__(self, layer: nn.Module, *, is_last: bool) -> None:
        super().__init__()
        self.__dict__ |= {name: value for name, value in vars(layer).items() if not name.startswith("_") and name != "forward"}
        self.is_last = is_last
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Records the call and returns the hidden states unchanged. The last recorder raises `_LastLayerReached` instead."""
        hidden = args[0] if args else kwargs.pop("hidden_states")
        self.calls.append((hidden, args[1:], kwargs))
        if self.is_last:
            raise _LastLayerReached
        return hidden


def record_calls(
    base: nn.Module, recorders: list[_Recorder], **inputs: Any
) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Runs the base model on `inputs` up to its last recorder. Returns the hidden states, the other positional arguments and
    the keyword arguments of each recorder's call. Raises PlanError "hf-structure" if the forward fails with recorders in place
    of the layers.
    """
    for recorder in recorders:
        recorder.calls.clear()  # an earlier forward that failed may have left calls
    try:
        base(**inputs, use_cache=False)
    except _LastLayerReached:
        pass
    except Exception as error:
        message = (
            f"the structure of `{type(base).__name__}` is not supported: its forward fails when its layers are removed "
            f"({type(error).__name__}: {error})"
        )
        hint = "use a model of a tested family, which packages/hf/README.md lists"
        raise PlanError("hf-structure", message, path=("model",), hint=hint) from error
    return [recorder.calls.pop() for recorder in recorders]


class _ZeroEmbedding(nn.Module):
    """Replaces an embedding table in `LayerArguments`: returns zeros [..., hidden] that share the memory of one element."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros((), device=ids.device).expand(*ids.shape, self.hidden)


class _FirstArgument(nn.Module):
    """Replaces any other module with parameters in `LayerArguments`: returns its first argument."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


def copy_with_recorders(
    causal: Any, structure: ModuleNames, num_recorders: int | None = None
) -> tuple[nn.Module, list[_Recorder]]:
    """Returns a copy of the base model without its last norm, and the recorders that replace the copy's decoder layers.
    num_recorders: the number of decoder layers in the copy; None for all.
    """
    original = getattr(causal, structure.base)
    blocks = structure.find_stack(original).get_submodule(structure.blocks)
    layers = list(blocks.children())[:num_recorders]
    recorders = [_Recorder(layer, is_last=layer is layers[-1]) for layer in layers]
    memo: dict[int, Any] = {id(blocks): nn.ModuleList(recorders)}
    base = copy.deepcopy(original, memo)
    setattr(structure.find_stack(base), structure.norm, nn.Identity())
    return base, recorders


class LayerArguments:
    """Computes the arguments of all decoder layers, except the hidden states, once per microbatch. All blocks of a model share
    one object. The class is not an `nn.Module`, so that its buffers, such as rotary frequencies, belong to no layer.
    """

    def __init__(self, causal: Any, structure: ModuleNames) -> None:
        base, recorders = copy_with_recorders(causal, structure)
        hidden = causal.config.hidden_size
        for module in list(base.modules()):
            for name, child in list(module.named_children()):
                if any(True for _ in child.parameters(recurse=False)):
                    is_embedding = isinstance(child, nn.Embedding)
                    setattr(module, name, _ZeroEmbedding(hidden) if is_embedding else _FirstArgument())
        self._base, self._recorders = base.eval(), recorders
        self._buffers = [
            (module, name, buffer)
            for module in base.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._device: torch.device | None = None
        self._cached_calls: tuple[Any, Any] = (None, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerArguments":
        """Returns this object, since copies of a block share it."""
        return self

    def __call__(
        self, index: int, hidden: Tensor, positions: Tensor | None, mask: Tensor | None, field: Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and keyword arguments of decoder layer `index`, without the hidden states. hidden: the hidden
        states [b, s, h]. positions: [b, s], or None to count from 0. mask: the additive mask [b, 1, s, s], or None. field: the
        batch field with which the arguments are cached; None if only the shape, dtype and device of `hidden` determine them.
        """
        key = (id(self), tuple(hidden.shape), hidden.dtype, hidden.device)

        def compute() -> Any:
            return self._compute(hidden, positions, mask)

        if field is not None:
            calls = once_per_field(field, key, compute)
        elif hidden.is_meta or mask is not None:  # not cached, since no meta tensor may remain in the layers
            calls = compute()
        else:
            if self._cached_calls[0] != key:
                with torch.no_grad():
                    self._cached_calls = key, compute()
            calls = self._cached_calls[1]
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = calls[index]
        return arguments

    def _compute(self, hidden: Tensor, positions: Tensor | None, mask: Tensor | None) -> Any:
        """Returns the positional and keyword arguments of each decoder layer, from a forward of the base model on zeros."""
        if hidden.device != self._device:
            self._move_buffers(hidden.device)
        zeros = hidden.new_zeros(()).expand(*hidden.shape)
        # The positions are copied, since a cached value must not refer to the field that owns the cache.
        inputs = {} if positions is None else {"position_ids": positions.clone()}
        calls = record_calls(self._base, self._recorders, inputs_embeds=zeros, attention_mask=mask, **inputs)
        if hidden.is_meta:
            self._move_buffers(torch.device("cpu"))
        return [(args, kwargs) for _, args, kwargs in calls]

    def _move_buffers(self, device: torch.device) -> None:
        """Makes the base model use copies of its buffers on `device`."""
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer.to(device)
        self._device = device
