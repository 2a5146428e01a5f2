"""A model of one layer that does something in the middle of training, as a test says: `own_model(doing("os.abort()"))`."""

from __future__ import annotations

from textwrap import dedent, indent

_MODEL = """
import os, signal, subprocess, time, resource
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 256)
        self.calls = 0

    def forward(self, tokens):
        if self.training:
            self.calls += 1
            rank, again = int(os.environ.get("RANK", 0)), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
{action}
        return self.embed(tokens)

def layers():
    return [("only", Tiny())]
"""

FIRST_LINE = 15
"""Where the action begins in the file."""


def doing(action: str) -> str:
    """Returns the source of a factory whose layer does `action` in each forward of training.

    It knows `self.calls`, counted from 1, `rank`, and `again`: "1" for ranks that torchrun has started a second time.
    """
    return _MODEL.format(action=indent(dedent(action).strip(), " " * 12))
