"""How a layer hands on what it made, and how the next one takes it: `hidden`, and a second tensor that some forms carry.

Each form is a pair of functions. `pack(hidden, carried)` makes a layer's output; `unpack(state, tokens)` gives back the
pair, with None where the form carries nothing. Both are used on either side of a stage's boundary or of none, and what
autograd makes of views, copies and repetitions among outputs is the form's own business: that is what is being tested.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor | None]


class State(NamedTuple):
    """As many models hand on what they have."""

    hidden: Tensor
    carried: Tensor
    nothing: None = None


@dataclass
class Record:
    hidden: Tensor
    carried: Tensor


@dataclass(frozen=True)
class Form:
    """carries: whether it needs a second tensor. views: whether its parts are several views of one memory."""

    pack: Callable[[Tensor, Tensor], Any]
    unpack: Callable[[Any, Tensor], Pair]
    carries: bool = False
    views: bool = False


def _output(hidden: Tensor, carried: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=hidden, hidden_states=(carried, hidden))


def _halves(hidden: Tensor, carried: Tensor) -> Any:
    """Views of one tensor, which no longer is anybody's when they are sent."""
    wide = torch.cat([hidden, carried], -1)
    return wide[..., : hidden.shape[-1]], wide[..., hidden.shape[-1] :]


def _of_many(state: list[Tensor], tokens: Tensor) -> Pair:
    return torch.stack([state[0], *state[1:]]).sum(0), None


def _many(hidden: Tensor, carried: Tensor) -> list[Tensor]:
    """More tensors than a short message can announce."""
    return [hidden / 16 for _ in range(12)] + [hidden * share for share in (1 / 32, 1 / 16, 1 / 16, 3 / 32)] * 5


def _masked(hidden: Tensor, carried: Tensor) -> dict[str, Any]:
    return {"mask": hidden.detach() > 0, "hidden": hidden, "count": torch.tensor(3), "none": None}


def _of_masked(state: dict[str, Any], tokens: Tensor) -> Pair:
    assert state["none"] is None
    assert not state["mask"].requires_grad
    return torch.where(state["mask"], state["hidden"], state["hidden"] / state["count"]), None


def _by_scale(state: tuple[Tensor, Tensor], tokens: Tensor) -> Pair:
    return state[0] * state[1], None


def _scaled(hidden: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """A scalar with a gradient beside a tensor."""
    return hidden, 1 + hidden.square().mean().tanh() / 8


FORMS: dict[str, Form] = {
    "tensor": Form(lambda h, c: h, lambda s, t: (s, None)),
    "tuple": Form(lambda h, c: (h, c), lambda s, t: (s[0], s[1]), carries=True),
    "turned": Form(lambda h, c: (c, h), lambda s, t: (s[1], s[0]), carries=True),
    "list": Form(lambda h, c: [c, None, h], lambda s, t: (s[2], s[0]), carries=True),
    "dict": Form(lambda h, c: {"h": h, "c": c}, lambda s, t: (s["h"], s["c"]), carries=True),
    "ordered": Form(
        lambda h, c: OrderedDict(second=c, first=h), lambda s, t: (s.copy().popitem(last=True)[1], s["second"]), carries=True
    ),
    "nested": Form(
        lambda h, c: {"a": (h, [c, None]), "b": {"again": h, "n": None}},
        lambda s, t: (s["a"][0] / 2 + s["b"]["again"] / 2, s["a"][1][0]),
        carries=True,
    ),
    "named": Form(State, lambda s, t: (s.hidden, s.carried), carries=True),
    "record": Form(Record, lambda s, t: (s.hidden, s.carried), carries=True),
    "output": Form(_output, lambda s, t: (s.last_hidden_state, s.hidden_states[0] + s.hidden_states[1]), carries=True),
    "number": Form(lambda h, c: (h, 2, True, "x"), lambda s, t: (s[0] * s[1], None)),
    "masked": Form(_masked, _of_masked),
    "scaled": Form(_scaled, _by_scale),
    "empty": Form(lambda h, c: (h[:0], h), lambda s, t: (s[1] + s[0].sum(), None)),
    "integers": Form(lambda h, c: (h, h.detach().argmax(-1)), lambda s, t: (s[0] + s[1][..., None] / 8, None)),
    "twice": Form(lambda h, c: (h, h), lambda s, t: (s[0] * 0.5 + s[1].sin(), None), views=True),
    "halves": Form(_halves, lambda s, t: (s[0], s[1]), carries=True, views=True),
    "chunks": Form(lambda h, c: h.chunk(2, -1), lambda s, t: (torch.cat(s, -1), None), views=True),
    "unbound": Form(lambda h, c: h.unbind(-1), lambda s, t: (torch.stack(s, -1), None), views=True),
    "expanded": Form(lambda h, c: h[None].expand(3, *h.shape), lambda s, t: (s.sum(0) / 3, None), views=True),
    "flat": Form(lambda h, c: h.flatten(0, 1), lambda s, t: (s.view(*t.shape, -1), None)),
    "transposed": Form(lambda h, c: h.transpose(0, 2), lambda s, t: (s.transpose(0, 2), None)),
    "strided": Form(
        lambda h, c: torch.stack([h, c], -1).flatten(-2)[..., ::2], lambda s, t: (s, None), carries=True, views=True
    ),
    "detached": Form(lambda h, c: (h, h.detach()), lambda s, t: (s[0] + s[1] / 4, None)),
    "unused": Form(lambda h, c: (h, c, c * 2), lambda s, t: (s[0], None), carries=True),
    "many": Form(_many, _of_many),
}

FAULTY = {"unsendable": Form(lambda h, c: (h, object()), lambda s, t: (s[0], None))}
"""Never drawn."""

IMPORTS = {"output": "transformers.modeling_outputs"}
"""Whose types a form has: the model's own module would import it, but it takes seconds that few cases need."""

NEEDS_TOKENS = frozenset({"flat"})
"""Forms whose taker must know the shape of the tokens."""

ONE_MICRO_BATCH = frozenset({"scaled"})
"""Forms that mix positions: slices of a sequence would give other numbers."""

UNSENT = {"number": "boundary-type"}
"""Forms that a stage may refuse to send, and the code with which."""
