"""What the tests of the engine share: a small plan over models and data of their own, and one process to run it in."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

OWN = Path(__file__).parent / "own"
PLAN = small_plan(
    run__seed=3,
    model={"factory": "own_models:plain"},
    data={"factory": "own_data:Rows"},
    batch={"global_size": 4, "micro_size": 1},
    optimizer={"use": "core.sgd", "lr": 0.1},
)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the plans' own modules; it is on the path, in ranks too."""
    monkeypatch.syspath_prepend(OWN)
    return OWN


@pytest.fixture
def small(own: Path) -> Callable[..., dict[str, Any]]:
    """`small(table__key=value, ...)`: the tables of the small plan with these changes; None leaves the key out."""

    def small(**changes: Any) -> dict[str, Any]:
        return changed(PLAN, **changes)

    return small


@pytest.fixture
def alone(own: Path) -> Callable[..., AbstractContextManager[Run]]:
    """`with alone(tables) as run`: the run of a plan in this process; further arguments are those of `plan_from_dict`."""

    @contextmanager
    def alone(tables: dict[str, Any], **arguments: Any) -> Iterator[Run]:
        with assemble(plan_from_dict(tables, own, **arguments), World.alone("cpu")) as run:
            yield run

    return alone
