"""The coordinates and the process groups of all ranks of a world, computed without communication.

Each of the `pp` pipeline stages is a contiguous block of R = world / pp ranks. The R ranks of a stage are divided in two ways:

    computation   R = dp x sp     samples, slices of each sequence
    storage       R = wdp x wp    copies, shards of the weights

The groups of `sp` and of `wp` are contiguous ranks; the two sizes are independent of each other:

    stage of 8 ranks, sp = 4, wp = 2
    rank        0  1  2  3  4  5  6  7
    dp, sp     00 01 02 03 10 11 12 13
    wdp, wp    00 01 10 11 20 21 30 31
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

SHARED_COORDINATES: dict[str, tuple[str, ...]] = {
    "control": (),
    "all": (),
    "stage": ("stage",),
    "pp": ("dp", "sp"),
    "dp": ("stage", "sp"),
    "sp": ("stage", "dp"),
    "wdp": ("stage", "wp"),
    "wp": ("stage", "wdp"),
    "model": ("wdp",),
}
"""The coordinates that all ranks of a group have in common, for each axis of core's process groups. All ranks create the groups
in the order of this table.
"""

AXES = tuple(SHARED_COORDINATES)
"""The axes of core's process groups, in the order in which ranks create the groups."""

GATHER, REDUCE = "gather", "reduce"
"""The names of the channels of the `wp` axis, one for gathers of weights and one for reductions of gradients."""

CHANNELS = {"pp": ("up", "down"), "wp": (GATHER, REDUCE)}
"""The channels of each axis. Each channel has a communicator, so that, for example, a posted receive blocks no later send."""

DEFAULT_CHANNEL = "main"
"""The only channel of every axis that is not in `CHANNELS`."""

TIE_PREFIX = "tie["
"""The prefix of a tie's axis. A tie is a parameter of several stages; only the ranks that hold it are in a group."""


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of one rank along each axis."""

    rank: int
    stage: int
    dp: int
    sp: int
    wdp: int
    wp: int


@dataclass(frozen=True)
class GroupEntry:
    """One communicator, which `axis`, `channel` and `ranks` identify. ranks: the members, ascending. backend: "gloo", or
    "device" for the backend of the run's device. cross_memory: for an axis of a plugin, whether members may read each other's
    memory (cross-memory attach).
    """

    axis: str
    channel: str
    ranks: tuple[int, ...]
    backend: str = "device"
    cross_memory: bool = False

    @property
    def label(self) -> str:
        """The name of the communicator in errors, such as `wp.gather[0-3]`; unique in a world."""
        channel = "" if self.channel == DEFAULT_CHANNEL else f".{self.channel}"
        text, step = ",".join(map(str, self.ranks)), self.ranks[-1] - self.ranks[-2] if len(self.ranks) > 2 else 0
        if step and self.ranks == tuple(range(self.ranks[0], self.ranks[-1] + 1, step)):  # a range such as `0-6:2`
            text = f"{self.ranks[0]}-{self.ranks[-1]}" + (f":{step}" if step > 1 else "")
        return f"{self.axis}{channel}[{text}]"


@dataclass(frozen=True)
class Topology:
    """The sizes of the parallel axes of a world. pp: the number of pipeline stages. sp: the number of ranks that split each
    sequence. wp: the number of ranks that shard each weight. The ranks of a stage form a dp x sp grid for the data and,
    independently, a wdp x wp grid for the weights, so `dp` and `wdp` follow. `from_sizes` checks that the sizes fit.
    """

    world_size: int
    pp: int = 1
    sp: int = 1
    wp: int = 1

    @classmethod
    def from_sizes(cls, world_size: int, pp: int = 1, sp: int = 1, wp: int = 1, dp: int | None = None) -> "Topology":
        """Returns the topology of `world_size` ranks. Raises ValueError if the sizes do not fit. dp: None derives this size."""
        if dp is not None and world_size != pp * dp * sp:
            raise ValueError(f"the world size must be pp x dp x sp = {pp} x {dp} x {sp}, but is {world_size}")
        for axis, size in (("sp", sp), ("wp", wp)):
            if world_size % (pp * size):
                raise ValueError(f"the world size must be a multiple of pp x {axis} = {pp} x {size}, but is {world_size}")
        return cls(world_size, pp, sp, wp)

    @property
    def ranks_per_stage(self) -> int:
        """The number of ranks of each pipeline stage."""
        return self.world_size // self.pp

    @property
    def dp(self) -> int:
        """The number of ranks that split the samples."""
        return self.ranks_per_stage // self.sp

    @property
    def wdp(self) -> int:
        """The number of ranks of a stage that hold the same shard of a weight."""
        return self.ranks_per_stage // self.wp

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of the global rank `rank`."""
        assert 0 <= rank < self.world_size, f"rank {rank} of a world of {self.world_size}"
        stage, index = divmod(rank, self.ranks_per_stage)
        return Coordinates(rank, stage, dp=index // self.sp, sp=index % self.sp, wdp=index // self.wp, wp=index % self.wp)

    def size_of(self, axis: str) -> int:
        """Returns the number of ranks in each group of `axis`."""
        sizes = {"stage": self.pp, "dp": self.dp, "sp": self.sp, "wdp": self.wdp, "wp": self.wp}
        return self.world_size // prod(sizes[name] for name in SHARED_COORDINATES[axis])

    def groups(self) -> Iterator[GroupEntry]:
        """Yields an entry for each communicator, i.e. each channel of each group, in the order in which every rank creates
        them. A group of one rank has no communicator, except `control`.
        """
        for axis in AXES:
            if self.size_of(axis) == 1 and axis != "control":
                continue
            for ranks in self.partition(axis):
                backend = "gloo" if axis == "control" else "device"
                for channel in CHANNELS.get(axis, (DEFAULT_CHANNEL,)):
                    yield GroupEntry(axis, channel, ranks, backend)

    def partition(self, axis: str, stage: int | None = None) -> list[tuple[int, ...]]:
        """Returns the ranks of each group of `axis`, ordered by first rank. stage: the stage of the groups; None for all."""
        size, groups = self.ranks_per_stage, _all_groups(self, axis)
        return [ranks for ranks in groups if stage is None or stage in {rank // size for rank in ranks}]


@lru_cache(maxsize=32)
def _all_groups(topology: Topology, axis: str) -> list[tuple[int, ...]]:
    """Returns the ranks of each group of `axis`. Cached, since an estimate asks for the groups of each stage."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for coordinates in map(topology.coordinates, range(topology.world_size)):
        shared = tuple(getattr(coordinates, name) for name in SHARED_COORDINATES[axis])
        groups.setdefault(shared, []).append(coordinates.rank)
    return list(map(tuple, groups.values()))
