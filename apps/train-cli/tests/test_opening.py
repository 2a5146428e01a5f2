"""What a run says before its first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from train_cli.progress import opening, repeats
from train_cli.summary import RunFacts

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
    return RunFacts("small", world=2, **{"device": "cpu", **sizes, **more})


def test_it_says_how_large_the_run_is() -> None:
    assert opening(facts(), plan("core.jsonl"), HELD).splitlines() == [
        "2 ranks, 1,056,896 parameters, 160 steps of 16 samples = 0.59 epochs (655,360 tokens)",
        "rank 0 holds 4.0 MiB weights, 8.0 MiB masters, 3.0 GiB gradients, and after the first step the optimizer's states",
        "memory below is the peak of rank 0's whole process, libraries included",
    ]


def test_what_is_not_known_is_left_out() -> None:
    first, second, third = opening(
        facts(samples_per_epoch=None, tokens_per_sample=None, trained=8, device="NVIDIA H100"),
        plan("core.jsonl"),
        {**HELD, "masters": 0},
    ).splitlines()
    assert first == "2 ranks, 8 of 1,056,896 parameters trained, 160 steps of 16 samples"
    assert "masters" not in second
    assert third == "memory below is the peak of rank 0's tensors on its GPU, activations included"


def test_a_list_of_writers_without_the_usual_one_is_said() -> None:
    *_, last = opening(facts(), plan("metrics.tensorboard"), HELD).splitlines()
    assert last == "no metrics.jsonl: [[metrics]] lists `metrics.tensorboard`, and not `core.jsonl`"


@pytest.mark.parametrize(
    ("num_samples", "told"),
    [
        (None, ""),
        (32, ""),
        (
            20,
            "only 20 samples are held out, but an evaluation takes 32: each is used about 1.6 times; `[evaluation] steps = 2` "
            "avoids this",
        ),
        (1, "only 1 sample is held out, but an evaluation takes 32: each is used about 32 times; a batch takes 8"),
    ],
)
def test_samples_that_an_evaluation_sees_again_are_said(num_samples: int | None, told: str) -> None:
    evaluates = SimpleNamespace(evaluation=SimpleNamespace(steps=4), batch=SimpleNamespace(global_size=8))
    assert repeats(num_samples, evaluates) == told  # type: ignore[arg-type]
