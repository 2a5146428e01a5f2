"""Tests that `watch.noise` and `watch.layers` pass the contract of handlers, and compares their numbers with direct
computations.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sley_core.comm.world import World
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.contract import GradientHandlerContract
from sley_testing.plans import changed, small_plan
from sley_testing.runs import record
from sley_trainer.assemble import assemble

TESTS = Path(__file__).parent
NOISE: dict[str, Any] = {"use": "watch.noise", "smoothing": 0.5}
CORE_REDUCER = {"use": "core.each"}
SAMPLES, RANKS = 8, 2
PLAN: dict[str, Any] = {
    "run": {"name": "dots", "steps": 9, "device": "cpu"},
    "model": {"factory": "watch_data:layers"},
    "data": {"factory": "watch_data:Samples"},
    "loss": {"factory": "watch_data:Dot"},
    "batch": {"global_size": SAMPLES, "micro_size": 2},
    "optimizer": {"use": "core.sgd", "lr": 0.1, "clip_norm": 0.1},
    "precision": {"compute": "fp64"},
    "parallel": {"dp": RANKS},
    "gradient_handlers": [NOISE, CORE_REDUCER],
}


class TestNoise(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = NOISE


@pytest.mark.campaign
class TestLayers(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "watch.layers"}


def noise_scales_and_samples(num_steps: int) -> tuple[list[float], list[Tensor]]:
    """Returns the noise scale of each row, and the samples of this rank, [samples, WIDTH]."""
    with World.join("cpu") as world, assemble(plan_from_dict(PLAN, TESTS), world) as run:
        scales, samples = [], []
        assert run.feed is not None
        for _ in range(num_steps):
            scales.append(run.step()["watch/noise_scale"])
            samples.append(torch.stack([run.dataset[index]["x"] for index in run.feed.samples]))  # type: ignore[index]
        return scales, samples


def expected_noise_scales(batches: list[Tensor]) -> list[float]:
    """Returns the noise scale after each of these batches, [ranks, samples, WIDTH], by the paper's formulas."""
    small_size, full_size = SAMPLES / RANKS, float(SAMPLES)
    scales, length, spread = [], 0.0, 0.0
    for batch in batches:
        small = float(batch.mean(1).square().sum(1).mean())
        large = float(batch.mean((0, 1)).square().sum())
        length = 0.5 * length + 0.5 * (full_size * large - small_size * small) / (full_size - small_size)
        spread = 0.5 * spread + 0.5 * (small - large) / (1 / small_size - 1 / full_size)
        scales.append(spread / length)
    return scales


def test_noise_scale_matches_paper(ranks: Callable[..., Any]) -> None:
    """The gradient of a sample is the sample, so the batches determine the scale, with and without clipping."""
    (scales, first), (second_scales, second) = ranks(RANKS)(noise_scales_and_samples, 6)
    assert scales == second_scales
    assert scales == pytest.approx(expected_noise_scales([torch.stack(pair) for pair in zip(first, second, strict=True)]))


def run_and_resume(path: Path) -> tuple[list[float], list[float]]:
    """Returns the last two noise scales of an uninterrupted run, and those of a run that was resumed after two steps."""
    whole = record(PLAN, 4, folder=TESTS)
    record(PLAN, 2, folder=TESTS, save=path)
    resumed = record(PLAN, 2, folder=TESTS, load=path)
    first, second = ([row["watch/noise_scale"] for row in rows] for rows in (whole.rows[2:], resumed.rows))
    return first, second


def test_averages_are_restored(ranks: Callable[..., Any], tmp_path: Path) -> None:
    for expected, actual in ranks(RANKS)(run_and_resume, tmp_path / "saved"):
        assert actual == expected


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"parallel": {"dp": 1}}, "watch-layout"),
        ({"parallel": {"dp": 2, "sp": 2}}, "watch-layout"),
        ({"precision": {"compute": "fp16"}}, "handler-precision"),
    ],
)
def test_unsupported_noise_plans_are_refused(changes: dict[str, Any], code: str) -> None:
    plan = plan_from_dict(changed(PLAN, **changes), TESTS)
    assert code in {problem.code for problem in check_plan(plan, plan.world_size())}


def layer_norm_plan(texts: Path, dp: int) -> dict[str, Any]:
    return small_plan(parallel={"dp": dp}, gradient_handlers=[{"use": "core.each"}, {"use": "watch.layers"}])


def test_layer_norms_add_up_to_model_norm(ranks: Callable[..., Any], texts: Path) -> None:
    """Compares the sum of squared layer norms with the squared gradient norm, and two ranks with one process."""
    baseline = record(layer_norm_plan(texts, 1), 2, folder=texts)
    (actual, _) = ranks(2)(record, layer_norm_plan(texts, 2), 2, folder=texts)
    for expected_row, actual_row in zip(baseline.rows, actual.rows, strict=True):
        norms = {name: value for name, value in expected_row.items() if name.startswith("watch/")}
        assert {name.split("/")[-1] for name in norms} == {"embed", "blocks.0", "blocks.1", "head"}
        assert {name: actual_row[name] for name in norms} == pytest.approx(norms, rel=1e-9)
        total = sum(value**2 for name, value in norms.items() if "gradient_norm" in name)
        assert total == pytest.approx(expected_row["grad_norm"] ** 2, rel=1e-12)
    weights = {
        name: value
        for name, value in baseline.initial_weights.items()
        if name.startswith("blocks.0.") and name.endswith("weight")
    }
    squares = sum(float(value.double().square().sum()) for value in weights.values())
    assert baseline.rows[0]["watch/weight_norm/blocks.0"] ** 2 == pytest.approx(squares)
