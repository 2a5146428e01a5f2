"""Verifies rows of the league: this process saves the references, and ranks compare their layouts with them, step by step.

this process     one process of each row, and a plain loop ──> numbers, gradients, weights of each step, in a folder
its ranks        the row's layouts                         ──> each rank compares its tensors ──> findings
this process     findings ──> a result for each row

The plain loop shares no code with the engine: it uses torch's autograd and optimizer, and computes one document at a time.
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
from sley_testing.league.model import RandomSamples
from sley_testing.league.rows import LeagueRow, RowResult, judge_row
from sley_testing.plain import Batch, NamedParameters, PlainLoop, decay_groups
from sley_testing.verify.findings import read_findings
from sley_testing.verify.measure import StepComparer, check_complete, save_plain_step, save_reference, tensor_file

Launch: TypeAlias = Callable[[Sequence[LeagueRow], int, Path], str]
"""Calls `compare_rows` on a number of ranks, for these rows and this folder. Returns the error message of the ranks, or ""."""

_ONE_PROCESS, _PLAIN_LOOP = "one-process", "plain-loop"  # the subfolders of a row's references


def verify_rows(rows: Sequence[LeagueRow], folder: Path, launch: Launch) -> Iterator[RowResult]:
    """Yields the result of each row, ordered by the number of ranks. folder: an empty folder for references and findings.

    A failed row ends its ranks. The remaining rows are launched again without it.
    """
    runnable_rows = []
    for row in rows:
        try:
            _save_references(row, folder / row.name)
            runnable_rows.append(row)
        except Exception as error:
            message = error.diagnostics[0].message if isinstance(error, SleyError) else _format_error(error)
            yield RowResult(row, failure=f"as one process: {message}")
    num_ranks_of = attrgetter("num_ranks")
    for num_ranks, group in groupby(sorted(runnable_rows, key=num_ranks_of), key=num_ranks_of):
        pending = list(group)
        while pending:
            failure = launch(pending, num_ranks, folder)
            finished = [row for row in pending if _is_finished(row, num_ranks, folder)]
            yield from (_read_result(row, folder) for row in finished)
            pending = [row for row in pending if row not in finished]
            if pending:
                assert failure, f"no rank failed, and {pending[0].name} was not compared"
                yield RowResult(pending.pop(0), failure=failure)


def _is_finished(row: LeagueRow, num_ranks: int, folder: Path) -> bool:
    """Returns whether all ranks have written their findings, which they write last next to the last reference."""
    reference = folder / row.name / (_PLAIN_LOOP if row.has_plain_loop else _ONE_PROCESS)
    return all((reference / f"rank-{rank}.json").is_file() for rank in range(num_ranks))


def _format_error(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _save_references(row: LeagueRow, folder: Path) -> None:
    """Saves the steps of one process and, if the row has one, of a plain loop in subfolders of `folder`."""
    (folder / _ONE_PROCESS).mkdir(parents=True)
    plan = row.one_process_plan()
    with World.alone("cpu") as world, assemble(plan, world) as run:
        save_reference(run, row.num_steps, folder / _ONE_PROCESS)
    if row.has_plain_loop:
        (folder / _PLAIN_LOOP).mkdir()
        _save_plain_steps(plan, row.num_steps, folder / _ONE_PROCESS, folder / _PLAIN_LOOP)


def compare_rows(rows: Sequence[LeagueRow], world: World, folder: Path) -> None:
    """Takes the steps of all rows on this rank and writes its findings. All ranks of `world` must call it with equal rows."""
    for row in rows:
        row_folder, plans = folder / row.name, row.plans()
        reference_folders = [path for name in (_ONE_PROCESS, _PLAIN_LOOP) if (path := row_folder / name).is_dir()]
        comparers = [StepComparer(world.rank, plans[0], path) for path in reference_folders]
        for index, plan in enumerate(plans):
            with assemble(plan, world) as run:
                if index > 0:
                    run.load_checkpoint(row_folder / f"saved-{index}")
                for comparer in comparers:
                    comparer.begin(run)
                for _ in range(row.steps_per_layout):
                    if row.offloads and run.num_steps_done > 0:
                        run.memory.offload()
                        run.memory.onload()
                    metrics = run.step()
                    for comparer in comparers:
                        comparer.step(run, run.num_steps_done, metrics)
                if index + 1 < len(plans):
                    run.save_checkpoint(row_folder / f"saved-{index + 1}")
        for comparer, path in zip(comparers, reference_folders, strict=True):
            comparer.findings.write(path)


def _read_result(row: LeagueRow, folder: Path) -> RowResult:
    """Judges the findings of all ranks. The result has a `failure` if they are incomplete."""
    findings = {}
    for name in (_ONE_PROCESS, _PLAIN_LOOP) if row.has_plain_loop else (_ONE_PROCESS,):
        findings[name] = read_findings(folder / row.name / name, row.num_ranks)
        try:
            check_complete(findings[name], folder / row.name / name)
        except RunError as error:
            return RowResult(row, failure=error.diagnostics[0].message)
    return judge_row(row, findings[_ONE_PROCESS], findings.get(_PLAIN_LOOP))


def _save_plain_steps(plan: Plan, num_steps: int, reference_folder: Path, folder: Path) -> None:
    """Takes the steps of `plan` in a plain loop and saves them in `folder`, in the format of `save_reference`.

    reference_folder: the folder of a run with the same initial weights. Each micro-batch is one document, so that no token can
    attend to another document. The loop computes its loss without the engine.
    """
    options = plan.data.config.options
    samples, held_out_samples = RandomSamples(**options), RandomSamples(DataContext(split="held_out"), **options)
    config = plan.optimizer.config
    assert isinstance(config, AdamWConfig), config

    def make_optimizer(parameters: NamedParameters) -> torch.optim.Optimizer:
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        first_beta, second_beta = config.betas
        groups = decay_groups(trained, config.weight_decay)
        return torch.optim.AdamW(groups, lr=config.lr, betas=(first_beta, second_beta), eps=config.eps)

    loop = PlainLoop(plan.model.build(samples.info), _LabelSum(), optimizer=make_optimizer, clip_norm=config.clip_norm)
    loop.load(load_file(tensor_file(reference_folder, 0, "weights")))
    save_file(loop.weights, tensor_file(folder, 0, "weights"))
    size = plan.batch.global_size
    for step in range(num_steps):
        plain_step = loop.step(_documents(samples, range(step * size, (step + 1) * size)))
        numbers = {}
        if plan.evaluation is not None:
            numbers["held_out_loss"] = loop.evaluate(_documents(held_out_samples, range(len(held_out_samples))))
        save_plain_step(folder, step + 1, plain_step, config.clip_norm, **numbers)


def _documents(samples: RandomSamples, indices: Iterable[int]) -> list[Batch]:
    """Returns the documents of these samples, each as a micro-batch."""
    return [document for index in indices for document in samples.split_documents(index)]


class _LabelSum:
    """Computes cross-entropy without the engine: the sum over the labels that count, and their number."""

    def weight(self, batch: Batch) -> float:
        return float((batch["labels"] >= 0).sum())

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        is_counted = batch["labels"] >= 0
        return F.cross_entropy(output[is_counted], batch["labels"][is_counted], reduction="sum")
