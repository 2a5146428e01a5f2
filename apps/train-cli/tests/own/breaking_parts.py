"""A model on whose ranks one thing goes wrong, as the variable SLEY_TEST_FAULT says: `factory = "breaking_parts:layers"`.

{"kind": "skipped", "of": "sum", "rank": 1, "number": 9}: rank 1 leaves out its 9th sum of a bucket. What was hit stands in
the file `hit.json` of the current folder, beside a file `process.PID` for each process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sley_cma.transport import CmaTransport
from sley_core.comm.backends import CollectiveTransport, CompletedWork, MessageTransport
from sley_core.comm.group import Pending
from sley_core.comm.groups import Groups

VARIABLE, HIT = "SLEY_TEST_FAULT", Path("hit.json")
HIDDEN = 16
Call = Callable[..., Any]
SLOW_S = 1.5
"""Less than the limit of the plan's waits."""


class Layer(nn.Module):
    """Every stage has one in which something can go wrong, wherever measured costs cut the model."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name, self.inner = name, inner

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training and fault.is_due("action"):
            fault.act(self.name)
        output: Tensor = self.inner(tokens)
        return output


def layers() -> list[tuple[str, nn.Module]]:
    Path(f"process.{os.getpid()}").touch()
    fault.prepare()
    embed, head = nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, 256)
    blocks = [nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()) for _ in range(4)]
    inner = {"embed": embed, **{f"blocks.{place}": block for place, block in enumerate(blocks)}, "head": head}
    return [(name, Layer(name, module)) for name, module in inner.items()]


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

    def act(self, label: str) -> None:
        """Does what does not depend on an exchange."""
        HIT.write_text(json.dumps({"what": label}), "utf-8")
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
        for kind in (MessageTransport, CmaTransport, CollectiveTransport):
            self._front(kind, "all_reduce", "sum", 0)
            self._front(kind, "reduce_scatter", "reduce", 0)
            self._front(kind, "all_gather", "gather", 1)
        self._front_sends()

    def exchange(self, label: str, call: Call, args: tuple[Any, ...], *, elsewhere: Call, skipped: Any) -> Any:
        """Does wrong in place of `call(*args, label=label)`. elsewhere: the same call on another group or channel."""
        match self.kind:
            case "skipped":
                return skipped
            case "extra":
                again = tuple(each(arg, Tensor.clone) for arg in args)
                # Without its handle, a message may never leave.
                self.kept = again, call(*again, label=f"{label}, again")
            case "wrong size":
                args = tuple(each(arg, lambda tensor: tensor[: max(1, tensor.shape[0] // 2)]) for arg in args)
            case "wrong group":
                return elsewhere(*args, label=label)
            case _:
                self.act(label)
        return call(*args, label=label)

    def _front(self, kind: type, method: str, of: str, at: int) -> None:
        plain: Call = getattr(kind, method)

        def call(transport: Any, *args: Any, label: str, **options: Any) -> Any:
            if not self.is_due(of):
                return plain(transport, *args, label=label, **options)
            numbers = transport.members.progress.numbers
            HIT.write_text(json.dumps({"what": label, "number": numbers.get(f"{transport.members.axis} main", 0) + 1}))

            def of_all_ranks(*args: Any, label: str) -> Any:
                (groups,) = [held for held in gc.get_objects() if type(held) is Groups]
                return getattr(groups["all"].transport(), method)(*args, label=label, **options)

            own = partial(plain, transport, **options)
            return self.exchange(label, own, args, elsewhere=of_all_ranks, skipped=CompletedWork())

        setattr(kind, method, call)

    def _front_sends(self) -> None:
        from sley_core.comm.group import Group

        plain = Group.send

        def call(group: Group, tensor: Tensor, channel: str, peer: int, *, label: str) -> Any:
            if not label.startswith("what stage") or "walks" in label or not self.is_due("send"):
                return plain(group, tensor, channel, peer, label=label)
            HIT.write_text(json.dumps({"what": label}), "utf-8")
            own, other = (
                partial(plain, group, channel=to, peer=peer) for to in (channel, {"up": "down", "down": "up"}[channel])
            )
            return self.exchange(label, own, (tensor.reshape(-1),), elsewhere=other, skipped=Pending())

        Group.send = call  # type: ignore[method-assign, assignment]


def each(argument: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The tensor, or the list of tensors, changed."""
    return change(argument) if isinstance(argument, Tensor) else [change(tensor) for tensor in argument]


fault = Fault()
