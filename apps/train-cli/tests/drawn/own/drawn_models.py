"""A drawn model from its description: `[model] factory = "drawn_models:model"`, and what else such plans name.

The description is plain data, as a plan's `options` are:

    {"width": 4, "layers": [{"body": "feed", "take": "tensor", "give": "tuple", ...}, ...], "ties": [["a.weight", "b.weight"]],
     "shared": [...], "frozen": ["blocks.0.*"]}
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import drawn_catalogue
import drawn_forms
import torch
import torch.nn.functional as F
from drawn_catalogue import BY_DATA
from drawn_forms import NEEDS_TOKENS
from torch import Tensor, nn

from sley_core.data.dataset import DataContext, DataInfo, Field

VOCABULARY = 7
LENGTH = 4
FIELDS = {"tokens": Field("int64", sequence_dim=1, ids="token"), "labels": Field("int64", sequence_dim=1, ids="label")}

BODIES = drawn_catalogue.BODIES | drawn_catalogue.FAULTY
FORMS = drawn_forms.FORMS | drawn_forms.FAULTY

Named = list[tuple[str, nn.Module]]


class Embed(nn.Module):
    """Vectors of tokens, handed on in the form `give`."""

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
    """Takes in one form, computes, and hands on in another.

    carry: what the second tensor of its output is: what it got ("kept"), its input ("input"), new memory ("made"), or a
        parameter of its own ("sent").
    """

    def __init__(self, width: int, body: str, take: str, give: str, carry: str, start: str) -> None:
        super().__init__()
        self.body = BODIES[body](width)
        self.take, self.give, self.carry = FORMS[take], FORMS[give], carry
        self.sent = nn.Parameter(torch.empty(width)) if carry == "sent" and self.give.carries else None
        self.reset_parameters()
        begin(self.body, start)
        self.reset_parameters()

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
    """A layer that looks at the tokens, too."""

    def forward(self, state: Any, tokens: Tensor) -> Any:
        return self.run(state, tokens)


class Head(nn.Module):
    """Scores. aux: also returns the mean square of what it was given, for a loss that asks for it."""

    def __init__(self, width: int, take: str, bias: bool, aux: bool) -> None:
        super().__init__()
        self.scores = nn.Linear(width, VOCABULARY, bias=bias)
        self.take, self.aux = FORMS[take], aux

    def forward(self, state: Any) -> Any:
        return self.run(state, None)

    def run(self, state: Any, tokens: Tensor | None) -> Any:
        hidden, carried = self.take.unpack(state, tokens)
        hidden = hidden if carried is None else hidden + carried / 4
        scores = self.scores(hidden)
        return {"scores": scores, "size": hidden.square().mean(-1)} if self.aux else scores


class ReadingHead(Head):
    def forward(self, state: Any, tokens: Tensor) -> Any:
        return self.run(state, tokens)


def begin(body: nn.Module, start: str) -> None:
    """First values as people write them in a constructor; "" leaves torch's own."""
    linears = [module for module in body.modules() if type(module) is nn.Linear]
    if start == "zeros" and linears:
        nn.init.zeros_(linears[-1].weight)
    elif start == "constant":
        for linear in linears:
            nn.init.constant_(linear.weight, 0.0625)
    elif start == "data" and linears:
        linears[0].weight.data.copy_(torch.eye(*linears[0].weight.shape))
    elif start == "filled" and linears:
        with torch.no_grad():
            linears[-1].weight.fill_(0.03125)
    elif start == "normal" and linears:
        nn.init.uniform_(linears[0].weight, 0.25, 0.5)
    elif start == "loaded":
        known = {key: torch.linspace(-0.5, 0.5, value.numel()).view_as(value) for key, value in body.state_dict().items()}
        body.load_state_dict(known)
    elif start == "assigned":
        known = {key: torch.linspace(-0.5, 0.5, value.numel()).view_as(value) for key, value in body.state_dict().items()}
        body.load_state_dict(known, assign=True)
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
    """The layers that are described: embed, blocks.0, ..., head.

    ties: names of parameters, each list of one shape: all become the first. shared: places whose bodies become the first's.
    """
    for form in {head["take"], *(one["take"] for one in layers)} & drawn_forms.IMPORTS.keys():
        import_module(drawn_forms.IMPORTS[form])
    made: Named = [("embed", Embed(width, **embed))]
    for at, one in enumerate(layers):
        reads = one["body"] in BY_DATA or one["take"] in NEEDS_TOKENS
        made.append((f"blocks.{at}", (Reader if reads else Layer)(width, **one)))
    made.append(("head", (ReadingHead if head["take"] in NEEDS_TOKENS else Head)(width, **head)))
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


def sample(key: int, length: int) -> dict[str, Tensor]:
    """Tokens, and labels, none the token at its place, of which some count and others do not; in one sample of eight none."""
    generator = torch.Generator().manual_seed(key)
    tokens = torch.randint(VOCABULARY, (length,), generator=generator)
    labels = (tokens + torch.randint(1, VOCABULARY, (length,), generator=generator)) % VOCABULARY
    ignored = torch.rand(length, generator=generator) < (1.0 if key % 8 == 0 else 0.25)
    return {"tokens": tokens, "labels": labels.masked_fill(ignored, -100)}


def batch(keys: list[int], length: int) -> dict[str, Tensor]:
    rows = [sample(key, length) for key in keys]
    return {name: torch.stack([row[name] for row in rows]) for name in FIELDS}


ROWS = 64
HELD_OUT = 10**6
"""How many samples either split has, and the first key of the held-out ones."""


class Rows:
    """The data set of the plans; steps are given batches of their own, evaluations take theirs from here."""

    info = DataInfo(FIELDS, VOCABULARY, LENGTH)

    def __init__(self, context: DataContext) -> None:
        self.first = 0 if context.split == "train" else HELD_OUT

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(self.first + index, LENGTH)


class Squares:
    """An own loss: squared distance to the label's unit vector, over the labels that count."""

    fields = ("labels",)

    def weight(self, batch: Any) -> float:
        return float((batch["labels"] >= 0).sum())

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        labels = batch["labels"]
        target = F.one_hot(labels.clamp(min=0), VOCABULARY).to(output.dtype)
        return ((output - target).square().sum(-1) * (labels >= 0)).sum()


class WithSize(Squares):
    """Cross-entropy and a second term that the head carries along, from an output that is no tensor."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        scores, labels = output["scores"], batch["labels"]
        entropy = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        return entropy + 0.1 * (output["size"] * (labels >= 0)).sum()
