"""A checkpoint as a checkpointer reads it back: a description of the run, and tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from sley_core.attempt import Lineage, lineage_of
from sley_core.errors import RunError
from sley_core.weight_files.read import TensorKind, Tensors
from sley_core.weight_files.write import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.run_state.pieces import Rectangle


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """Describes a saved run: everything that a checkpoint has besides tensors. All fields are JSON.

    run, step: identify it, with lineage: the attempts that took its steps. plan: resolved, as TOML. versions: of torch and of
    plugins. layout: ranks along each axis, and `world`. optimizer: its name in the plan. state: steps done, loss scale,
    position in the data and the like. Of all ranks, by `with_ranks`: values: by name, what the optimizer keeps besides tensors;
    paths: where a tensor lies in the nested state of its parameter; ranks: what each rank keeps for itself.
    """

    run: str
    step: int
    lineage: Lineage
    plan: str
    versions: dict[str, str]
    layout: dict[str, int]
    optimizer: str
    state: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lineage", lineage_of(self.lineage))  # JSON has lists in place of tuples

    def with_ranks(self, own: Sequence[Mapping[str, Any]]) -> Self:
        """Returns the description completed by `TrainingState.rank_values()` of every rank, in their order.

        Raises RunError "checkpoint-ranks" if ranks have different values under one name.
        """
        values, paths = (_union([one[part] for one in own]) for part in ("values", "paths"))
        return replace(self, values=values, paths=paths, ranks=[one["rank"] for one in own])


def _union(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    union: dict[str, Any] = {}
    for rank, one in enumerate(every):
        for name, value in one.items():
            if union.setdefault(name, value) != value:
                message = f"rank {rank} keeps {value!r} as {name!r}, and another rank {union[name]!r}"
                raise RunError("checkpoint-ranks", message)
    return union


class Saved(Tensors, Protocol):
    """A checkpoint that can be read: its description, and tensors under the names of `TrainingState.pieces`."""

    @property
    def description(self) -> SavedRun: ...

    @property
    def place(self) -> str:
        """Its path or URL, for messages."""
        ...

    def read_into(self, name: str, wanted: Rectangle, target: Tensor) -> None:
        """Reads the part `wanted` of the tensor `name` into `target`, which has its sizes and may have another dtype."""


class WholeTensors:
    """Is a checkpoint whose tensors are all in memory: for a checkpointer that reads whole files."""

    def __init__(self, about: SavedRun, tensors: Mapping[str, Tensor], place: str = "the checkpoint") -> None:
        self.description = about
        self.place = place
        self._tensors = tensors

    @property
    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def kind(self, name: str) -> TensorKind:
        return TensorKind(DTYPES[self._tensors[name].dtype], tuple(self._tensors[name].shape))

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_into(self, name: str, wanted: Rectangle, target: Tensor) -> None:
        target.copy_(self._tensors[name][wanted.slices])
