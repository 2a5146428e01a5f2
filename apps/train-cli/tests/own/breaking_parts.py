"""A model on whose ranks one thing goes wrong, as the variable SLEY_TEST_FAULT says: `factory = "breaking_parts:layers"`.

{"kind": "skipped", "of": "sum", "rank": 1, "number": 9}: rank 1 leaves out its 9th sum of a bucket. What was hit stands in
the file `hit.json` of the current folder.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sley_cma.transport import Cma
from sley_core.comm.backends import Backend, Direct, Done
from sley_core.comm.collectives import Pending
from sley_core.comm.groups import Groups

VARIABLE, HIT = "SLEY_TEST_FAULT", Path("hit.json")
HIDDEN = 16
SLOW_S = 1.5
"""Less than the limit of the plan's waits."""


class Embed(nn.Embedding):
    """With `Head`, so that every stage has a layer in which something can go wrong, wherever measured costs cut the model."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training and fault.is_due("action"):
            fault.act("embed")
        return super().forward(tokens)


class Block(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training and fault.is_due("action"):
            fault.act(f"blocks.{self.place}")
        return hidden + torch.relu(self.inner(self.norm(hidden)))


class Head(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        if self.training and fault.is_due("action"):
            fault.act("head")
        return super().forward(hidden)


def layers() -> list[tuple[str, nn.Module]]:
    fault.prepare()
    blocks: list[tuple[str, nn.Module]] = [(f"blocks.{place}", Block(place)) for place in range(4)]
    return [("embed", Embed(256, HIDDEN)), *blocks, ("head", Head(HIDDEN, 256))]


class Fault:
    """What this rank does wrong, once. Nothing on other ranks."""

    def __init__(self) -> None:
        told = json.loads(os.environ.get(VARIABLE, "{}"))
        self.kept: Any = None
        is_own = bool(told) and int(os.environ.get("RANK", "-1")) == told["rank"]
        self.kind, self.of, self.left = (told["kind"], told["of"], told["number"]) if is_own else ("", "", 0)

    def is_due(self, of: str) -> bool:
        if self.of != of:
            return False
        self.left -= 1
        return self.left == 0

    def act(self, what: str) -> None:
        """Does what does not depend on an exchange."""
        HIT.write_text(json.dumps({"what": what}), "utf-8")
        match self.kind:
            case "slow":
                time.sleep(SLOW_S)
            case "stuck":
                time.sleep(3600)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raised":
                raise ValueError("no good")

    def prepare(self) -> None:
        """Puts itself in front of the exchanges of this process."""
        if not self.of or self.of == "action":
            return
        for kind in (Direct, Cma, Backend):
            self._front(kind, "all_reduce", "sum", 0)
            self._front(kind, "reduce_scatter", "reduce", 0)
            self._front(kind, "all_gather", "gather", 1)
        self._front_sends()

    def _front(self, kind: type, method: str, of: str, at: int) -> None:
        plain: Callable[..., Any] = getattr(kind, method)

        def call(transport: Any, *args: Any, what: str, **options: Any) -> Any:
            if not self.is_due(of):
                return plain(transport, *args, what=what, **options)
            numbers = transport.members.progress.numbers
            HIT.write_text(json.dumps({"what": what, "number": numbers.get(f"{transport.members.axis} main", 0) + 1}))
            match self.kind:
                case "skipped":
                    return Done()
                case "extra":
                    again = _copied(args)
                    self.kept = again, plain(transport, *again, what=f"{what}, again", **options)
                case "wrong size":
                    return plain(transport, *_shorter(args), what=what, **options)
                case "wrong group":
                    (groups,) = [one for one in gc.get_objects() if type(one) is Groups]
                    return getattr(groups["all"].transport(), method)(*args, what=what, **options)
                case _:
                    self.act(what)
            return plain(transport, *args, what=what, **options)

        setattr(kind, method, call)

    def _front_sends(self) -> None:
        from sley_pp import lines

        plain = lines.send_to

        def call(tensor: Tensor, group: Any, lane: str, peer: int, *, what: str) -> Any:
            if not what.startswith("what stage") or "walks" in what or not self.is_due("send"):
                return plain(tensor, group, lane, peer, what=what)
            HIT.write_text(json.dumps({"what": what}), "utf-8")
            match self.kind:
                case "skipped":
                    return Pending()
                case "extra":
                    kept = tensor.clone()
                    # Without its handle, a message may never leave.
                    self.kept = kept, plain(kept, group, lane, peer, what=f"{what}, again")
                case "wrong size":
                    return plain(tensor.reshape(-1)[: tensor.numel() // 2].clone(), group, lane, peer, what=what)
                case "wrong group":
                    return plain(tensor, group, {"up": "down", "down": "up"}[lane], peer, what=what)
                case _:
                    self.act(what)
            return plain(tensor, group, lane, peer, what=what)

        lines.send_to = call


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.clone() if isinstance(one, Tensor) else [each.clone() for each in one] for one in args)


def _shorter(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Half of every tensor, by rows."""
    return tuple(
        one[: max(1, one.shape[0] // 2)] if isinstance(one, Tensor) else [each[: max(1, each.shape[0] // 2)] for each in one]
        for one in args
    )


fault = Fault()
