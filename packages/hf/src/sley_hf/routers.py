"""The load-balancing loss of a mixture of experts, as transformers computes it, from sums that cross pipeline stages.

    E sum_e (c_e / n) (p_e / n)          Switch Transformer (Fedus et al. 2021), equations 4 to 6

E is the number of experts. n is the number of tokens of a microbatch, counted once for each layer with experts. Of these, c_e
is the number of tokens that have expert e among their k most likely experts, and p_e is the sum of the router's probabilities
of expert e. Each block adds its p to that of the earlier blocks and appends its c, and the head computes the loss. The loss is
linear in p. If ranks hold slices of sequences, each rank therefore uses its own p, and only the counts c are summed over ranks.

    block ──RoutedStates──> head ──BalancedLogits──> cross-entropy + coefficient x number of labels x loss
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from sley_core.api.comm import Group
from sley_core.api.model import cross_entropy_of_logits
from sley_core.api.parts import Parts
from sley_core.protocols import SplitLogits
from sley_hf.structure import ModuleNames, UnsupportedModelError


class RoutedStates(NamedTuple):
    """The output of a block in a model with experts. hidden: [b, s, hidden]. probabilities: the router probabilities, summed
    over tokens and over the layers up to this block, [E], at least fp32. counts: the number of tokens of each expert, for each
    of these layers that has experts, int64 [layers x E].
    """

    hidden: Tensor
    probabilities: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Routers:
    """Finds the routers of a model, and computes its load-balancing loss. top_k: the number of experts that a token uses.
    coefficient: the factor of the loss in training. recorder: transformers' description of the routers: their class, and the
    index of the logits [tokens, E] in their output.
    """

    num_experts: int
    top_k: int
    coefficient: float
    recorder: OutputRecorder

    def find_modules(self, layer: nn.Module) -> Iterator[nn.Module]:
        """Yields the routers in `layer`."""
        part = f".{self.recorder.layer_name}." if self.recorder.layer_name else ""
        for path, module in layer.named_modules():
            if isinstance(module, self.recorder.target_class) and part in f".{path}.":
                yield module

    def add_terms(self, hidden: Tensor, before: Any, logits: list[Tensor]) -> RoutedStates:
        """Returns `hidden` with the router statistics so far: the probabilities in `before` plus the probabilities of this
        block's routers, summed over tokens; and the counts in `before`, followed by the number of tokens of each expert for
        each router of this block. before: the output of the previous layer. logits: the logits [tokens, E] of each router.
        """
        probabilities, counts = [], []
        if isinstance(before, RoutedStates):
            probabilities, counts = [before.probabilities], [before.counts]
        for router_logits in logits:
            weights = router_logits.softmax(-1)
            probabilities.append(weights.sum(0, dtype=torch.promote_types(weights.dtype, torch.float32)))
            experts = weights.detach().topk(self.top_k, dim=-1).indices.flatten()
            zeros = torch.zeros(self.num_experts, dtype=torch.int64, device=experts.device)
            counts.append(zeros.scatter_add(0, experts, torch.ones_like(experts)))
        return RoutedStates(hidden, torch.stack(probabilities).sum(0), torch.cat(counts))

    def compute_loss(self, probabilities: Tensor, counts: Tensor) -> Tensor:
        """Returns the load-balancing loss without its coefficient. If `probabilities` [E] cover only some of the tokens,
        returns their share of the loss. counts: the number of all tokens per expert, [layers x E].
        """
        per_expert = counts.view(-1, self.num_experts).sum(0).to(probabilities.dtype)
        num_tokens = per_expert.sum() / self.top_k
        return (per_expert / num_tokens * (probabilities / num_tokens)).sum() * self.num_experts


def find_routers(causal: Any, structure: ModuleNames, coefficient: float | None) -> Routers:
    """Returns the routers of a transformers model. coefficient: the factor of the loss; None takes it from the model's config.
    Raises UnsupportedModelError if no layer has experts, or if transformers computes no load-balancing loss or a different one.
    """
    family = causal.config.model_type
    base = getattr(causal, structure.base)
    recorder = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits")
    function = getattr(sys.modules[type(causal).__module__], "load_balancing_loss_func", None)
    if coefficient is None:
        coefficient = getattr(causal, "router_aux_loss_coef", getattr(causal, "aux_loss_coef", None))
    if not isinstance(recorder, OutputRecorder) or function is None or coefficient is None:
        raise UnsupportedModelError(f"transformers computes no load-balancing loss for `{family}`")
    routers = Routers(causal.num_experts, causal.num_experts_per_tok, float(coefficient), recorder)
    if not _has_equal_loss(routers, function):
        raise UnsupportedModelError(f"the load-balancing loss of `{family}` differs from the loss of Mixtral")
    if not any(True for block in structure.list_blocks(causal) for _ in routers.find_modules(block)):
        raise UnsupportedModelError(f"no layer of this `{family}` has experts, so there is no load-balancing loss")
    return routers


def _has_equal_loss(routers: Routers, function: Any) -> bool:
    """Returns whether transformers' `function` and `routers` compute the same loss from random logits of two layers."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(7, routers.num_experts, generator=generator) for _ in range(2)]
    try:
        expected = function(tuple(logits), routers.num_experts, routers.top_k)
        _, *sums = routers.add_terms(logits[0], None, logits)
    except Exception:  # the function takes different arguments
        return False
    return torch.allclose(routers.compute_loss(*sums), expected, rtol=1e-4)


