"""Rules for gathering weights ahead, on a simulated rank: those of the ISP reference's generations, and ours.

Computing, a wire for gathers and a wire for reductions take the time that the weights' sizes say; nothing else takes any. The
reference is InternEvo (https://github.com/InternLM/InternEvo), whose rules are written down anew here, per linear. G1, G2
and G3 are our names for three of its generations: those of March, of the middle and of December 2024. G1 and G2 gather a
block ahead in forwards and recomputations, and a linear ahead in backwards, by the order of registration; G3 forgets no
gather that a recomputation leaves for its backward, and waits for a block's reductions one block later. Ours are the
machine itself, and what sley_isp's reduce_scatter.py does with gradients.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from sley_isp.prefetch import Decision, PrefetchPolicy

EXECUTED = ("wqkv", "wo", "w1", "w3", "w2")
REGISTERED = ("wqkv", "wo", "w1", "w2", "w3")
"""As in G1 and, for ours too, here; the reference registers them as they are executed from G2 on."""

SIZES = {"wqkv": 3.0, "wo": 1.0, "w1": 8 / 3, "w3": 8 / 3, "w2": 8 / 3, "table": 8.0, "head": 8.0}
"""In squares of the width, and the time of a forward; a backward takes two. 8: 32000 tokens to a width of 4000."""

LAUNCH = "wo"
"""Before its forward G1 to G3 gather the next block."""


class Weight(NamedTuple):
    block: int
    name: str


TABLE, HEAD = Weight(-1, "table"), Weight(1 << 30, "head")


class Device:
    """A rank: what it holds, what is on its way, and what time it is.

    ratio: the time of a gather, or of a reduction, to that of the forward with the same weight.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.now = self.computed = self.communicated = 0.0
        self.wires = {"gather": 0.0, "reduce": 0.0}
        self.there: dict[Weight, float] = {}
        self.gathers: Counter[Weight] = Counter()
        self.num_gradients = self.max_gradients = self.max_there = 0

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def until(self, moment: float) -> None:
        self.now = max(self.now, moment)

    def send(self, wire: str, weight: Weight) -> float:
        """When it will have arrived."""
        seconds = self.ratio * SIZES[weight.name]
        self.communicated += seconds
        self.wires[wire] = max(self.wires[wire], self.now) + seconds
        return self.wires[wire]

    def gather(self, weight: Weight) -> None:
        self.there[weight] = self.send("gather", weight)
        self.gathers[weight] += 1
        self.max_there = max(self.max_there, len(self.there))

    def open_gradients(self, num: int) -> None:
        self.num_gradients += num
        self.max_gradients = max(self.max_gradients, self.num_gradients)


class Rules(Protocol):
    """Rules by which a simulated rank gathers weights. demands, blocking: numbers of gathers."""

    device: Device
    blocking: int

    @property
    def demands(self) -> int: ...

    def enter(self) -> None: ...
    def forward(self, weight: Weight, recomputes: bool = False) -> None: ...
    def backward(self, weight: Weight) -> None: ...
    def block_done(self, block: int) -> None: ...
    def leave(self) -> None: ...


