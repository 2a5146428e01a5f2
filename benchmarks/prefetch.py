"""What rules for gathering weights ahead cost, by counting: those of InternEvo's generations (rules.py) beside ours.

One microbatch of a decoder is replayed on a simulated rank, forward and backward, its first blocks recomputed: no torch, no
processes, the same figures everywhere. Before that, `check` holds the replay of the reference's rules to known counts.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rules import EXECUTED, HEAD, REGISTERED, TABLE, Device, Ours, Reference, Rules, Weight

NUM_BLOCKS = 8
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
RATIOS = (0.25, 0.5, 1.0)
"""Times of a gather, or of a reduction, to that of the forward with the same weight."""

ATTENTION = 1.0
"""The time of its forward, between wqkv and wo, where a block's linears take 12; its backward takes two."""

REFERENCES: dict[str, Callable[..., Reference]] = {
    "G1, layer": partial(Reference, registered=REGISTERED, forgets=True, releases=False),
    "G2, layer": partial(Reference, forgets=True, releases=False),
    "G3, layer": Reference,
    "G3, module": partial(Reference, module=True),
}


@dataclass(frozen=True)
class Row:
    """Counts of one microbatch.

    gathers: of a block's linear, at most. demands: gathers that nobody foresaw: linears, or ours' units. blocking: gathers of
    table and head that are awaited at once. resident, left: whole weights at most, and afterwards. gradients: of full
    size, at most. exposed: time beyond computing, relative to that. hidden: of the communication's time.
    """

    rules: str
    fraction: float
    ratio: float
    gathers: int
    demands: int
    blocking: int
    resident: int
    left: int
    gradients: int
    exposed: float
    hidden: float


def forward_of(rules: Rules, block: int, *, recomputes: bool = False) -> None:
    for name in EXECUTED:
        rules.forward(Weight(block, name), recomputes)
        if name == "wqkv":
            rules.device.compute(ATTENTION)


def forward(rules: Rules, num_blocks: int) -> None:
    rules.enter()
    rules.forward(TABLE)
    for block in range(num_blocks):
        forward_of(rules, block)
    rules.forward(HEAD)
    rules.leave()


def backward(rules: Rules, num_blocks: int, num_recomputed: int) -> None:
    rules.enter()
    rules.backward(HEAD)
    for block in reversed(range(num_blocks)):
        if block < num_recomputed:
            forward_of(rules, block, recomputes=True)
        for name in reversed(EXECUTED):
            if name == "wqkv":
                rules.device.compute(2 * ATTENTION)
            rules.backward(Weight(block, name))
        rules.block_done(block)
    rules.backward(TABLE)
    rules.leave()


def rules_of(name: str, device: Device, num_blocks: int, num_recomputed: int) -> Rules:
    """Those of `name`, before a microbatch on `device`; ours have learned two."""
    if name in REFERENCES:
        return REFERENCES[name](device, num_blocks, num_recomputed)
    ours = Ours(num_blocks, name.removeprefix("sley, "))
    for _ in range(2):
        ours.begin(Device(device.ratio))
        forward(ours, num_blocks)
        backward(ours, num_blocks, num_recomputed)
    ours.begin(device)
    return ours


def counted(name: str, fraction: float, ratio: float) -> Row:
    num_recomputed = int(fraction * NUM_BLOCKS)
    device = Device(ratio)
    rules = rules_of(name, device, NUM_BLOCKS, num_recomputed)
    forward(rules, NUM_BLOCKS)
    backward(rules, NUM_BLOCKS, num_recomputed)
    exposed = device.now - device.computed
    return Row(
        name,
        fraction,
        ratio,
        max(number for weight, number in device.gathers.items() if weight not in (TABLE, HEAD)),
        rules.demands,
        rules.blocking,
        device.max_there,
        len(device.there),
        device.max_gradients,
        round(exposed / device.computed, 3),
        round(1 - exposed / device.communicated, 3),
    )


def in_backward(name: str, num_blocks: int, num_recomputed: int) -> tuple[int, Counter[Weight], int]:
    """Demands and gathers of linears in the backward of `num_blocks` blocks, and what stays afterwards."""
    device = Device(1.0)
    rules = rules_of(name, device, num_blocks, num_recomputed)
    forward(rules, num_blocks)
    demands = rules.demands
    device.gathers.clear()
    backward(rules, num_blocks, num_recomputed)
    gathers = Counter({weight: num for weight, num in device.gathers.items() if weight not in (TABLE, HEAD)})
    return rules.demands - demands, gathers, len(device.there)


def check() -> None:
    """The replay counts what a toy model of the reference's hooks did; ours keep what tests of the package hold them to."""
    for name in ("G2, layer", "G3, layer"):
        assert in_backward(name, 4, 0)[0] == 1, name
        assert in_backward(name, 4, 4)[0] == 5, name
        assert set(in_backward(name, 4, 4)[1].values()) == {1}, name
    for name, demands, gathers in (("G2, layer", 16, 2), ("G3, layer", 6, 1)):
        found, per_linear, _ = in_backward(name, 4, 2)
        assert found == demands, (name, found)
        assert {num for weight, num in per_linear.items() if weight.block < 2} == {gathers}, (name, per_linear)
    _, per_linear, left = in_backward("G1, layer", 3, 0)
    assert all(num == (2 if weight.name == "w2" else 1) for weight, num in per_linear.items()), per_linear
    assert left == 3, left
    for fraction in FRACTIONS:
        for name, most in (("sley, layer", 2 * len(EXECUTED)), ("sley, module", len(EXECUTED) + 1)):
            row = counted(name, fraction, 1.0)
            assert (row.gathers, row.demands, row.left) == (2, 1, 0), row
            assert row.resident <= most, row
            assert row.gradients <= 2 * len(EXECUTED), row


def report(rows: Sequence[Row], path: Path | None) -> None:
    """Prints the table; with `path`, also appends it there as JSON, as the other benchmarks do."""
    names = list(asdict(rows[0]))
    print("  ".join(f"{name:>9}" for name in names))
    for row in rows:
        print("  ".join(f"{value:>9}" for value in asdict(row).values()))
    if path is not None:
        entry = {"title": f"rules for gathering ahead, {NUM_BLOCKS} blocks", "rows": [asdict(row) for row in rows]}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def main() -> None:
    known = argparse.ArgumentParser(description=__doc__)
    known.add_argument("--fractions", type=float, nargs="*", default=FRACTIONS, help="of blocks that are recomputed")
    known.add_argument("--ratios", type=float, nargs="*", default=RATIOS, help="of communication to a forward")
    known.add_argument("--json", type=Path, default=None, help="append the table to this file, as one line")
    options = known.parse_args()
    check()
    names = (*REFERENCES, "sley, layer", "sley, module")
    report(
        [counted(name, fraction, ratio) for ratio in options.ratios for name in names for fraction in options.fractions],
        options.json,
    )


if __name__ == "__main__":
    main()
