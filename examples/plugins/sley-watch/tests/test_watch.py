"""`watch.noise` and `watch.layers` hold the contract of handlers, and give the numbers of a computation by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan, plan_from_dict
from sley_testing.checkpointer_contract import stretch
from sley_testing.contract import GradientHandlerContract
from sley_testing.plans import changed, small_plan
from sley_testing.runs import record

HERE = Path(__file__).parent
NOISE: dict[str, Any] = {"use": "watch.noise", "smoothing": 0.5}
EACH = {"use": "core.each"}
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
    "gradient_handlers": [NOISE, EACH],
}


class TestNoise(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = NOISE


class TestLayers(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "watch.layers"}


def stepped(num_steps: int) -> tuple[list[float], list[Tensor]]:
    """Runs on each rank: the noise scale of each row, and the samples that this rank had, [samples, WIDTH]."""
    with World.join("cpu") as world, assemble(plan_from_dict(PLAN, HERE), world) as run:
        scales, given = [], []
        assert run.feed is not None
        for _ in range(num_steps):
            scales.append(run.step()["watch/noise_scale"])
            given.append(torch.stack([run.dataset[index]["x"] for index in run.feed.samples]))  # type: ignore[index]
        return scales, given


def by_hand(batches: list[Tensor]) -> list[float]:
    """The noise scale after each of these batches, [ranks, samples, WIDTH], by the paper's formulas."""
    few, many = SAMPLES / RANKS, float(SAMPLES)
    found, length, spread = [], 0.0, 0.0
    for batch in batches:
        small = float(batch.mean(1).square().sum(1).mean())
        large = float(batch.mean((0, 1)).square().sum())
        length = 0.5 * length + 0.5 * (many * large - few * small) / (many - few)
        spread = 0.5 * spread + 0.5 * (small - large) / (1 / few - 1 / many)
        found.append(spread / length)
    return found


def test_the_noise_scale_is_that_of_the_paper(ranks: Callable[..., Any]) -> None:
    """The gradient of a sample is the sample, so the scale follows from the batches alone, clipped or not."""
    (scales, first), (others, second) = ranks(RANKS)(stepped, 6)
    assert scales == others
    assert scales == pytest.approx(by_hand([torch.stack(pair) for pair in zip(first, second, strict=True)]))


def test_the_averages_go_through_a_checkpoint(ranks: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "saved"
    undisturbed = ranks(RANKS)(stretch, PLAN, 4, folder=HERE)
    ranks(RANKS)(stretch, PLAN, 2, folder=HERE, save=path)
    resumed = ranks(RANKS)(stretch, PLAN, 2, folder=HERE, load=path)
    wanted = [row["watch/noise_scale"] for row in undisturbed[0].rows[2:]]
    assert [row["watch/noise_scale"] for row in resumed[0].rows] == wanted


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"parallel": {"dp": 1}}, "watch-layout"),
        ({"parallel": {"dp": 2, "sp": 2}}, "watch-layout"),
        ({"precision": {"compute": "fp16"}}, "handler-precision"),
    ],
)
def test_noise_is_refused_where_it_would_be_wrong(changes: dict[str, Any], code: str) -> None:
    plan = plan_from_dict(changed(PLAN, **changes), HERE)
    assert code in {problem.code for problem in check_plan(plan, plan.world())}


def with_layers(texts: Path, dp: int) -> dict[str, Any]:
    return small_plan(parallel={"dp": dp}, gradient_handlers=[{"use": "core.each"}, {"use": "watch.layers"}])


def test_norms_of_layers_make_up_those_of_the_model(ranks: Callable[..., Any], texts: Path) -> None:
    """The squares of all layers' are the square of the gradient's norm; the same on two ranks as on one."""
    alone = record(with_layers(texts, 1), 2, folder=texts)
    (both, _) = ranks(2)(record, with_layers(texts, 2), 2, folder=texts)
    for one, two in zip(alone.rows, both.rows, strict=True):
        norms = {name: value for name, value in one.items() if name.startswith("watch/")}
        assert {name.split("/")[-1] for name in norms} == {"embed", "blocks.0", "blocks.1", "head"}
        assert {name: two[name] for name in norms} == pytest.approx(norms, rel=1e-9)
        total = sum(value**2 for name, value in norms.items() if "gradient_norm" in name)
        assert total == pytest.approx(one["grad_norm"] ** 2, rel=1e-12)
    weights = {name: value for name, value in alone.first.items() if name.startswith("blocks.0.") and name.endswith("weight")}
    squares = sum(float(value.double().square().sum()) for value in weights.values())
    assert alone.rows[0]["watch/weight_norm/blocks.0"] ** 2 == pytest.approx(squares)


def test_the_plan_of_this_package_is_valid() -> None:
    plan = load_plan(Path(__file__).parents[1] / "plan.toml")
    assert list(check_plan(plan, plan.world())) == []