class Reference:
    """The rules of one generation. registered: its order of linears. forgets: a recomputation leaves weights, but not the
    knowledge that they are there. releases: reductions are awaited a block later, else after the backward. module: gathers
    the next linear ahead, not the next block. The table and the head are gathered where they are used, the table in
    its backward too (from G2 on; G1 kept them whole, which is not told apart here).
    """

    def __init__(
        self,
        device: Device,
        num_blocks: int,
        num_recomputed: int,
        *,
        registered: Sequence[str] = EXECUTED,
        forgets: bool = False,
        releases: bool = True,
        module: bool = False,
    ) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self.num_recomputed = num_recomputed
        self.line = [Weight(block, name) for block in range(num_blocks) for name in registered]
        self.forgets = forgets
        self.releases = releases
        self.module = module
        self.demands = self.blocking = 0
        self.known: set[Weight] = set()
        self.under_way: list[tuple[Weight, float]] = []

    def enter(self) -> None: ...

    def forward(self, weight: Weight, recomputes: bool = False) -> None:
        if weight in (TABLE, HEAD):
            self._at_once(weight)
            self.device.compute(SIZES["head"] if weight == HEAD else 0.0)
            del self.device.there[weight]
            return
        if not self.module and weight == (0, EXECUTED[0]) and not recomputes:
            self._ahead(self._block(0))
        if not self.module and weight.name == LAUNCH:
            self._ahead(self._block(weight.block + (-1 if recomputes else 1)))
        self._use(weight)
        if self.module:
            self._ahead(self._next(weight, recomputes))
        self.device.compute(SIZES[weight.name])
        if self.forgets or not recomputes:
            self.known.discard(weight)
        if not recomputes:
            del self.device.there[weight]

    def backward(self, weight: Weight) -> None:
        device, size = self.device, SIZES[weight.name]
        if weight in (TABLE, HEAD):
            self._at_once(weight)
            device.compute(2 * size if weight == HEAD else 0.0)
            device.until(device.send("reduce", weight))
            del device.there[weight]
            return
        if self.num_recomputed < self.num_blocks:  # else nothing is gathered for backwards
            self._use(weight)
            before = self.line[: self.line.index(weight)][-1:]
            self._ahead(one for one in before if one.block >= self.num_recomputed)
        device.open_gradients(1)
        device.compute(size)
        self.under_way.append((weight, device.send("reduce", weight)))
        device.compute(size)
        self.known.discard(weight)
        del device.there[weight]

    def block_done(self, block: int) -> None:
        if self.releases:
            self._release(block + 1)

    def leave(self) -> None:
        self._release(0)

    def _release(self, first: int) -> None:
        """Waits for the reductions of the blocks from `first` on."""
        for weight, arrives in self.under_way:
            if weight.block >= first:
                self.device.until(arrives)
                self.device.num_gradients -= 1
        self.under_way = [one for one in self.under_way if one[0].block < first]

    def _at_once(self, weight: Weight) -> None:
        self.blocking += 1
        self.device.gather(weight)
        self.device.until(self.device.there[weight])

    def _block(self, block: int) -> list[Weight]:
        return [weight for weight in self.line if weight.block == block]

    def _next(self, weight: Weight, recomputes: bool) -> list[Weight]:
        after = self.line[self.line.index(weight) + 1 :][:1]
        if recomputes and (not after or after[0].block != weight.block):
            return self._block(weight.block - 1)[:1]
        return after

    def _ahead(self, weights: Iterable[Weight]) -> None:
        for weight in weights:
            if weight not in self.known:
                self.known.add(weight)
                self.device.gather(weight)

    def _use(self, weight: Weight) -> None:
        if weight not in self.known:
            self.demands += 1
            self._ahead([weight])
        self.device.until(self.device.there[weight])


class Ours:
    """`PrefetchPolicy` itself. A unit's gradients leave together on another's turn; at most `bound` units' are whole."""

    def __init__(self, num_blocks: int, unit: str) -> None:
        self.by_layer = unit == "layer"
        self.bound = 2 if self.by_layer else 4
        linears = [[Weight(block, name) for name in REGISTERED] for block in range(num_blocks)]
        units = linears if self.by_layer else [[weight] for block in linears for weight in block]
        self.units = {weight: tuple(unit) for unit in (*units, [TABLE], [HEAD]) for weight in unit}
        self.machine = PrefetchPolicy(ahead=1)
        self.blocking = 0
        self.demands = 0

    def begin(self, device: Device) -> None:
        """A step of one microbatch, on `device`."""
        self.device = device
        self.demands = 0
        self.machine.begin(["forward", "backward"])
        self.open: tuple[Weight, ...] = ()
        self.under_way: list[tuple[int, float]] = []

    def enter(self) -> None:
        self.machine.begin_pass()

    def forward(self, weight: Weight, recomputes: bool = False) -> None:
        self._use(weight, num_holds=int(recomputes))
        self._wait(weight)
        self.device.compute(0.0 if weight == TABLE else SIZES[weight.name])

    def backward(self, weight: Weight) -> None:
        if weight != TABLE:
            self._use(weight, num_holds=-1)
        if weight not in self.open:
            self._start()
            self._finish(self.bound - 1)
            self.open = self.units[weight]
            self.device.open_gradients(len(self.open))
        if weight != TABLE:
            self.device.compute(SIZES[weight.name])
            self._wait(weight)
            self.device.compute(SIZES[weight.name])

    def block_done(self, block: int) -> None: ...

    def leave(self) -> None:
        self._start()
        self._apply(self.machine.end_pass())
        self._finish(0)

    def _start(self) -> None:
        if self.open:
            arrives = max(self.device.send("reduce", weight) for weight in self.open)
            self.under_way.append((len(self.open), arrives))
            self.open = ()
            self._finish(self.bound)

    def _finish(self, left: int) -> None:
        while len(self.under_way) > left:
            num, arrives = self.under_way.pop(0)
            self.device.until(arrives)
            self.device.num_gradients -= num

    def _wait(self, weight: Weight) -> None:
        """A unit is there when all of it is."""
        for one in self.units[weight]:
            self.device.until(self.device.there[one])

    def _use(self, weight: Weight, num_holds: int) -> None:
        decision = self.machine.use(self.units[weight], num_holds=num_holds)
        self.demands += decision.unshard[:1] == [self.units[weight]]
        self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        for weight in _weights(decision.reshard):
            del self.device.there[weight]
        for weight in _weights(decision.unshard):
            self.device.gather(weight)


def _weights(units: Iterable[Hashable]) -> Iterator[Weight]:
    for unit in units:
        assert isinstance(unit, tuple), unit
        yield from unit
