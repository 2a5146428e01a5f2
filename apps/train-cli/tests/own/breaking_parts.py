"""A model with one fault on one rank, as the variable SLEY_TEST_FAULT says: `factory = "breaking_parts:layers"`.

{"type": "skipped", "event": "sum", "rank": 1, "number": 9}: rank 1 skips its 9th sum of a bucket. The file `hit.json` in the
current folder names the exchange or the layer.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sley_cma.transport import CmaTransport
from sley_core.comm.transport import CollectiveTransport, MessageTransport, Work
from sley_core.comm.world import Group

VARIABLE, HIT = "SLEY_TEST_FAULT", Path("hit.json")
HIDDEN = 16


class Layer(nn.Module):
    """A layer that may fail in the forward pass."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name, self.inner = name, inner

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training and fault.is_due("action"):
            HIT.write_text(json.dumps(self.name), "utf-8")
            match fault.type:
                case "stuck":
                    time.sleep(3600)
                case "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "killed":
                    subprocess.Popen(["sleep", "600"])  # ends with the rank
                    os.kill(os.getpid(), signal.SIGKILL)
                case "raised":
                    raise ValueError("no good")
        output: Tensor = self.inner(tokens)
        return output


def layers() -> list[tuple[str, nn.Module]]:
    Path(f"process.{os.getpid()}").touch()
    for transport in (MessageTransport, CmaTransport, CollectiveTransport):
        _break_sums(transport)
    _break_sends()
    embed, head = nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, 256)
    blocks = [nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()) for _ in range(4)]
    inner = {"embed": embed, **{f"blocks.{index}": block for index, block in enumerate(blocks)}, "head": head}
    return [(name, Layer(name, module)) for name, module in inner.items()]


class Fault:
    """The fault of this rank, which happens once; none on other ranks."""

    def __init__(self) -> None:
        content = json.loads(os.environ.get(VARIABLE, "{}"))
        is_own = bool(content) and int(os.environ.get("RANK", "-1")) == content["rank"]
        self.type, self.event, self.countdown = (
            (content["type"], content["event"], content["number"]) if is_own else ("", "", 0)
        )

    def is_due(self, event: str) -> bool:
        """Counts an event. Returns whether the fault happens now."""
        self.countdown -= self.event == event
        return self.event == event and self.countdown == 0


def _break_sums(transport_type: type) -> None:
    all_reduce: Any = transport_type.all_reduce  # type: ignore[attr-defined]

    def call(transport: Any, *args: Any, label: str, **options: Any) -> Any:
        if not fault.is_due("sum"):
            return all_reduce(transport, *args, label=label, **options)
        HIT.write_text(json.dumps(label), "utf-8")
        return Work()

    transport_type.all_reduce = call  # type: ignore[attr-defined]


def _break_sends() -> None:
    send = Group.send

    def call(group: Group, tensor: Tensor, channel: str, peer: int, *, label: str) -> Any:
        if label.startswith("what stage") and "walks" not in label and fault.is_due("send"):
            HIT.write_text(json.dumps(label), "utf-8")
            if fault.type == "skipped":
                return Work()
            tensor = tensor.reshape(-1)[: tensor.numel() // 2]
        return send(group, tensor, channel, peer, label=label)

    Group.send = call  # type: ignore[method-assign]


fault = Fault()
