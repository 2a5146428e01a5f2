"""The plain PyTorch loop of gpu.py, and its Llama with low-rank adapters. Neither uses Sley's engine."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_core.model.layers import Model
from sley_models.llama import build_llama
from sley_models.plugin import LlamaConfig

LR = 1e-4
CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)


class PlainLoop:
    """Trains layers with fused AdamW and clipping. The optimizer updates fp32 copies of bf16 weights.

    layers: are called in order with the output of the previous layer; the first gets the tokens. micro_size: the number of
    samples per backward. is_compiled: whether torch.compile compiles each layer and the loss.
    """

    def __init__(self, layers: Sequence[nn.Module], micro_size: int, *, is_compiled: bool) -> None:
        self.layers = layers
        self.micro_size = micro_size
        self.compute_loss = torch.compile(sum_loss) if is_compiled else sum_loss
        self.forwards: list[Callable[..., Any]] = [torch.compile(layer) if is_compiled else layer for layer in layers]
        weights = dict.fromkeys(parameter for layer in layers for parameter in layer.parameters())
        self.weights = [weight for weight in weights if weight.requires_grad]
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        groups = [
            {"params": [master for master in self.masters if master.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [master for master in self.masters if master.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, betas=BETAS, fused=True)
        self.device = self.weights[0].device

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Takes one optimizer step on `batch`, tokens and labels [b, s] on the host, and returns the mean loss."""
        tokens, labels = (batch[name].to(self.device, non_blocking=True) for name in ("tokens", "labels"))
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        parts = zip(torch.split(tokens, self.micro_size), torch.split(labels, self.micro_size), strict=True)
        for rows in parts:
            output = rows[0]
            for forward in self.forwards:
                output = forward(output)
            loss = self.compute_loss(output, rows[1]) / labels.numel()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            self._add_gradients()
        nn.utils.clip_grad_norm_(self.masters, CLIP_NORM)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*self.weights], [*self.masters])
        return total.item()

    def _add_gradients(self) -> None:
        """Adds the gradients of a microbatch to the fp32 sums."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None


def sum_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of the cross-entropies of logits [b, s, v] and labels [b, s] in fp32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")


class LowRankLinear(nn.Module):
    """A frozen linear with a trained low-rank update (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns base(x) + B A x."""
        output: Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return output


def adapted_llama(data: DataInfo, rank: int = 8, **sizes: Any) -> Model:
    """Returns a frozen `models.llama` of `sizes`, with adapters at every linear of its blocks."""
    model = build_llama(LlamaConfig(**sizes), data)
    for layer in model.layers:
        assert layer.builder is not None
        layer.builder = partial(_build_adapted, layer.builder, rank if layer.name.startswith("blocks") else 0)
    model.init_weights = _fill_with_noise
    return model


def _build_adapted(build: Callable[[], nn.Module], rank: int) -> nn.Module:
    """Returns the module of `build` on meta, frozen, with adapters of `rank` if it is not 0."""
    layer = build().requires_grad_(False)
    linears = [(path, module) for path, module in layer.named_modules() if isinstance(module, nn.Linear)]
    for path, linear in linears if rank else ():
        with torch.device("meta"):
            layer.set_submodule(path, LowRankLinear(linear, rank))
    return layer


def _fill_with_noise(module: nn.Module, name: str) -> None:
    """Fills the weight of `module` with repeated random numbers: to draw 8 billion would take the host a minute."""
    if isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)
    elif name.endswith(".lora_b"):
        nn.init.zeros_(module.weight)  # type: ignore[arg-type]
    elif isinstance(module, nn.Linear | nn.Embedding):
        noise = 0.02 * torch.randn(1 << 16)
        numel = module.weight.numel()
        module.weight.data.copy_(noise.repeat(ceil(numel / len(noise)))[:numel].view_as(module.weight))