class LoadBalancingLoss:
    """Computes the load-balancing loss and its metrics. sp: the ranks with slices of one sequence; None before `attach`."""

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self.sp: Group | None = None
        self._sums: Tensor | float = 0.0
        self._num_microbatches = 0

    def attach(self, parts: Parts) -> None:
        """Adds three metrics to each row, each a mean over the step's microbatches. `experts/loss`: the load-balancing loss
        without its coefficient. `experts/max_load`, `experts/min_load`: the number of tokens of the most used and of the least
        used expert in any layer, divided by the mean over the layer's experts.
        """
        self.sp = parts.groups["sp"]
        parts.events.began.append(self._reset)
        for index, name in enumerate(("loss", "max_load", "min_load")):
            parts.numbers.add(f"experts/{name}", partial(self._mean_share, index, parts.topology.dp))

    def compute_loss(self, routed: RoutedStates, num_labels: Tensor) -> Tensor:
        """Returns this rank's term of the loss that training adds. The sum of the terms over `sp` is coefficient x
        load-balancing loss x number of labels. All ranks of `sp` must call it. routed: the output of the last block.
        num_labels: the number of this rank's labels that count, [].
        """
        *_, probabilities, counts = routed
        totals = torch.cat([counts, num_labels.view(1)])
        if self.sp is not None:
            self.sp.all_reduce(totals, label="the tokens of experts").wait()
        counts, num_labels = totals[:-1], totals[-1]
        loss = self.routers.compute_loss(probabilities, counts)
        if torch.is_grad_enabled():  # the loss of each source of a mixture is computed again without gradients
            per_layer = counts.view(-1, self.routers.num_experts).double()
            loads = per_layer / per_layer.mean(-1, keepdim=True) / (1 if self.sp is None else self.sp.size)
            self._sums = self._sums + torch.stack([loss.detach().double(), loads.amax(), loads.amin()])
            self._num_microbatches += 1
        return loss * num_labels * self.routers.coefficient

    def _reset(self) -> None:
        self._sums, self._num_microbatches = 0.0, 0

    def _mean_share(self, sum_index: int, num_replicas: int) -> Tensor | float:
        """Returns this rank's term of a metric; the sum over ranks is the mean over the microbatches of all replicas."""
        if not isinstance(self._sums, Tensor):
            return 0.0
        return self._sums[sum_index] / (self._num_microbatches * num_replicas)


class BalancedLogits(SplitLogits):
    """Logits whose cross-entropy includes the load-balancing loss of the microbatch. output: the logits [b, s, v]. routed: the
    output of the last block. balance: computes the load-balancing loss.
    """

    def __init__(self, output: Tensor | SplitLogits, routed: RoutedStates, balance: LoadBalancingLoss) -> None:
        self.output = output
        self.routed = routed
        self.balance = balance

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.output.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.output.dtype

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the cross-entropy summed over the `labels` [b, s] that count, plus the result of `balance.compute_loss`."""
        if isinstance(self.output, Tensor):
            total = cross_entropy_of_logits(self.output, labels, ignore_index, smoothing)
        else:
            total = self.output.cross_entropy(labels, ignore_index, smoothing)
        return total + self.balance.compute_loss(self.routed, (labels != ignore_index).sum())

    def logits(self) -> Tensor:
        return self.output.detach().clone() if isinstance(self.output, Tensor) else self.output.logits()
