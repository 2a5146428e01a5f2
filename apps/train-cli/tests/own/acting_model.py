"""A model of one layer that acts in the middle of training: `own_model(doing("os.abort()"))`."""

from textwrap import dedent, indent

_MODEL = """
import os, signal, subprocess, time, resource
from torch import nn
from train_cli import local_launch, stopping

for module in (local_launch, stopping):
    vars(module).update({limits})

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

FIRST_LINE = 19
"""The first line of the action in the file."""


def doing(action: str, **limits: float) -> str:
    """Returns the source of a factory whose layer does `action` in each forward of training.

    The action may use `self.calls`, counted from 1, `rank`, and `again`: "1" for ranks that torchrun has restarted. limits: the
    time limits of the launcher and its ranks that change, by the name of the constant; only for started programs.
    """
    return _MODEL.format(action=indent(dedent(action).strip(), " " * 12), limits=limits)
