"""Every row of the parity table has the numbers of one process and of a plain PyTorch loop in each step."""

import copy
import random
from functools import cache
from pathlib import Path
from typing import Any

import parity_table as table
import pytest
import torch
from parity_steps import NUM_STEPS, train
from parity_table import Row

from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.plugin import CrossEntropyConfig
from sley_testing.parity import assert_same_bits
from sley_testing.plain import PlainLoop, decay_groups
from sley_testing.runs import BF16_SUMS, RunRecord, assert_parity_of_parts, running, weights

Key = tuple[str, str, str]
"""The factors of the reference: model, compute, step."""


@cache
def one_process(key: Key, folder: Path) -> RunRecord:
    return train(table.reference(dict(zip(table.REFERENCE, key, strict=True))), folder, key[2])


@cache
def plain_loop(key: Key, folder: Path) -> RunRecord:
    """Takes the same steps with torch's autograd, clipping and optimizer."""
    with running(table.reference(dict(zip(table.REFERENCE, key, strict=True))), folder) as run:
        first = weights(run)
        masters = {master.param.name: master.parameter.detach().clone() for master in run.stepper.update.masters.local_params}
        batches = [run.samples.splitter.split_feed(run.feed.next()).micros for _ in range(NUM_STEPS[key[2]])]
        held_out = [run.held_out.next()]
    config: Any = run.plan.optimizer.config
    loop = PlainLoop(
        [(layer.name, layer.module) for layer in run.layers],
        CrossEntropy(CrossEntropyConfig()),
        optimizer=lambda named: torch.optim.AdamW(decay_groups(named, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-3),
        clip_norm=config.clip_norm,
        clip_kind=float(config.clip_kind),
    )
    loop.load(first | masters)
    recorded = RunRecord(initial_weights=first)
    for number, micros in enumerate(batches):
        if not (key[2] == "second skipped" and number == 1):
            result, tokens = loop.step(micros), sum(micro["tokens"].numel() for micro in micros)
            recorded.rows.append({"step": number + 1, "loss": result.loss, "grad_norm": result.grad_norm, "tokens": tokens})
            recorded.gradients.append(result.gradients)
    recorded.weights, recorded.held_out = first | loop.weights, loop.evaluate(held_out)
    return recorded


def check(ranks: Any, folder: Path, row: Row) -> None:
    """Compares losses, norms, gradients, weights and the held-out loss of each rank. Replicas must have equal bits."""
    size = table.num_ranks(row)
    recorded = ranks(size, 120)(train, table.layout(row), folder, row["step"], late=row["transport"] == "late")
    precision = BF16_SUMS if row["reducer"] == "dp.bucketed in bf16" else row["compute"]
    key = row["model"], row["compute"], row["step"]
    assert_parity_of_parts(one_process(key, folder), recorded, precision)
    if row["compute"] != "fp16":  # a plain loop has no loss scale
        assert_parity_of_parts(plain_loop(key, folder), recorded, precision)
    stage = size // int(row["pp"])
    for rank, replica in enumerate(recorded):
        assert_same_bits(recorded[rank // stage * stage].weights, replica.weights)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=", ".join(row.values()), marks=[pytest.mark.campaign] if at >= table.NUM_IN_CI else [])
        for at, row in enumerate(table.rows())
    ],
)
def test_a_row_of_the_table(ranks: Any, texts: Path, row: Row) -> None:
    check(ranks, texts, row)


@pytest.mark.campaign
def test_random_rows(ranks: Any, texts: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(100):
        row = table.complete(draw, {})
        assert row is not None
        print(row, flush=True)
        check(ranks, texts, row)


def test_a_wrong_gradient_is_detected(texts: Path) -> None:
    key = ("untied and cut", "fp32", "all taken")
    assert_parity_of_parts(plain_loop(key, texts), [one_process(key, texts)], "fp32")
    wrong = copy.deepcopy(one_process(key, texts))
    wrong.gradients[0]["blocks.0.attention_norm.weight"] *= 1 + 1e-5
    with pytest.raises(AssertionError, match=r"blocks\.0\.attention_norm\.weight"):
        assert_parity_of_parts(plain_loop(key, texts), [wrong], "fp32")


def test_the_page_describes_the_table() -> None:
    assert table.PAGE.read_text("utf-8") == table.page(), "run python apps/train-cli/tests/own/parity_table.py"
