"""The tables of the plugin `memory`; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sley_core.api.plan import Array, NonNegative, Positive, Table, suggestion
from sley_core.errors import Diagnostic, PlanError

Layers = Positive | Annotated[Array[str], Field(min_length=1)]


class SizeClassesConfig(Table):
    """Keeps blocks by rounded size, and lends views of them: buffers of almost equal sizes share memory."""

    per_doubling: Literal[1, 2, 4, 8, 16] = 8
    """Sizes of blocks between one power of two and the next; with 8, a block is at most an eighth larger than the request."""


Part = Literal["weights", "buffers", "masters", "optimizer_states", "gradients", "handlers", "pools", "messages"]
"""As in `sley_core.api.memory`, which needs torch."""

ALL: tuple[Part, ...] = ("weights", "buffers", "masters", "optimizer_states", "gradients", "handlers", "pools", "messages")


class OffloadConfig(Table):
    """Moves memory to the host and back, in copies that overlap with the device's other work."""

    MOVES: ClassVar[tuple[Part, ...]] = ()

    bucket_mb: Annotated[float, Field(gt=0)] = 64.0
    """Megabytes that are moved at a time; with `between_steps`, megabytes of weights that are stepped at a time."""

    host_budget_mb: Annotated[float, Field(ge=0)] | None = None
    """Megabytes of host memory that may be page-locked for this; more is pageable, with a warning. Left out, no limit."""

    @property
    def moves(self) -> tuple[Part, ...]:
        """Returns the parts of a run's memory that it moves."""
        return self.MOVES

    @property
    def is_shared(self) -> bool:
        """Returns whether ranks share host copies of memory that they have in common."""
        return False

    @property
    def steps_in_buckets(self) -> bool:
        """Returns whether optimizer states are on the device only while their weights are stepped."""
        return False


class CopiedConfig(OffloadConfig):
    """Copies memory to the host, in full or, together with other ranks, in parts."""

    shared: bool = False
    """Whether ranks of `wdp` with the same contents keep a part of them each, and gather them on the way back. All ranks of the
    run must then offload and onload the same parts in the same order.
    """

    @property
    def is_shared(self) -> bool:
        return self.shared


class WeightsConfig(CopiedConfig):
    """Moves parameters and module buffers, frozen ones too."""

    MOVES = ("weights", "buffers")


class MastersConfig(CopiedConfig):
    """Moves the fp32 masters of narrower weights."""

    MOVES = ("masters",)


class StatesConfig(CopiedConfig):
    """Moves the optimizer's states, such as AdamW's moments."""

    MOVES = ("optimizer_states",)

    when: Literal["idle", "between_steps"] = "idle"
    """`"idle"`: offload when the program calls `run.memory.offload()`. `"between_steps"`: keep states away except while their
    weights are stepped.
    """

    @property
    def steps_in_buckets(self) -> bool:
        return self.when == "between_steps"


class GradientsConfig(OffloadConfig):
    """Frees gradients, and allocates their memory again."""

    MOVES = ("gradients",)


class EverythingConfig(CopiedConfig):
    """Moves everything that a run holds between two steps, or the parts that `parts` names."""

    parts: Annotated[Array[Part], Field(min_length=1)] = ALL
    """Which parts: gradients are freed, pools and messages trimmed, all others copied."""

    @property
    def moves(self) -> tuple[Part, ...]:
        return tuple(self.parts)


class HostOptimizerConfig(OffloadConfig):
    """Keeps masters and optimizer states on the host, and steps them there."""

    MOVES = ("masters", "optimizer_states")

    @property
    def steps_in_buckets(self) -> bool:
        return True


class HostConfig(Table):
    """Offloads what chosen layers save for their backward to the host, and prefetches it back."""

    layers: Layers | None = None
    """Which layers: the number of first blocks, or names and patterns of names (`"blocks.1*"`); left out, all blocks.

    Blocks are all layers but the first and the last.
    """

    min_bytes: NonNegative = 65536
    """Smaller storages stay: copying them takes longer than their bytes are worth."""

    budget_bytes: NonNegative | None = None
    """The most bytes on the host at one time; what would exceed it stays on the device, and is counted."""


class SelectiveConfig(Table):
    """Recomputes layers in their backward, as `core.recompute` does, except for their attention, whose output is kept."""

    layers: Layers | None = None
    """Which layers: the number of first blocks, or names and patterns of names; left out, all blocks."""

    budget_bytes: NonNegative | None = None
    """The most bytes of attention kept at one time; what would exceed it is recomputed, and counted."""


def chosen(layers: int | Sequence[str] | None, layer_names: Sequence[str]) -> frozenset[str]:
    """Returns the names of the layers that `layers` chooses of `layer_names`, the whole model's in order.

    layers: None for all blocks (all layers but the first and the last), a number for the first ones of these, or names and
    patterns of any layers. Raises PlanError `unknown-layer` for a pattern that no layer matches.
    """
    if layers is None or isinstance(layers, int):
        return frozenset(layer_names[1:-1][:layers])
    names: set[str] = set()
    for number, pattern in enumerate(layers):
        matching = [name for name in layer_names if fnmatchcase(name, pattern)]
        if not matching:
            first = ", ".join(f"`{name}`" for name in layer_names[:4])
            hint = suggestion(pattern, layer_names, f"the model's layers are {first}, ...")
            path = ("activations", "layers", number)
            raise PlanError.many([Diagnostic("unknown-layer", f"no layer has the name `{pattern}`", path, hint=hint)])
        names.update(matching)
    return frozenset(names)
