"""Builds small models with unusual code, such as writes to outputs in place. A plan selects one by `options.habit`.

A package that replaces linears can compare a run of each of the `HABITS` with a plain loop
(`runs.assert_matches_plain_loop`). The factory is `sley_testing.habits:model`.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from sley_core.data.dataset import DataInfo
from sley_core.model.layers import Model


class Block(nn.Module):
    """The base class of most habits. It has two linears, of which only `one` has a bias. Subclasses implement `forward`."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.one = nn.Linear(hidden, hidden)
        self.two = nn.Linear(hidden, hidden, bias=False)


class InPlace(Block):
    """Writes in place to the outputs of linears with 2-d and 3-d inputs, with and without a bias."""

    def forward(self, hidden: Tensor) -> Any:
        result = self.one(hidden)
        result += hidden
        result = F.relu_(self.two(result))
        flat = F.silu(self.one(result.flatten(0, 1)), inplace=True)
        return nn.Sequential(self.two, nn.ReLU(inplace=True), self.one)(hidden).add_(flat.view_as(hidden))


class Adaptive(Block):
    """Applies its linears one to three times. The first token of the batch determines how often."""

    def depth(self, tokens: Tensor) -> int:
        """Returns how often to apply the linears: 1 to 3 times."""
        return 1 + int(tokens[0, 0]) // 4 % 3

    def forward(self, hidden: Tensor, tokens: Tensor) -> Any:
        for _ in range(self.depth(tokens)):
            hidden = hidden + self.two(self.one(hidden).tanh())
        return hidden


class AdaptiveAgain(Adaptive):
    """Repeats linears like `Adaptive`, but under reentrant checkpointing."""

    def forward(self, hidden: Tensor, tokens: Tensor) -> Any:
        for _ in range(self.depth(tokens)):
            hidden = hidden + checkpoint(lambda h: self.two(self.one(h).tanh()), hidden, use_reentrant=True)
        return hidden


class Normed(nn.Module):
    """Uses linears with weight norm. Each forward computes their weights from other parameters."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.one = nn.utils.weight_norm(nn.Linear(hidden, hidden))
        self.two = nn.utils.parametrizations.weight_norm(nn.Linear(hidden, hidden, bias=False))

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.two(self.one(hidden).tanh())


class Frozen(Block):
    """Adds a low-rank update to frozen linears."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.down = nn.Linear(hidden, 2, bias=False)
        self.up = nn.Linear(2, hidden, bias=False)
        self.one.requires_grad_(False)
        self.two.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.two(self.one(hidden).tanh()) + self.up(self.down(hidden))


class GradientInForward(Block):
    """Computes in its forward an input gradient, which must not contribute to weight gradients."""

    def forward(self, hidden: Tensor) -> Any:
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            (step,) = torch.autograd.grad(self.two(self.one(leaf).tanh()).square().sum(), leaf)
        return hidden + self.two(self.one(hidden - 0.1 * step).tanh())


class Penalty(Block):
    """Computes two gradients in its forward: one with a graph, and a weight gradient that is a constant."""

    def forward(self, hidden: Tensor) -> Any:
        leaf = hidden.detach().requires_grad_()
        energy = self.two(self.one(leaf).tanh()).square().sum()
        (force,) = torch.autograd.grad(energy, leaf, create_graph=True)
        (weight_gradient,) = torch.autograd.grad(energy, self.two.weight, retain_graph=True)
        return hidden + force + weight_gradient.sum(0)


class Swapped(Block):
    """Calls a linear with the weight of another linear."""

    def forward(self, hidden: Tensor) -> Any:
        parameters = {"weight": self.two.weight * 2, "bias": self.one.bias}
        return hidden + torch.func.functional_call(self.one, parameters, (hidden,)) + self.two(hidden).tanh()


class Mapped(Block):
    """Calls linears under `torch.func.vmap` and under forward-mode differentiation."""

    def forward(self, hidden: Tensor) -> Any:
        mapped = torch.func.vmap(lambda row: self.two(self.one(row).tanh()))(hidden)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(hidden, torch.ones_like(hidden))  # type: ignore[no-untyped-call]
            tangent = forward_ad.unpack_dual(self.one(dual)).tangent  # type: ignore[no-untyped-call]
        return hidden + mapped + tangent


