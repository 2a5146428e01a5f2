"""Builds a model from its description, with patterns of user code: `[model] factory = "drawn_model:model"`.

    {"width": 4, "layers": [{"body": "feed", "take": "tensor", "give": "tuple", ...}, ...], "ties": [["a.weight", "b.weight"]],
     "shared": [...], "frozen": ["blocks.0.*"]}

A body computes `body(hidden, tokens)`. A form packs `hidden`, and in some forms a second tensor, into the output of a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sley_core.api.model import Attention
from sley_core.data.dataset import DataContext, DataInfo, Field

VOCABULARY, LENGTH, ROWS = 7, 4, 64

FIELDS = {"tokens": Field("int64", sequence_dim=1, ids="token"), "labels": Field("int64", sequence_dim=1, ids="label")}
Named = list[tuple[str, nn.Module]]
Make = Callable[[int], dict[str, Any]]
Run = Callable[[Any, Tensor, "Tensor | None"], Tensor]

# -- bodies ------------------------------------------------------------------------------------------------------------


class Body(nn.Module):
    """Has the modules that `make(width)` returns, and computes `run(self, hidden, tokens)`."""

    def __init__(self, width: int, make: Make, run: Run) -> None:
        super().__init__()
        for name, module in make(width).items():
            self.add_module(name, module)
        self.run = run

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.run(self, hidden, tokens)


def _linears(*names: str) -> Make:
    return lambda width: {name: nn.Linear(width, width) for name in names}


def _feed(width: int) -> dict[str, nn.Module]:
    up, down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)
    return {"norm": nn.LayerNorm(width), "up": up, "down": down}


def _residual(body: Any, hidden: Tensor, tokens: Tensor | None) -> Tensor:
    return hidden + body.down(F.gelu(body.up(body.norm(hidden))))


def _sequential(width: int) -> dict[str, nn.Module]:
    """Torch's own recipe, with its activation in place."""
    up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    return {"inner": nn.Sequential(nn.RMSNorm(width), up, nn.ReLU(inplace=True), down)}


def _adds(body: Any, hidden: Tensor, tokens: Tensor | None) -> Tensor:
    out = body.one(hidden)
    out += hidden
    out = body.two(F.silu(out))
    out.mul_(0.5)
    out[..., 0] += 1.0
    return out


def _begins(body: Any, hidden: Tensor, tokens: Tensor | None) -> Tensor:
    """Writes on its input."""
    hidden *= 0.75
    return body.inner(F.leaky_relu_(hidden, 0.1))


