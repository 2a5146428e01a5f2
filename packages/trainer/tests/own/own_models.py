"""Small models of one's own, each with one peculiarity that an engine must bear or refuse."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_core.model.layers import Model
from sley_testing.habits import Embed, HookedWeights, init

Named = list[tuple[str, nn.Module]]
HIDDEN = 8


class Block(nn.Module):
    """A residual block; with `dropout` every use of it draws a mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(F.gelu(self.inner(self.norm(hidden))))


class Positions(Block):
    """Adds the sum of two tables, whose gradients autograd makes in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(0.1 * torch.randn(12, HIDDEN)) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + (self.first[None] + self.second[None]))


class Counted(Block):
    """Says in each row how many tokens it got."""

    def attach_to_run(self, parts: Any) -> None:
        self.num_tokens = 0
        parts.numbers.add("own/correct", self._taken)

    def _taken(self) -> int:
        num_tokens, self.num_tokens = self.num_tokens, 0
        return num_tokens

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_tokens += hidden[..., 0].numel()
        return super().forward(hidden)


class Head(nn.Linear):
    """With a forward of its own: torch compiles none of torch's."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


def around(blocks: list[nn.Module], data: DataInfo, **options: Any) -> Named:
    """Blocks between an embedding, which `options` are for, and a head."""
    assert data.vocab_size is not None
    named = [(f"blocks.{at}", block) for at, block in enumerate(blocks)]
    return [("embed", Embed(data.vocab_size, HIDDEN, **options)), *named, ("head", Head(HIDDEN, data.vocab_size))]


def model(data: DataInfo, kind: str, num_blocks: int = 1, **options: Any) -> Named:
    """Blocks of a class of this module."""
    return around([globals()[kind](**options) for _ in range(num_blocks)], data)


def plain(data: DataInfo, num_blocks: int = 4, dropout: float = 0.0) -> Named:
    """Nothing peculiar, or dropout in every block."""
    return around([Block(dropout) for _ in range(num_blocks)], data)


def pretrained(data: DataInfo, dropout: float) -> Named:
    """In evaluation mode, as `from_pretrained` leaves it."""
    return [(name, module.eval()) for name, module in plain(data, dropout=dropout)]


class Keeper(nn.Module):
    """Gives out the mask that its dropout drew: ones scaled by 1 / (1 - p), or zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.masks: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        mask = self.dropout(torch.ones_like(hidden))
        self.masks.append(mask.detach().clone())
        return hidden * mask


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


def batch_norm(data: DataInfo, declared: bool = False) -> Model:
    """A running mean, which training writes."""
    patterns = ("*.running_mean", "*.running_var", "*.num_batches_tracked") if declared else ()
    return Model(around([Normalised()], data), per_rank_buffers=patterns)


class Poisoned(nn.Module):
    """Divides zero by zero where a row starts with `token`."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        bad = (tokens[:, :1, None] == self.token).to(hidden.dtype)
        return hidden + bad * 0 / (1 - bad)


def poisoned(data: DataInfo, token: int) -> Named:
    """The loss of a sample that starts with `token` is NaN."""
    return around([Block(), Poisoned(token)], data)


def embedding(data: DataInfo, **options: Any) -> Named:
    """An embedding with these options, such as `sparse`: its gradient holds the rows that were used, and no others."""
    return around([Block()], data, **options)


class Pair(NamedTuple):
    logits: Tensor
    negative: Tensor


class Giving(nn.Linear):
    """Gives out its logits in a container, with more of another kind."""

    def __init__(self, classes: int, what: str) -> None:
        super().__init__(HIDDEN, classes)
        self.what = what

    def forward(self, hidden: Tensor) -> object:
        logits = super().forward(hidden)
        if self.what == "number":
            return logits, 3
        if self.what == "scalar":
            return logits, logits.mean()
        return Pair(logits, -logits) if self.what == "named" else [logits, -logits]


def giving(data: DataInfo, what: str) -> Named:
    """Its last layer gives out more than logits."""
    return [*plain(data)[:-1], ("head", Giving(data.vocab_size or 0, what))]


FORMATS = {"table": torch.float32, "narrow": torch.float16, "quantized": torch.float8_e4m3fn, "counts": torch.int8}


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, HIDDEN)
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        for name, dtype in FORMATS.items():
            self.register_buffer(name, torch.linspace(-1, 1, HIDDEN).to(dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        assert {name: getattr(self, name).dtype for name in FORMATS} == FORMATS
        weights = self.router(hidden.float()).softmax(-1)
        made: Tensor = hidden + self.inner(hidden + self.table.to(hidden.dtype)) * weights.to(hidden.dtype)
        return made


class Momentum(nn.Module):
    """Follows its linear by a frozen copy, written in the given way in each forward in training."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.slow = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)
        self.way = way

    @torch.no_grad()
    def follow(self) -> None:
        fast, slow = self.inner.weight, self.slow.weight
        match self.way:
            case "in place":
                slow.lerp_(fast, 0.5)
            case "data":
                slow.data.mul_(0.5).add_(fast.data, alpha=0.5)
            case "new data":
                slow.data = slow.data * 0.5 + fast.data * 0.5
            case "trained":
                fast.clamp_(-0.2, 0.2)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.follow()
        return hidden + (self.inner(hidden) - 0.5 * self.slow(hidden)).tanh()


class LateWrites(nn.Module):
    """Writes its buffer from the third step of two microbatches on, in the given way."""

    count: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.way = way

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            match self.way:
                case "in place":
                    self.count += 1
                case "new":
                    self.count = self.count + 1
                case "data":
                    self.count.data += 1
        return hidden


class Before(nn.Module):
    """Hooks on a parameter before a module has it, and on the one that was given, afterwards."""

    def __init__(self) -> None:
        super().__init__()
        one, two = nn.Parameter(torch.eye(HIDDEN)), nn.Parameter(torch.eye(HIDDEN))
        one.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        self.one, self.two = one, two
        two.register_hook(lambda gradient: gradient * 2)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.linear(F.linear(hidden, self.one).tanh(), self.two)


class OfModules(HookedWeights):
    """Hooks of modules, which see gradients on their way."""

    def __init__(self) -> None:
        super().__init__(HIDDEN)
        self.one.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * 2,))
        self.two.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.two.register_full_backward_pre_hook(lambda module, of_output: (of_output[0] * 0.5,))


class Accumulated(HookedWeights):
    """A hook that is called when autograd has summed a gradient."""

    def __init__(self) -> None:
        super().__init__(HIDDEN)
        self.one.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def hooked(data: DataInfo, kind: str) -> Model:
    """A block whose constructor sets hooks on the gradients of parameters."""
    return Model(model(data, kind), init)
