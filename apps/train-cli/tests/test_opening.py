"""What a run says before its first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sley_core.metrics.summary import RunFacts
from train_cli.opening import opening, repeats

HELD = {"weights": 4 << 20, "masters": 8 << 20, "gradients": 3 << 30, "optimizer_states": 0}


def plan(*metrics: str) -> Any:
    run = SimpleNamespace(steps=160)
    return SimpleNamespace(run=run, metrics=[SimpleNamespace(name=name) for name in metrics])


def facts(**more: Any) -> RunFacts:
    sizes = {
        "parameters": 1056896,
        "trained": 1056896,
        "samples_per_step": 16,
        "samples_per_epoch": 4352,
        "tokens_per_sample": 256,
    }
    return RunFacts("small", "cpu", 2, **{**sizes, **more})


def test_it_says_how_large_the_run_is() -> None:
    assert opening(facts(), plan("core.jsonl"), HELD).splitlines() == [
        "2 ranks, 1,056,896 parameters, 160 steps of 16 samples = 0.59 epochs (655,360 tokens)",
        "per rank 4.0 MiB weights, 8.0 MiB masters, 3.0 GiB gradients, and the optimizer's states",
    ]


def test_what_is_not_known_is_left_out() -> None:
    first, second = opening(
        facts(samples_per_epoch=None, tokens_per_sample=None, trained=8), plan("core.jsonl"), {**HELD, "masters": 0}
    ).splitlines()
    assert first == "2 ranks, 8 of 1,056,896 parameters trained, 160 steps of 16 samples"
    assert "masters" not in second


def test_a_list_of_writers_without_the_usual_one_is_said() -> None:
    *_, last = opening(facts(), plan("core.tensorboard"), HELD).splitlines()
    assert last == "no metrics.jsonl: [[metrics]] lists `core.tensorboard`, and not `core.jsonl`"


@pytest.mark.parametrize(
    ("num_samples", "told"),
    [
        (None, ""),
        (32, ""),
        (
            20,
            "an evaluation of 32 samples goes 1.6 times through the held-out data, 20 samples, of which 2 batches of 8 would "
            "take none twice",
        ),
        (1, "an evaluation of 32 samples goes 32 times through the held-out data, 1 sample"),
    ],
)
def test_samples_that_an_evaluation_sees_again_are_said(num_samples: int | None, told: str) -> None:
    evaluates = SimpleNamespace(evaluation=SimpleNamespace(steps=4), batch=SimpleNamespace(global_size=8))
    assert repeats(num_samples, evaluates) == told  # type: ignore[arg-type]
