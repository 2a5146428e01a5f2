"""Plays rows of the league: this process keeps the references, ranks compare their layouts with them, step by step.

this process     one process of each row, and a plain loop ──> numbers, gradients, weights of each step, in a folder
its ranks        the row's layouts                         ──> each compares what it holds ──> findings
this process     findings ──> a result for each row

The plain loop shares nothing with the engine: torch's autograd and optimizer, one document after the other.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.data.dataset import DataContext
from sley_core.errors import RunError, SleyError
from sley_core.optim.config import AdamWConfig
from sley_core.plan.plan import Plan
from sley_testing.league.parts import DrawnSamples
from sley_testing.league.rows import LeagueRow, Result, judge_row
from sley_testing.plain import Batch, Named, PlainLoop, decay_groups
from sley_testing.verify.findings import read
from sley_testing.verify.measure import StepComparer, check_complete, file_of, keep, save_plain_step

Start: TypeAlias = Callable[[Sequence[LeagueRow], int, Path], str]
"""Calls `take` on so many ranks, for these rows and this folder; returns why they failed, or nothing."""

ALONE, PLAIN = "alone", "plain"  # the folders of a row's references


def play(rows: Sequence[LeagueRow], folder: Path, start: Start) -> Iterator[Result]:
    """Yields the result of each row, those of few ranks first. folder: is empty; gets what is compared. A row in which a rank
    fails ends the ranks; what they were still to do is started again without it.
    """
    kept = []
    for row in rows:
        try:
            save_references(row, folder / row.name)
            kept.append(row)
        except Exception as error:
            yield Result(row, failed=f"as one process: {reason(error)}")
    for num_ranks, rows_of_size in groupby(sorted(kept, key=attrgetter("num_ranks")), key=attrgetter("num_ranks")):
        left = list(rows_of_size)
        while left:
            failed = start(left, num_ranks, folder)
            # Done is a row of which every rank has written what it found beside the last reference.
            last = {row.name: folder / row.name / (PLAIN if row.plain else ALONE) for row in left}
            done = [row for row in left if all((last[row.name] / f"rank-{rank}.json").is_file() for rank in range(num_ranks))]
            yield from (_result(row, folder) for row in done)
            left = [row for row in left if row not in done]
            if left:
                assert failed, f"no rank failed, and {left[0].name} was not compared"
                yield Result(left.pop(0), failed=failed)


def reason(error: Exception) -> str:
    """Returns the message of an error in one line."""
    if isinstance(error, SleyError):
        return error.diagnostics[0].message
    return "".join(traceback.format_exception_only(error)).strip()


def save_references(row: LeagueRow, folder: Path) -> None:
    """Keeps what one process of the row computes in a subfolder of `folder`, and what a plain loop does in another."""
    (folder / ALONE).mkdir(parents=True)
    plan = row.plan_alone()
    with World.alone("cpu") as world, assemble(plan, world) as run:
        keep(run, row.num_steps, folder / ALONE)
    if row.plain:
        (folder / PLAIN).mkdir()
        save_plain_steps(plan, row.num_steps, folder / ALONE, folder / PLAIN)


def take(rows: Sequence[LeagueRow], world: World, folder: Path) -> None:
    """Takes the steps of all rows on this rank and writes what it found; all ranks of `world` call it with the same rows."""
    for row in rows:
        own, plans = folder / row.name, row.plans()
        kept = [own / name for name in (ALONE, PLAIN) if (own / name).is_dir()]
        references = [StepComparer(world.rank, plans[0], one) for one in kept]
        for number, plan in enumerate(plans):
            # From the checkpoint of the layout before, to one for the next.
            with assemble(plan, world) as run:
                if number > 0:
                    run.load_checkpoint(own / f"saved-{number}")
                for reference in references:
                    reference.begin(run)
                for _ in range(row.steps):
                    if row.moves and run.num_steps_done > 0:
                        run.memory.offload()
                        run.memory.onload()
                    numbers = run.step()
                    for reference in references:
                        reference.step(run, run.num_steps_done, numbers)
                if number + 1 < len(plans):
                    run.save_checkpoint(own / f"saved-{number + 1}")
        for reference, one in zip(references, kept, strict=True):
            reference.found.write(one)


def _result(row: LeagueRow, folder: Path) -> Result:
    """Reads what all ranks found of a row, and judges it; a result with `failed` if it is incomplete."""
    found = {}
    for one in (ALONE, PLAIN) if row.plain else (ALONE,):
        found[one] = read(folder / row.name / one, row.num_ranks)
        try:
            check_complete(found[one], folder / row.name / one)
        except RunError as error:
            return Result(row, failed=error.diagnostics[0].message)
    return judge_row(row, found[ALONE], found.get(PLAIN))


def save_plain_steps(plan: Plan, num_steps: int, first: Path, folder: Path) -> None:
    """Takes the steps of `plan` in a plain loop and keeps their results in `folder`, as `measure.keep` does for a run.

    first: the folder of a run that began with the same weights. Each micro-batch is one document, so nothing can attend across
    two, and the loop's loss is written without ranks.
    """
    options = plan.data.config.options
    samples, held_out = DrawnSamples(**options), DrawnSamples(DataContext(split="held_out"), **options)
    config = plan.optimizer.config
    assert isinstance(config, AdamWConfig), config

    def adamw(named: Named) -> torch.optim.Optimizer:
        groups = decay_groups([one for one in named if one[1].requires_grad], config.weight_decay)
        first, second = config.betas
        return torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps)

    loop = PlainLoop(plan.model.build(samples.info), _SumOfLabels(), optimizer=adamw, clip_norm=config.clip_norm)
    loop.load(load_file(file_of(first, 0, "weights")))
    save_file(loop.weights, file_of(folder, 0, "weights"))
    for number in range(num_steps):
        size = plan.batch.global_size
        step = loop.step(_apart(samples, range(number * size, (number + 1) * size)))
        numbers = {}
        if plan.evaluation is not None:
            numbers["held_out_loss"] = loop.evaluate(_apart(held_out, range(len(held_out))))
        save_plain_step(folder, number + 1, step, config.clip_norm, **numbers)


def _apart(samples: DrawnSamples, indices: Iterable[int]) -> list[Batch]:
    """Returns the documents of these samples, a micro-batch each."""
    return [document for index in indices for document in samples.apart(index)]


class _SumOfLabels:
    """Computes cross-entropy directly, as a sum over the labels that count and the number of these."""

    def weight(self, batch: Batch) -> float:
        return float((batch["labels"] >= 0).sum())

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        counts = batch["labels"] >= 0
        return F.cross_entropy(output[counts], batch["labels"][counts], reduction="sum")
