"""Plays rows of the league: this process keeps the references, ranks compare their layouts with them, step by step.

this process     one process of each row, and a plain loop ──> numbers, gradients, weights of each step, in a folder
its ranks        the row's layouts                         ──> each compares what it holds ──> findings
this process     findings ──> a result for each row

The plain loop shares nothing with the engine: torch's autograd and optimizer, one document after the other.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from sley_testing.league.rows import LeagueRow, Result, by_ranks, judged
from sley_testing.plain import Batch, Named, PlainLoop, decay_groups
from sley_testing.verify.findings import read
from sley_testing.verify.measure import Beside, check_complete, file_of, keep, keep_plain_step

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
            keep_references(row, folder / row.name)
            kept.append(row)
        except Exception as error:
            yield Result(row, failed=f"as one process: {reason(error)}")
    for num_ranks, left in by_ranks(kept).items():
        while left:
            failed = start(left, num_ranks, folder)
            done = [row for row in left if _is_done(row, folder)]
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


def keep_references(row: LeagueRow, folder: Path) -> None:
    """Keeps what one process of the row computes in a subfolder of `folder`, and what a plain loop does in another."""
    (folder / ALONE).mkdir(parents=True)
    plan = row.plan_alone()
    with World.alone("cpu") as world, assemble(plan, world) as run:
        keep(run, row.num_steps, folder / ALONE)
    if row.plain:
        (folder / PLAIN).mkdir()
        keep_plain(plan, row.num_steps, folder / ALONE, folder / PLAIN)


def take(rows: Sequence[LeagueRow], world: World, folder: Path) -> None:
    """Takes the steps of all rows on this rank and writes what it found; all ranks of `world` call it with the same rows."""
    for row in rows:
        _take(row, world, folder / row.name)


def _take(row: LeagueRow, world: World, folder: Path) -> None:
    """Runs all layouts of a row, and writes what this rank found beside the references."""
    plans = row.plans()
    kept = [folder / name for name in (ALONE, PLAIN) if (folder / name).is_dir()]
    references = [Beside(world.rank, plans[0], one) for one in kept]
    for number, plan in enumerate(plans):
        _take_layout(row, plan, number, world, folder, references)
    for reference, one in zip(references, kept, strict=True):
        reference.found.write(one)


def _take_layout(row: LeagueRow, plan: Plan, number: int, world: World, folder: Path, references: Sequence[Beside]) -> None:
    """Takes the steps of layout `number` of the row: from the checkpoint of the one before, to one for the next."""
    with assemble(plan, world) as run:
        if number > 0:
            run.load_checkpoint(folder / f"saved-{number}")
        for reference in references:
            reference.begin(run)
        for _ in range(row.steps):
            if row.moves and run.num_steps_done > 0:
                run.memory.offload()
                run.memory.onload()
            found = run.step()
            for reference in references:
                reference.step(run, run.num_steps_done, found)
        if number + 1 < len(row.layouts):
            run.save_checkpoint(folder / f"saved-{number + 1}")


def _is_done(row: LeagueRow, folder: Path) -> bool:
    """Returns whether every rank has written what it found beside the last of the row's references."""
    last = folder / row.name / (PLAIN if row.plain else ALONE)
    return all((last / f"rank-{rank}.json").is_file() for rank in range(row.num_ranks))


def _result(row: LeagueRow, folder: Path) -> Result:
    """Reads what all ranks found of a row, and judges it; a result with `failed` if it is incomplete."""
    found = {}
    for one in (ALONE, PLAIN) if row.plain else (ALONE,):
        found[one] = read(folder / row.name / one, row.num_ranks)
        try:
            check_complete(found[one], folder / row.name / one)
        except RunError as error:
            return Result(row, failed=error.diagnostics[0].message)
    return judged(row, found[ALONE], found.get(PLAIN))


def keep_plain(plan: Plan, num_steps: int, first: Path, folder: Path) -> None:
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
        keep_plain_step(folder, number + 1, step, config.clip_norm, **numbers)


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
