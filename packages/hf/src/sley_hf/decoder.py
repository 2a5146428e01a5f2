"""`hf.decoder`: a causal language model from transformers, split into the layers `embed`, `blocks.0` ... and `head`.

    embed    the forward of the base model up to its first decoder layer: embedding tables, learned positions, scaling
    block    one unchanged decoder layer, called with the arguments that the base model's forward computes for it
    head     the last norm, and the forward of the causal model after its base model: projection, soft cap, scaling

The layers consist of transformers' own modules. `structure.py` finds them, and `attention.py` replaces the attention kernel.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from sley_core.api.data import DataInfo
from sley_core.api.model import Model, attention_mask
from sley_core.api.parts import Parts
from sley_core.errors import PlanError, RunError
from sley_hf.attention import INTERFACE_NAME, SleyAttention, add_attention, uses_interface
from sley_hf.plugin import DecoderConfig, has_router_loss
from sley_hf.routers import BalancedLogits, LoadBalancingLoss, RoutedStates, Routers, find_routers
from sley_hf.structure import (
    LayerArguments,
    ModuleNames,
    UnsupportedModelError,
    copy_with_recorders,
    find_structure,
    record_calls,
    to_layer_name,
)
from sley_hf.weights import FileInitializer


def build_layers(config: DecoderConfig, data: DataInfo) -> Model:
    """Returns the plan's transformers model, split into layers. Each rank later builds only its own layers, and reads only the
    tensors of these layers.

    The first layer reads the `tokens` field [b, s]. If the data has these fields, the first layer and the blocks also read
    `positions` [b, s], and the blocks `cu_seqlens` [b, n + 1]. Raises PlanError "hf-structure" for a model that is not a plain
    decoder or has an unsupported load-balancing loss, "hf-kernel" for an attention kernel that the model does not support,
    "model-vocabulary" if the data has more token ids than the model, and "model-weights" for wrong or unreadable files.
    """
    hf_config = read_hf_config(config)
    causal, structure = build_from_config(hf_config, kernel=config.kernel, experts=config.experts)
    routers = build_routers(config, causal, structure)
    vocab_size = causal.config.vocab_size
    if data.vocab_size is not None and vocab_size < data.vocab_size:
        message = f"the model has only {vocab_size} token ids, but the data has {data.vocab_size}"
        raise PlanError("model-vocabulary", message, path=("model",), hint="use the tokenizer of the model")

    def draw_values(module: nn.Module, name: str) -> None:
        causal._init_weights(module)

    initialize = draw_values if config.weights is None else FileInitializer(config.weights, causal, structure)
    return split_into_layers(causal, structure, initialize, routers)


def build_routers(config: DecoderConfig, causal: Any, structure: ModuleNames) -> Routers | None:
    """Returns the routers if training adds their loss, else None. Raises PlanError "hf-structure" for an unsupported loss."""
    if not has_router_loss(config):
        return None
    try:
        return find_routers(causal, structure, config.router_loss)
    except UnsupportedModelError as error:
        hint = "to train without this loss, remove `router_loss`, and `output_router_logits` from `config.json`"
        raise PlanError("hf-structure", str(error), path=("model", "router_loss"), hint=hint) from None


def split_into_layers(
    causal: Any,
    structure: ModuleNames,
    initialize: Callable[[nn.Module, str], None] | None = None,
    routers: Routers | None = None,
) -> Model:
    """Returns a transformers model on meta as a `Model` of layers. initialize: sets the values of a module, given its name.
    routers: the routers if training adds their load-balancing loss, or None.
    """
    arguments = LayerArguments(causal, structure)
    indices = range(causal.config.num_hidden_layers)
    blocks = [(f"blocks.{index}", partial(Block, causal, structure, arguments, index, routers)) for index in indices]
    head = partial(Head, causal, structure, routers)
    builders: Any = [("embed", partial(Embed, causal, structure)), *blocks, ("head", head)]
    return Model(builders, initialize, ties=list_ties(causal, structure))


def read_hf_config(config: DecoderConfig) -> Any:
    """Returns the transformers config that the plan names. Raises PlanError "hf-structure" if transformers cannot read it."""
    try:
        return AutoConfig.from_pretrained(config.config_file)
    except ValueError as error:
        raise _build_structure_error(str(error)) from None


def build_from_config(hf_config: Any, *, kernel: str, experts: str) -> tuple[Any, ModuleNames]:
    """Returns the transformers model, with its parameters on meta and its buffers on the host, and the names of its parts.
    kernel, experts: the attention kernel and the kernel of experts, by their names in transformers. Raises PlanError
    "hf-structure" for a model that is not a plain decoder, and "hf-kernel" if the model's family computes attention with its
    own code, which does not support `kernel`.
    """
    hf_config = copy.deepcopy(hf_config)
    hf_config.output_router_logits = False  # the blocks record the logits themselves
    hf_config.dtype = torch.float32  # the files' dtype would round constants, such as the scale of Gemma's embeddings
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    if model_class is None:
        raise _build_structure_error(f"transformers has no causal language model of the type `{hf_config.model_type}`")
    has_interface = uses_interface(model_class)
    if not has_interface and kernel not in ("sdpa", "eager"):
        message = f"`{hf_config.model_type}` computes attention with its own code, which has no `{kernel}`"
        raise PlanError("hf-kernel", message, path=("model", "attention"), hint='use "auto" or "eager"')
    implementation = INTERFACE_NAME if has_interface else kernel if model_class._supports_sdpa else "eager"
    try:
        with torch.device("meta"):
            experts_option = {"experts_implementation": experts} if model_class._can_set_experts_implementation() else {}
            causal = model_class._from_config(hf_config, attn_implementation=implementation, **experts_option)
        structure = find_structure(causal)
    except (UnsupportedModelError, ValueError) as error:
        raise _build_structure_error(str(error)) from None
    for parameter in causal.parameters():
        parameter.__dict__.pop("_is_hf_initialized", None)  # `_init_weights` would skip the parameter
    _compute_buffers(causal)
    if has_interface:
        add_attention(causal, kernel)
    num_active = getattr(hf_config, "num_experts_per_tok", None)
    for module in causal.modules() if num_active else ():
        stacked = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 3]
        if stacked and not isinstance(module, nn.Conv1d):  # for `model_flops`
            module.active_share = num_active / stacked[0].shape[0]
    return causal, structure


def _build_structure_error(message: str) -> PlanError:
    return PlanError("hf-structure", message, path=("model",), hint="use a model of a family that packages/hf/README.md lists")


@torch.no_grad()
def _compute_buffers(causal: Any) -> None:
    """Replaces the buffers on meta with buffers on the host, and sets them to the values that transformers gives them."""
    for module in causal.modules():
        on_meta = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in on_meta:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if on_meta:
            causal._init_weights(module)


def list_ties(causal: Any, structure: ModuleNames) -> list[tuple[str, str]]:
    """Returns pairs of the names of tied parameters in Sley's model: first the embedding's name, then the head's name."""
    if not causal.config.tie_word_embeddings:
        return []
    tied = dict(causal._tied_weights_keys or {})
    return [(to_layer_name(source, structure), to_layer_name(target, structure)) for target, source in tied.items()]


