"""What a save costs training: steps with one save among them, against the same steps without.

    added seconds per save = median (steps with a save, until it is on the disk) - median (the same number of steps without)

Contestants: beside training (`mode = "async"`), blocking (`"sync"`), torch.distributed.checkpoint's `async_save` used plainly,
and one plain copy of the same bytes into memory that is there. Target: beside training <= 1.0 x the plain copy. What still has
to be written after the last step of a block is waited for, and counted. `--parts` takes a save apart: the same steps with only
one thing that a save does beside them.
"""

import random
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import async_save

from contestants import plan
from protocol import RESAMPLES, interleave, parser
from sley_checkpoint.folders import LocalFolder, compute_crc
from sley_checkpoint.reader import CHUNK_BYTES
from sley_core.api.state import bytes_of
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_trainer.assemble import assemble
from sley_trainer.run import Run
from sley_trainer.update import states_of

SHAPE = {"layers": 4, "hidden": 768, "heads": 12, "sequence": 16}
VOCABULARY = 40_000
TARGET = 1.0


def tables(**more: Any) -> dict[str, Any]:
    data = {"factory": "noise:Noise", "options": {"sequence": SHAPE["sequence"], "vocabulary": VOCABULARY}}
    return plan(SHAPE, 1, None, data=data, batch={"global_size": 1, "micro_size": 1}, **more)


def state_of(run: Run) -> dict[str, Tensor]:
    """What a PyTorch user would save."""
    found = {f"weights/{param.name}": param.parameter.detach() for param in run.registry}
    return found | {f"optimizer/{one.name}/{one.state}": one.tensor for one in states_of(run.stepper.update)}


def wait_for_saves() -> None:
    for thread in threading.enumerate():
        if thread.name == "sley-checkpoint":
            thread.join()


def steps(run: Run, count: int, then: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """The first of these steps saves, if the plan says so, and the others run beside that. then: called after the first."""

    def block() -> None:
        run.step()
        then()
        for _ in range(count - 1):
            run.step()
        wait_for_saves()

    return block


def with_dcp(run: Run, count: int, folder: Path) -> Callable[[], None]:
    def block() -> None:
        futures: list[Any] = []

        def save() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            futures.append(async_save(state_of(run), checkpoint_id=str(folder)))

        steps(run, count, save)()
        futures[0].result()

    return block


def beside(run: Run, count: int, work: Callable[[], object]) -> Callable[[], None]:
    """Steps with `work` in a thread from the end of the first to the last, or until it is done."""

    def block() -> None:
        thread = threading.Thread(target=work)
        steps(run, count, thread.start)()
        thread.join()

    return block


def parts(run: Run, count: int, folder: Path) -> dict[str, Callable[[], None]]:
    """What a save does with the bytes of the state, one thing at a time, and all of it as one save would."""
    memory = [bytes_of(one.contiguous()) for one in state_of(run).values()]
    chunks = [one[at : at + CHUNK_BYTES] for one in memory for at in range(0, len(one), CHUNK_BYTES)]
    aside = [torch.ones(len(chunk), dtype=torch.uint8) for chunk in chunks]  # of memory that is there
    place = LocalFolder(folder)

    def copy() -> None:
        for target, chunk in zip(aside, chunks, strict=True):
            target.copy_(torch.frombuffer(chunk, dtype=torch.uint8))

    def add_up() -> None:
        total = 0
        for chunk in chunks:
            total = crc32(chunk, total)

    def write() -> None:
        place.write("parts.bin", chunks)

    def save() -> None:
        copy()
        place.write("parts.bin", [bytes_of(one) for one in aside])
        compute_crc(place, "parts.bin")

    write()
    works = {
        "copies": copy,
        "adds up": add_up,
        "adds up, writes": write,
        "reads, adds up": lambda: compute_crc(place, "parts.bin"),
        "all of these": save,
    }
    return {name: beside(run, count, work) for name, work in works.items()}


def contestants(runs: dict[str, Run], count: int, folder: Path) -> dict[str, Callable[[], None]]:
    for run in runs.values():
        for _ in range(count - 1):  # so that the first step of each block is the one that saves
            run.step()
    sources = list(state_of(runs["none"]).values())
    targets = [torch.empty_like(source) for source in sources]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return {
        "none": steps(runs["none"], count),
        "none again": steps(runs["none"], count),
        "async": steps(runs["async"], count),
        "sync": steps(runs["sync"], count),
        "dcp async_save": with_dcp(runs["none"], count, folder / "dcp"),
        "plain copy": copy,
    }


def show(seconds: dict[str, list[float]], num_bytes: int, count: int) -> None:
    copy, none = (statistics.median(seconds[name]) for name in ("plain copy", "none"))
    print(f"\nstate {num_bytes / 2**30:.2f} GiB; {count} steps {none:.2f} s; plain copy {copy:.3f} s")
    chance = random.Random(0)
    rounds = len(seconds["none"])
    picks = [[chance.randrange(rounds) for _ in range(rounds)] for _ in range(RESAMPLES)]
    for name in (one for one in seconds if one not in ("none", "plain copy")):
        added = [
            statistics.median(seconds[name][at] for at in pick) - statistics.median(seconds["none"][at] for at in pick)
            for pick in picks
        ]
        low, high = sorted(added)[int(0.025 * RESAMPLES)], sorted(added)[int(0.975 * RESAMPLES) - 1]
        middle = statistics.median(seconds[name]) - none
        print(f"   {name:<16} {middle:+7.3f} s per save   {middle / copy:+7.2f} x a plain copy   [{low:+.3f}, {high:+.3f}] s")
    print(f"   target: async <= {TARGET:.1f} x a plain copy")


def main() -> None:
    options = parser(__doc__.splitlines()[0], 20)
    options.add_argument("--every", type=int, default=10, help="steps from one save to the next (default 10)")
    options.add_argument("--parts", action="store_true", help="also what a save does, one thing at a time")
    chosen = options.parse_args()
    warnings.simplefilter("ignore")  # of dcp, that there is one process
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans = {"none": tables()}
        for mode in ("async", "sync"):
            table = {"every_steps": chosen.every, "keep": 1, "mode": mode, "folder": str(folder / mode)}
            plans[mode] = tables(checkpoint=table)
        runs = {mode: assemble(plan_from_dict(one), World.alone("cpu")) for mode, one in plans.items()}
        found = contestants(runs, chosen.every, folder)
        if chosen.parts:
            found |= parts(runs["none"], chosen.every, folder)
        num_bytes = sum(tensor.nbytes for tensor in state_of(runs["none"]).values())
        seconds = interleave(found, chosen.rounds, warmup=1)
        for mode, run in runs.items():
            began = time.perf_counter()
            run.close()
            print(mode, run.counts.get("checkpoint", {}), f"closed in {time.perf_counter() - began:.2f} s", *run.notes)
        show(seconds, num_bytes, chosen.every)


if __name__ == "__main__":
    main()