def _attention(width: int) -> dict[str, nn.Module]:
    return {"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width), "attend": Attention()}


def _mixes(body: Any, hidden: Tensor, tokens: Tensor | None) -> Tensor:
    """Attention written out."""
    q, k, v = body.qkv(hidden).chunk(3, -1)
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return hidden + body.out((q @ k.transpose(-1, -2)).masked_fill(future, -torch.inf).softmax(-1) @ v)


def _attends(body: Any, hidden: Tensor, tokens: Tensor | None) -> Tensor:
    """Attention by the module that sequence parallelism knows."""
    q, k, v = (part.unflatten(-1, (2, -1)) for part in body.qkv(hidden).chunk(3, -1))
    return hidden + body.out(body.attend(q, k, v).flatten(-2))


def _adapter(width: int) -> dict[str, nn.Module]:
    """Returns a frozen linear layer and a trained low-rank pair, which is zero at first."""
    down, up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
    nn.init.zeros_(up.weight)
    return {"base": nn.Linear(width, width).requires_grad_(False), "down": down, "up": up}


def _half_frozen(width: int) -> dict[str, nn.Module]:
    modules = TWO(width)
    modules["one"].weight.requires_grad_(False)
    modules["two"].bias.requires_grad_(False)
    return modules


def _counts(body: Any, hidden: Tensor, tokens: Tensor | None) -> Tensor:
    """Calls a linear layer a number of times that depends on the data."""
    for _ in range(1 + int(tokens[0, 0]) % 3):  # type: ignore[index]
        hidden = hidden + body.inner(hidden).tanh()
    return hidden


def _chooses(body: Any, hidden: Tensor, tokens: Tensor | None) -> Tensor:
    """Calls one of two linear layers, or none."""
    choice = int(tokens[0, -1]) % 3  # type: ignore[index]
    return hidden if choice == 0 else body.one(hidden) if choice == 1 else hidden - body.two(hidden)


def _normed(width: int) -> dict[str, nn.Module]:
    return {"inner": nn.utils.parametrizations.weight_norm(nn.Linear(width, width))}


class Scales(nn.Module):
    """Has parameters and buffers outside of other modules; one buffer is not saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(1, width))
        self.turn = nn.Parameter(torch.eye(width).roll(1, 0))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("base", torch.full((width,), 0.25), persistent=False)
        nn.init.ones_(self.gain)
        nn.init.constant_(self.shift, 0.125)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return (hidden @ self.turn) * (self.gain * self.scale) + self.shift + self.base


LINEAR, TWO = _linears("inner"), _linears("one", "two")
KINDS: dict[str, tuple[Make, Run]] = {
    "linear": (LINEAR, lambda b, h, t: b.inner(h)),
    "feed": (_feed, _residual),
    "sequential": (_sequential, lambda b, h, t: b.inner(h)),
    "adds": (TWO, _adds),
    "begins": (LINEAR, _begins),
    "twice": (LINEAR, lambda b, h, t: b.inner(b.inner(h).tanh())),
    "checkpoints": (_feed, lambda b, h, t: checkpoint(_residual, b, h, t, use_reentrant=False)),
    "adapts": (_adapter, lambda b, h, t: b.base(h) + 4 * b.up(b.down(h))),
    "half_frozen": (_half_frozen, lambda b, h, t: b.two(b.one(h).tanh())),
    "reads": (LINEAR, lambda b, h, t: F.linear(b.inner(h).tanh(), b.inner.weight.t()) / 2),
    "detaches": (LINEAR, lambda b, h, t: h + b.inner(h.detach())),
    "broadcasts": (LINEAR, lambda b, h, t: b.inner(h).sum(-1, keepdim=True).expand_as(h) / 4 + h),
    "unused": (TWO, lambda b, h, t: (b.two(h), b.two(h))[0]),
    "normed": (_normed, lambda b, h, t: b.inner(h)),
    "attends": (_attention, _attends),
    "mixes": (_attention, _mixes),
    "recurs": (lambda width: {"inner": nn.GRU(width, width, batch_first=True)}, lambda b, h, t: b.inner(h)[0] + h),
    "viewed": (lambda width: {}, lambda b, h, t: h.transpose(0, 1).flatten(0, 1).unflatten(0, h.shape[1::-1]).transpose(0, 1)),
    "counts": (LINEAR, _counts),
    "chooses": (TWO, _chooses),
}
BODIES = (*KINDS, "scales")
BY_POSITION = tuple(name for name in BODIES if name not in ("mixes", "recurs", "viewed", "counts", "chooses"))
"""Bodies that compute the same for a slice of a sequence as for the full sequence."""

BY_DATA = frozenset({"counts", "chooses"})
"""Bodies whose computation depends on the tokens."""

MAY_BE_CHANGED = {*BODIES} - {"adds", "begins", "viewed", "recurs", "checkpoints", "reads", "counts", "chooses"}
"""Bodies whose output is new memory that no backward reads, so that the next layer may write to it."""


def body_of(kind: str, width: int) -> nn.Module:
    return Scales(width) if kind == "scales" else Body(width, *KINDS[kind])


# -- forms -------------------------------------------------------------------------------------------------------------

Pair = tuple[Tensor, Tensor | None]


class State(NamedTuple):
    hidden: Tensor
    carried: Tensor
    nothing: None = None


@dataclass
class Record:
    hidden: Tensor
    carried: Tensor


@dataclass(frozen=True)
class Form:
    """pack: makes a layer's output of `hidden` and a second tensor; unpack: returns both, or None for the second, of a state
    and the tokens. carries: whether it needs the second. views: whether its parts are several views of one memory.
    """

    pack: Callable[[Tensor, Tensor], Any]
    unpack: Callable[[Any, Tensor | None], Pair]
    carries: bool = False
    views: bool = False


def _halves(hidden: Tensor, carried: Tensor) -> Any:
    wide = torch.cat([hidden, carried], -1)
    return wide[..., : hidden.shape[-1]], wide[..., hidden.shape[-1] :]


def _many(hidden: Tensor, carried: Tensor) -> list[Tensor]:
    """Returns more tensors than a short message can describe."""
    return [hidden / 16 for _ in range(12)] + [hidden * share for share in (1 / 32, 1 / 16, 1 / 16, 3 / 32)] * 5


def _masked(hidden: Tensor, carried: Tensor) -> dict[str, Any]:
    return {"mask": hidden.detach() > 0, "hidden": hidden, "count": torch.tensor(3), "none": None}


FORMS: dict[str, Form] = {
    "tensor": Form(lambda h, c: h, lambda s, t: (s, None)),
    "tuple": Form(lambda h, c: (h, c), lambda s, t: (s[0], s[1]), carries=True),
    "list": Form(lambda h, c: [c, None, h], lambda s, t: (s[2], s[0]), carries=True),
    "nested": Form(
        lambda h, c: {"a": (h, [c, None]), "b": {"again": h, "n": None}},
        lambda s, t: (s["a"][0] / 2 + s["b"]["again"] / 2, s["a"][1][0]),
        carries=True,
    ),
    "named": Form(State, lambda s, t: (s.hidden, s.carried), carries=True),
    "record": Form(Record, lambda s, t: (s.hidden, s.carried), carries=True),
    "masked": Form(_masked, lambda s, t: (torch.where(s["mask"], s["hidden"], s["hidden"] / s["count"]), None)),
    "scaled": Form(lambda h, c: (h, 1 + h.square().mean().tanh() / 8), lambda s, t: (s[0] * s[1], None)),
    "empty": Form(lambda h, c: (h[:0], h), lambda s, t: (s[1] + s[0].sum(), None)),
    "twice": Form(lambda h, c: (h, h), lambda s, t: (s[0] * 0.5 + s[1].sin(), None), views=True),
    "halves": Form(_halves, lambda s, t: (s[0], s[1]), carries=True, views=True),
    "unbound": Form(lambda h, c: h.unbind(-1), lambda s, t: (torch.stack(s, -1), None), views=True),
    "expanded": Form(lambda h, c: h[None].expand(3, *h.shape), lambda s, t: (s.sum(0) / 3, None), views=True),
    "flat": Form(lambda h, c: h.flatten(0, 1), lambda s, t: (s.view(*t.shape, -1), None)),
    "strided": Form(
        lambda h, c: torch.stack([h, c], -1).flatten(-2)[..., ::2], lambda s, t: (s, None), carries=True, views=True
    ),
    "detached": Form(lambda h, c: (h, h.detach()), lambda s, t: (s[0] + s[1] / 4, None)),
    "unused": Form(lambda h, c: (h, c, c * 2), lambda s, t: (s[0], None), carries=True),
    "many": Form(_many, lambda s, t: (torch.stack([s[0], *s[1:]]).sum(0), None)),
}
NEEDS_TOKENS = frozenset({"flat"})
"""Forms whose receiver must know the shape of the tokens."""

MIXES_POSITIONS = frozenset({"scaled"})
"""Forms for which slices of a sequence would give other numbers."""

# -- model -------------------------------------------------------------------------------------------------------------


class Embed(nn.Module):
    """Returns embeddings of tokens in the form `give`."""

    def __init__(self, width: int, give: str, padding: bool, positions: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width, padding_idx=2 if padding else None)
        self.places = nn.Embedding(16, width) if positions else None
        self.give = FORMS[give]

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Any:
        hidden = self.table(tokens)
        if self.places is not None:
            hidden = hidden + self.places(torch.arange(tokens.shape[1]) if positions is None else positions)
        return self.give.pack(hidden, hidden.sin())


class Layer(nn.Module):
    """Unpacks its input in one form, computes, and packs its output in another.

    carry: the second tensor of the output, which is that of the input ("kept"), the input ("input"), a new tensor ("made"),
        or a parameter ("sent").
    """

    def __init__(self, width: int, body: str, take: str, give: str, carry: str, start: str) -> None:
        super().__init__()
        self.body = body_of(body, width)
        self.take, self.give, self.carry = FORMS[take], FORMS[give], carry
        self.sent = nn.Parameter(torch.empty(width)) if carry == "sent" and self.give.carries else None
        self.reset_parameters()
        begin(self.body, start)

    def reset_parameters(self) -> None:
        if self.sent is not None:
            nn.init.constant_(self.sent, 0.5)

    def forward(self, state: Any) -> Any:
        return self.run(state, None)

    def run(self, state: Any, tokens: Tensor | None) -> Any:
        hidden, carried = self.take.unpack(state, tokens)
        if carried is not None and not (self.give.carries and self.carry == "kept"):
            hidden = hidden + carried / 4
        kept = hidden if carried is None else carried
        out = self.body(hidden, tokens)
        if not self.give.carries:
            return self.give.pack(out, out)
        carried = {"kept": kept, "input": hidden, "made": out.cos(), "sent": self.sent}[self.carry]
        return self.give.pack(out, carried.expand_as(out) if self.give.views else carried)


class Reader(Layer):
    """A layer that also reads the tokens."""

    def forward(self, state: Any, tokens: Tensor) -> Any:
        return self.run(state, tokens)


class Head(nn.Module):
    def __init__(self, width: int, take: str, bias: bool) -> None:
        super().__init__()
        self.scores = nn.Linear(width, VOCABULARY, bias=bias)
        self.take = FORMS[take]

    def forward(self, state: Any) -> Any:
        hidden, carried = self.take.unpack(state, None)
        return self.scores(hidden if carried is None else hidden + carried / 4)


def begin(body: nn.Module, start: str) -> None:
    """Initializes a body in one of the ways of user code; "" keeps torch's values."""
    linears = [module for module in body.modules() if type(module) is nn.Linear]
    if start == "zeros" and linears:
        nn.init.zeros_(linears[-1].weight)
    elif start == "data" and linears:
        linears[0].weight.data.copy_(torch.eye(*linears[0].weight.shape))
    elif start in ("loaded", "assigned"):
        known = {key: torch.linspace(-0.5, 0.5, value.numel()).view_as(value) for key, value in body.state_dict().items()}
        body.load_state_dict(known, assign=start == "assigned")
    elif start == "applied":
        body.apply(_small_weights)


def _small_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.125)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def model(
    width: int,
    layers: list[dict[str, Any]],
    embed: dict[str, Any],
    head: dict[str, Any],
    ties: list[list[str]],
    shared: list[list[int]],
    frozen: list[str],
) -> Named:
    """Returns the layers: embed, blocks.0, ..., head.

    ties: lists of parameter names; each parameter becomes the first of its list. shared: lists of layer numbers, whose bodies
    become that of the first.
    """
    made: Named = [("embed", Embed(width, **embed))]
    for at, layer in enumerate(layers):
        reads = layer["body"] in BY_DATA or layer["take"] in NEEDS_TOKENS
        made.append((f"blocks.{at}", (Reader if reads else Layer)(width, **layer)))
    made.append(("head", Head(width, **head)))
    modules = dict(made)
    for first, *others in shared:
        for other in others:
            modules[f"blocks.{other}"].body = modules[f"blocks.{first}"].body
    for first, *others in ties:
        parameter = _owner(modules, first)[0].get_parameter(_owner(modules, first)[1])
        for other in others:
            owner, attribute = _owner(modules, other)
            setattr(owner, attribute, parameter)
    for name, module in made:
        for path, parameter in module.named_parameters(name):
            if any(fnmatchcase(path, pattern) for pattern in frozen):
                parameter.requires_grad_(False)
    return made


