"""The reference decoder `models.llama`, the architecture of LLaMA (Touvron et al. 2023) with grouped-query attention.

Options make it Qwen2 (biases of queries, keys and values) or Qwen3 (normalised queries and keys).

    embed ──> blocks.0 ──> ... ──> blocks.n-1 ──> head ──> logits [b, s, v]

    block:  x + attention(norm(x)),  then  x + feed_forward(norm(x))

Weights have the layout of Hugging Face's Llama (`hf.py`). Rotary tables are computed in at least fp32, and so are the inner
values of torch's RMSNorm (Zhang and Sennrich 2019), whatever the dtype of the inputs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.api.data import DataInfo
from sley_core.api.model import Attention, Model, once_per_field
from sley_core.errors import PlanError
from sley_models.plugin import LlamaConfig, RopeScaling


def build_llama(config: LlamaConfig, data: DataInfo) -> Model:
    """Returns the model with the layers `embed`, `blocks.0` ... and `head`. Each rank builds only its own layers, and with
    `weights` reads only the values of these layers. The first layer reads the `tokens` field [b, s]. Blocks read `positions`
    [b, s] and `cu_seqlens` [b, n + 1] if the data has them. Raises PlanError "model-vocabulary" if the vocabulary size is
    unknown or smaller than the data's, and "model-weights" if the files cannot be read or belong to another model.
    """
    vocab_size = _resolve_vocab_size(config, data)
    builders: Any = [
        ("embed", partial(build_on_meta, Embed, vocab_size, config.hidden)),
        ("blocks", partial(build_on_meta, Block, config), config.num_layers),
        ("head", partial(build_on_meta, Head, config, vocab_size)),
    ]
    ties = [("embed.tokens.weight", "head.output.weight")] if config.tie_embeddings else []
    if config.weights is None:
        return Model(builders, partial(_draw_values, config), ties=ties)
    from sley_models.hf import FileInitializer  # only `weights` needs its libraries

    return Model(builders, FileInitializer(config), ties=ties)


def build_on_meta(layer_class: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Returns `layer_class(*args)` with parameters on the meta device."""
    with torch.device("meta"):
        return layer_class(*args)


def _resolve_vocab_size(config: LlamaConfig, data: DataInfo) -> int:
    """Returns the vocabulary size of the plan, or else of the data. Raises PlanError "model-vocabulary" if neither is
    known, or if the plan's is smaller than the data's.
    """
    path = ("model", "vocab_size")
    if config.vocab_size is None:
        if data.vocab_size is None:
            message, hint = "the data does not declare its number of token ids", "set vocab_size in the plan"
            raise PlanError("model-vocabulary", message, path=path, hint=hint)
        return data.vocab_size
    if data.vocab_size is not None and config.vocab_size < data.vocab_size:
        message = (
            f"vocab_size must be at least {data.vocab_size}, the number of token ids of the data, but is {config.vocab_size}"
        )
        raise PlanError("model-vocabulary", message, path=path, hint="remove `vocab_size` to use the vocabulary of the data")
    return config.vocab_size


def _draw_values(config: LlamaConfig, module: nn.Module, name: str) -> None:
    """Draws normally distributed weights. Projections into the residual stream have a smaller deviation (Radford et al. 2019).
    Each block adds two projections to the stream. With the deviation std / sqrt(2 x num_layers), the variance of the stream
    does not grow with the number of blocks.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        is_residual = name.endswith((".attention.output", ".feed_forward.down"))
        nn.init.normal_(module.weight, std=config.init_std / math.sqrt(2 * config.num_layers if is_residual else 1))
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)


class Embed(nn.Module):
    """The token embedding, [b, s] -> [b, s, hidden]."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings [b, s, hidden] of token ids [b, s]."""
        embeddings: Tensor = self.tokens(tokens)
        return embeddings


class Block(nn.Module):
    """A decoder block, [b, s, hidden] -> [b, s, hidden]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = SelfAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.hidden, config.ffn_hidden)

    def forward(self, hidden: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns [b, s, hidden]. positions: [b, s]; None counts from 0. cu_seqlens: the document bounds [b, n + 1] or None."""
        hidden = hidden + self.attention(self.attention_norm(hidden), positions, cu_seqlens)
        output: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return output


class Head(nn.Module):
    """The last norm and the projection to logits, [b, s, hidden] -> [b, s, v]."""

    def __init__(self, config: LlamaConfig, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.output = nn.Linear(config.hidden, vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the logits [b, s, v]."""
        logits: Tensor = self.output(self.norm(hidden))
        return logits


class SelfAttention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attention_width = config.heads * config.head_dim  # read by `model_flops`
        self.query = nn.Linear(config.hidden, config.heads * config.head_dim, bias=config.qkv_bias)
        self.key = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.value = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.output = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.query_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        self.core = Attention()

    def forward(self, x: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """Returns [b, s, hidden] for x [b, s, hidden]. With `cu_seqlens`, tokens attend only within their document."""
        q, k, v = (projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.query, self.key, self.value))
        q, k = self.rotary(self.query_norm(q), self.key_norm(k), positions)
        context = self.core(q, k, v, cu_seqlens=cu_seqlens)
        output: Tensor = self.output(context.flatten(-2))
        return output


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn_hidden, bias=False)
        self.up = nn.Linear(hidden, ffn_hidden, bias=False)
        self.down = nn.Linear(ffn_hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [b, s, hidden] for x [b, s, hidden]."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Rotary(nn.Module):
    """Applies rotary position embeddings (RoPE). Rotates each pair, channel i of the first half and channel i of the second
    half, by the angle position / theta^(2 i / head_dim). `scaling` changes the frequencies 1 / theta^(2 i / head_dim).
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        # The device is explicit, since blocks are built with meta as the default device.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = 1.0 / theta**exponents
        if scaling is not None:
            frequencies = scale_frequencies(frequencies, scaling)
        self.cache_key = head_dim, theta, scaling
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the rotated q and k, in their shapes and dtypes. q, k: [b, s, heads, d]. positions: [b, s] integers, or None
        to count each row from 0.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        if positions is None:
            cos, sin = self._compute_tables(torch.arange(q.shape[1], device=q.device, dtype=dtype)[None], dtype)
        else:  # all blocks of a forward share the tables
            compute_tables = partial(self._compute_tables, positions, dtype)
            cos, sin = once_per_field(positions, ("rotary", dtype, *self.cache_key), compute_tables)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def _compute_tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines, [b, s, 1, d] of `dtype`. The sines in the first half of the channels are negated."""
        angles = (positions[:, :, None].to(dtype) * self.frequencies.to(dtype))[:, :, None]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Returns `frequencies` scaled as in Llama 3.1: divides low frequencies by `scaling.factor`, keeps high frequencies, and
    interpolates in between. The number of rotations within the original context determines whether a frequency is low or high.
    """
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    weight = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    weight = weight.clamp(0, 1)
    return weight * frequencies + (1 - weight) * frequencies / scaling.factor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the rotated x [b, s, heads, d], in its dtype. Rotates all channels at once, which launches a third fewer kernels
    than rotating the halves separately. Kernel launches limit the speed of small models.
    """
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)