class NoGradient(torch.autograd.Function):
    """Adds the sum of a weight to its input. Its backward returns no gradient for the weight."""

    @staticmethod
    def forward(_ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden + weight.sum()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Silent(Block):
    """Uses a weight through `NoGradient` only."""

    def forward(self, hidden: Tensor) -> Any:
        return NoGradient.apply(hidden, self.two.weight) + self.one(hidden).tanh()  # type: ignore[no-untyped-call]


class Hooked(Block):
    """Registers a tensor hook on the output of one linear, and a forward hook on the other linear."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.two.register_forward_hook(lambda module, args, result: result * 2)

    def forward(self, hidden: Tensor) -> Any:
        result = self.one(hidden)
        result.register_hook(lambda gradient: gradient * 2)
        return hidden + self.two(result.relu())


class HookedWeights(Block):
    """Clips, masks and scales the gradients of its weights and of a bias with tensor hooks."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        mask = torch.eye(hidden)
        one: Any = self.one
        two: Any = self.two
        one.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        one.bias.register_hook(lambda gradient: gradient * 3)
        two.weight.register_hook(lambda gradient: gradient * mask)
        two.weight.register_hook(lambda gradient: gradient * 0.1).remove()

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.two(self.one(hidden).tanh())


class Clamping(torch.autograd.Function):
    """Copies its input. Its backward clamps the output gradient in place."""

    @staticmethod
    def forward(_ctx: Any, hidden: Tensor) -> Tensor:
        return hidden * 1.0

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp_(-1e-3, 1e-3)


class WrittenGradients(Block):
    """Modifies in place the gradients that its linears also receive."""

    def forward(self, hidden: Tensor) -> Any:
        residual = hidden * 1.0
        residual.register_hook(lambda gradient: gradient.mul_(0.5))  # type: ignore[no-untyped-call]
        hidden = self.one(hidden) + residual
        second_residual = hidden * 1.0
        second_residual.register_hook(lambda gradient: gradient.data.mul_(0.5))  # type: ignore[no-untyped-call]
        hidden = self.two(hidden).flatten(0, 1) + second_residual.flatten(0, 1)
        clamped: Tensor = Clamping.apply(hidden)  # type: ignore[no-untyped-call]
        return (self.two(hidden) + clamped).view_as(residual)


class Fused(torch.autograd.Function):
    """Computes a linear whose backward adds to `weight.grad` itself, like fused kernels. in_place: whether it adds in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, linear: nn.Linear, in_place: bool) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.linear, ctx.in_place = linear, in_place
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (hidden,) = ctx.saved_tensors
        weight = ctx.linear.weight
        weight_gradient = gradient.flatten(0, -2).t() @ hidden.flatten(0, -2)
        if weight.grad is None:
            weight.grad = weight_gradient
        elif ctx.in_place:
            weight.grad.add_(weight_gradient)
        else:
            weight.grad = weight.grad + weight_gradient
        return gradient @ weight, None, None, None


class Assigned(Block):
    """Uses `Fused` with a weight in the graph, a detached weight, and a weight that also gets a gradient from autograd."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.three = nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Any:
        hidden = hidden + Fused.apply(hidden, self.two.weight, self.two, True).tanh()  # type: ignore[no-untyped-call]
        hidden = hidden + Fused.apply(hidden, self.three.weight.detach(), self.three, False).tanh()  # type: ignore[no-untyped-call]
        return hidden + Fused.apply(hidden, self.one.weight, self.one, False) + self.one(hidden).tanh()  # type: ignore[no-untyped-call]


_CLASSES: tuple[type[nn.Module], ...] = (  # the classes of `HABITS`
    InPlace,
    Adaptive,
    AdaptiveAgain,
    Normed,
    Frozen,
    GradientInForward,
    Penalty,
    Swapped,
    Mapped,
    Silent,
    Hooked,
    WrittenGradients,
)
HABITS: dict[str, Any] = {cls.__name__: cls for cls in _CLASSES}  # the habits by name; each class is called with the width

FULL_GRADIENT_HABITS: dict[str, Any] = {cls.__name__: cls for cls in (HookedWeights, Assigned)}
"""Habits that need full weight gradients. Runs with sharded weights refuse models with these habits."""


def init(module: nn.Module, name: str) -> None:
    """Initializes parameters with values that depend only on their names."""
    for key, parameter in module.named_parameters(recurse=False):
        generator = torch.Generator().manual_seed(sum(map(ord, f"{name}.{key}")))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)


class Embed(nn.Embedding):
    """An embedding whose input is named `tokens`, so that a run passes this field of the batch."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


def layers(data: DataInfo, habit: str, hidden: int = 8) -> list[tuple[str, nn.Module]]:
    """Returns an embedding, two blocks with the habit named `habit`, and a head, with their names."""
    assert data.vocab_size is not None
    cls = (HABITS | FULL_GRADIENT_HABITS)[habit]
    blocks = [(f"blocks.{index}", cls(hidden)) for index in range(2)]
    return [("embed", Embed(data.vocab_size, hidden)), *blocks, ("head", nn.Linear(hidden, data.vocab_size))]


def model(data: DataInfo, habit: str) -> Model:
    """Returns the model of `layers`, initialized by `init`."""
    return Model(layers(data, habit), init)