def _owner(modules: dict[str, nn.Module], path: str) -> tuple[nn.Module, str]:
    layer = max((name for name in modules if path.startswith(f"{name}.")), key=len)
    *inner, attribute = path[len(layer) + 1 :].split(".")
    return modules[layer].get_submodule(".".join(inner)), attribute


# -- data and loss -----------------------------------------------------------------------------------------------------


def sample(key: int, length: int) -> dict[str, Tensor]:
    """Returns tokens and labels. Some labels are ignored; in every eighth sample all but the first."""
    generator = torch.Generator().manual_seed(key)
    tokens = torch.randint(VOCABULARY, (length,), generator=generator)
    labels = (tokens + torch.randint(1, VOCABULARY, (length,), generator=generator)) % VOCABULARY
    ignored = torch.rand(length, generator=generator) < (1.0 if key % 8 == 0 else 0.25)
    ignored[0] = False
    return {"tokens": tokens, "labels": labels.masked_fill(ignored, -100)}


def batch(keys: list[int], length: int) -> dict[str, Tensor]:
    rows = [sample(key, length) for key in keys]
    return {name: torch.stack([row[name] for row in rows]) for name in FIELDS}


class Rows:
    """The dataset of the plans. Programs pass other batches to steps."""

    info = DataInfo(FIELDS, VOCABULARY, LENGTH)

    def __init__(self, context: DataContext) -> None:
        pass

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(index, LENGTH)


class Squares:
    """A user's loss: the squared distance to the one-hot vectors of the labels."""

    fields = ("labels",)

    def weight(self, batch: Any) -> float:
        return float((batch["labels"] >= 0).sum())

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        labels = batch["labels"]
        target = F.one_hot(labels.clamp(min=0), VOCABULARY).to(output.dtype)
        return ((output - target).square().sum(-1) * (labels >= 0)).sum()
