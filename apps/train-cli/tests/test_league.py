"""Tests the league of silent errors: each row matches one process and a plain loop, and differs with its fault."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from league_faults import FAULTS
from league_model import RandomSamples
from league_rows import ROWS, LeagueRow
from torch import Tensor

from sley_core.comm.world import World
from sley_core.data.dataset import DataContext
from sley_core.optim.config import AdamWConfig
from sley_core.plan.plan import Plan
from sley_testing.parity import relative_errors
from sley_testing.plain import Batch, NamedParameters, PlainLoop, decay_groups
from sley_testing.runs import RunRecord, Tensors, gradients, weights
from sley_trainer.assemble import assemble

SAMPLE = ("resume-wp",)
"""The row in CI; a campaign has all."""

NUMBERS = ("loss", "grad_norm", "held_out_loss")


def train_row(row: LeagueRow, folder: Path, *, is_single_process: bool = False, faulty: bool = False) -> RunRecord:
    """Takes the steps of `row` on this rank. Each layout after the first resumes from the checkpoint of the previous one."""
    recorded, plans = RunRecord(), [row.one_process_plan()] if is_single_process else row.plans()
    steps = row.num_steps // len(plans)
    with FAULTS[row.name]() if faulty else nullcontext(), World.join("cpu") as world:
        for index, plan in enumerate(plans):
            with assemble(plan, world) as run:
                if index > 0:
                    run.load_checkpoint(folder / f"saved-{index}")
                recorded.initial_weights = recorded.initial_weights or weights(run)
                for _ in range(steps):
                    if row.offloads and not is_single_process and run.num_steps_done > 0:
                        run.memory.offload()
                        run.memory.onload()
                    recorded.rows.append(run.step())
                    recorded.gradients.append(gradients(run))
                recorded.weights = weights(run)
                if index + 1 < len(plans):
                    run.save_checkpoint(folder / f"saved-{index + 1}")
    return recorded


def plain_loop(plan: Plan, num_steps: int, first: Tensors) -> RunRecord:
    """Takes the same steps in a plain loop that shares no code with the engine. Each microbatch is one document, so that no
    token can attend to another document.
    """
    options, config = plan.data.config.options, plan.optimizer.config
    samples, held_out_samples = RandomSamples(**options), RandomSamples(DataContext(split="held_out"), **options)
    assert isinstance(config, AdamWConfig), config

    def make_optimizer(parameters: NamedParameters) -> torch.optim.Optimizer:
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        groups = decay_groups(trained, config.weight_decay)
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps)

    loop = PlainLoop(plan.model.build(samples.info), LabelSum(), optimizer=make_optimizer, clip_norm=config.clip_norm)
    loop.load(first)
    recorded, size = RunRecord(), plan.batch.global_size
    for step in range(num_steps):
        result = loop.step(documents(samples, range(step * size, (step + 1) * size)))
        row: dict[str, float | int] = {"step": step + 1, "loss": result.loss, "grad_norm": result.grad_norm}
        if plan.evaluation is not None:
            row["held_out_loss"] = loop.evaluate(documents(held_out_samples, range(len(held_out_samples))))
        recorded.rows.append(row)
        recorded.gradients.append(result.gradients)
    recorded.weights = loop.weights
    return recorded


def documents(samples: RandomSamples, indices: Iterable[int]) -> list[Batch]:
    return [document for index in indices for document in samples.split_documents(index)]


class LabelSum:
    """Computes the cross-entropy without the engine. The weight is the number of labels that are not ignored."""

    def weight(self, batch: Batch) -> float:
        return float((batch["labels"] >= 0).sum())

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        is_counted = batch["labels"] >= 0
        return F.cross_entropy(output[is_counted], batch["labels"][is_counted], reduction="sum")


def differences(reference: RunRecord, ranks: Sequence[RunRecord], limit: float) -> Iterator[str]:
    """Yields a line for each number and tensor of a rank whose relative error is larger than `limit`."""

    def compare(label: str, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> Iterator[str]:
        errors = relative_errors({name: expected[name] for name in actual}, actual)
        yield from (f"{label} {name}: {error:.3g}" for name, error in errors.items() if not error <= limit)

    for rank, recorded in enumerate(ranks):
        for step, (expected, actual) in enumerate(zip(reference.rows, recorded.rows, strict=True)):
            numbers = [{name: torch.tensor(row[name]) for name in NUMBERS if name in expected} for row in (expected, actual)]
            yield from compare(f"rank {rank}, step {step}: the", *numbers)
            yield from compare(f"rank {rank}, step {step}: gradient", reference.gradients[step], recorded.gradients[step])
        names = reference.weights.keys() & recorded.weights.keys()
        yield from compare(f"rank {rank}: weight", reference.weights, {name: recorded.weights[name] for name in names})
    assert {name for recorded in ranks for name in recorded.gradients[0]} == set(reference.gradients[0])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[] if row.name in SAMPLE else pytest.mark.campaign, id=row.name) for row in ROWS]
)
def test_row_matches_and_differs_with_its_fault(ranks: Any, tmp_path: Path, row: LeagueRow) -> None:
    reference = train_row(row, tmp_path, is_single_process=True)
    results = ranks(row.num_ranks, 120)(train_row, row, tmp_path)
    assert not [*differences(reference, results, row.limit)]
    if row.has_plain_loop:
        loop = plain_loop(row.one_process_plan(), row.num_steps, reference.initial_weights)
        assert not [*differences(loop, results, row.limit)]
    faulty = ranks(row.num_ranks, 120)(train_row, row, tmp_path / "faulty", faulty=True)
    assert [*differences(reference, faulty, row.limit)], "the row does not see its fault"


def test_rows_have_unique_names_and_faults() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert set(FAULTS) == {row.name for row in ROWS}
