"""A learning rate and a metrics writer of one's own: as records of core do, in every layout, or an error that names it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sley_core.comm.world import World
from sley_core.errors import PlanError, RunError
from sley_core.optim.learning_rate import learning_rate_factor
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import Tables, small_plan
from sley_trainer.assemble import assemble

HERE = Path(__file__).parent


def halved(num_steps: int, ratio: float = 0.5) -> Any:
    return lambda step: 1.0 if step < num_steps - 1 else ratio


def nothing() -> None:
    return None


def negative() -> Any:
    return lambda step: -1.0 if step else 1.0


def by_rank() -> Any:
    import torch.distributed as dist

    return lambda _step: 0.5 + dist.get_rank() / 4


class Rows:
    """Writes the loss of each step to a file of the run's folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = (folder / name).open("w")

    def write(self, row: Mapping[str, float | int]) -> None:
        self.file.write(json.dumps(row["loss"]) + "\n")

    def close(self) -> None:
        self.file.close()


def plan(texts: Path, rate: str, **more: Any) -> Tables:
    files = {"data__files": [str(texts / "text" / "*.txt")]}
    return small_plan(learning_rate={"factory": f"test_factories:{rate}"}, **files, **more)


def test_a_rate_of_ones_own_knows_the_number_of_steps(texts: Path) -> None:
    factor = learning_rate_factor(plan_from_dict(plan(texts, "halved"), HERE))
    assert [factor(step) for step in range(3)] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("rate", "message"), [("nothing", "but returned a NoneType"), ("negative", r"but returned -1.0 at step 1")]
)
def test_what_is_no_rate_is_refused(texts: Path, rate: str, message: str) -> None:
    with World.alone("cpu") as world, pytest.raises(PlanError, match=message):
        assemble(plan_from_dict(plan(texts, rate), HERE), world)


def refused(tables: Tables) -> str:
    with World.join("cpu") as world:
        try:
            assemble(plan_from_dict(tables, HERE), world)
        except RunError as error:
            return str(error)
    return ""


def test_ranks_with_other_rates_are_refused(ranks: Any, texts: Path) -> None:
    found = ranks(2)(refused, plan(texts, "by_rank", parallel__dp=2))
    assert all("learning rates with the digest" in message for message in found)


def test_a_writer_of_ones_own_gets_every_row(texts: Path, tmp_path: Path) -> None:
    own = [{"factory": "test_factories:Rows", "options": {"name": "losses"}}]
    tables = small_plan(metrics=own, data__files=[str(texts / "text" / "*.txt")])
    with World.alone("cpu") as world, assemble(plan_from_dict(tables, HERE), world, folder=tmp_path) as run:
        losses = [run.step()["loss"] for _ in range(2)]
    assert [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()] == losses