class Embed(nn.Module):
    """The layer `embed`: the forward of the base model up to its first decoder layer, [b, s] -> [b, s, hidden]."""

    def __init__(self, causal_lm: Any, structure: ModuleNames) -> None:
        super().__init__()
        self.base, self._recorders = copy_with_recorders(causal_lm, structure, 1)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: compiling would not make the lookup faster, and the recorder ends the forward with an exception."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns the hidden states [b, s, hidden] of token ids [b, s]. positions: [b, s], or None to count from 0."""
        inputs = {} if positions is None else {"position_ids": positions}
        hidden: Tensor = record_calls(self.base, self._recorders, input_ids=tokens, **inputs)[0][0]
        return hidden


class Block(nn.Module):
    """One transformers decoder layer, [b, s, hidden] -> [b, s, hidden]: a copy of layer `index` of the model `causal`.
    arguments: computes the arguments of the layer, except the hidden states. routers: the routers of the model if training adds
    their load-balancing loss, or None.
    """

    def __init__(
        self, causal: Any, structure: ModuleNames, arguments: LayerArguments, index: int, routers: Routers | None
    ) -> None:
        super().__init__()
        self.layer = copy.deepcopy(structure.list_blocks(causal)[index])
        self._arguments = arguments
        self._index = index
        self._needs_mask = causal.config._attn_implementation != INTERFACE_NAME  # the family's own attention takes a mask
        self._attentions = tuple(module for module in self.layer.modules() if isinstance(module, SleyAttention))
        self._routers = routers
        self._router_logits: list[Tensor] = []
        for router in routers.find_modules(self.layer) if routers is not None else ():
            router.register_forward_hook(self._record_router)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the decoder layer. Its arguments are computed once per microbatch, outside of the compiled graph."""
        self.layer.compile(*args, **kwargs)

    def _record_router(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """In training, records the logits in the `output` of a router. This is a forward hook of each router."""
        if self.training and self._routers is not None:
            self._router_logits.append(output[self._routers.recorder.index] if isinstance(output, tuple) else output)

    def forward(
        self, inputs: Tensor | RoutedStates, positions: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor | RoutedStates:
        """Returns the hidden states [b, s, hidden], or `RoutedStates` in training with routers. inputs: the output of the
        previous layer. positions: [b, s], or None to count from 0. cu_seqlens: the document bounds [b, n + 1]. Raises RunError
        "hf-attention" if the layer does not call Sley's attention.
        """
        hidden = inputs.hidden if isinstance(inputs, RoutedStates) else inputs
        self._router_logits.clear()  # an earlier forward that failed may have left logits
        mask = None
        if self._needs_mask and cu_seqlens is not None:
            mask = attention_mask(cu_seqlens, None, hidden).expand(hidden.shape[0], -1, -1, -1)
        field = cu_seqlens if positions is None else positions
        args, kwargs = self._arguments(self._index, hidden, positions, mask, field)
        for attention in self._attentions:
            attention.cu_seqlens = cu_seqlens
        output: Any = self.layer(hidden, *args, **kwargs)
        for attention in self._attentions:
            attention.cu_seqlens = None
        if self._attentions and not any(attention.was_called for attention in self._attentions):
            message = f"`{type(self.layer).__name__}` does not call the attention that is registered with transformers"
            raise RunError("hf-attention", message, hint="use a model of a tested family, which packages/hf/README.md lists")
        output_states: Tensor = output[0] if isinstance(output, tuple) else output
        if self._routers is None or not (self._router_logits or isinstance(inputs, RoutedStates)):
            return output_states
        logits, self._router_logits = self._router_logits, []
        return self._routers.add_terms(output_states, inputs, logits)


class _BaseModelOutput:
    """The output of a base model: the hidden states, and None for each other attribute that a causal model may read."""

    def __init__(self, last_hidden_state: Tensor | None) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _HiddenStates(nn.Module):
    """Replaces the module that owns the decoder layers: returns the hidden states that `Head` sets."""

    hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _BaseModelOutput:
        return _BaseModelOutput(self.hidden)


class Head(nn.Module):
    """The layer `head`: the last norm, and the forward of the causal model after its base model, [b, s, hidden] -> [b, s, v].
    routers: the routers if training adds their load-balancing loss, or None.
    """

    def __init__(self, causal: Any, structure: ModuleNames, routers: Routers | None) -> None:
        super().__init__()
        stack = structure.find_stack(getattr(causal, structure.base))
        source = _HiddenStates()
        self.norm = copy.deepcopy(stack.get_submodule(structure.norm))
        self.causal = copy.deepcopy(causal, {id(stack): source})
        self._source = (source,)  # in a tuple, so that it is not registered again: `causal` owns the module
        self._balance = None if routers is None else LoadBalancingLoss(routers)

    def attach_to_run(self, parts: Parts) -> None:
        """Adds the metrics of the load-balancing loss to the rows, if training computes this loss."""
        if self._balance is not None:
            self._balance.attach(parts)

    def forward(self, inputs: Tensor | RoutedStates) -> Tensor | BalancedLogits:
        """Returns the logits [b, s, v]; as `BalancedLogits` in training with routers. inputs: the output of the last block."""
        source = self._source[0]
        source.hidden = self.norm(inputs.hidden if isinstance(inputs, RoutedStates) else inputs)
        try:
            logits: Tensor = self.causal(input_ids=None, use_cache=False).logits
        finally:
            source.hidden = None
        if self._balance is None or not isinstance(inputs, RoutedStates):
            return logits
        return BalancedLogits(logits, inputs, self._balance)
