"""Tests a checkpointer of a third party and its bugs with the contract of checkpointers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan
from sley_testing.state_contract import CheckpointerContract

pytestmark = pytest.mark.usefixtures("installed")


@pytest.mark.campaign  # the tests of checkpoint run this contract
class TestPickles(CheckpointerContract):
    checkpoint: ClassVar[dict[str, Any]] = {"use": "pickles.folder"}


def test_keep_best_is_refused(texts: Path) -> None:
    evaluation = {"every": 1, "keep_best": "held_out_loss"}
    tables = small_plan(checkpoint=TestPickles.checkpoint, evaluation=evaluation)
    problems = check_plan(plan_from_dict(tables, texts), 1)
    assert [(problem.code, problem.message) for problem in problems] == [
        ("keep-best", "`pickles.folder` does not support `keep_best`")
    ]


@pytest.mark.parametrize(
    ("bug", "test"),
    [
        ("weights", "test_resumed_run_is_bit_identical"),
        ("states", "test_resumed_run_is_bit_identical"),
        ("oldest", "test_auto_loads_newest_checkpoint"),
    ],
)
def test_checkpointer_bug_is_reported(
    monkeypatch: pytest.MonkeyPatch, texts: Path, tmp_path: Path, bug: str, test: str
) -> None:
    from sley_pickles.checkpointer import Pickles

    read: Callable[..., Any] = Pickles._read

    def read_with_bug(self: Any, folder: Path) -> Any:
        if bug == "oldest":
            return read(self, sorted(folder.parent.glob("step-*"))[0])
        saved = read(self, folder)
        for name, tensor in saved._tensors.items():
            if name.startswith("weights/" if bug == "weights" else "optimizer/") and tensor.dim():
                tensor.copy_(torch.zeros_like(tensor))
        return saved

    monkeypatch.setattr(Pickles, "_read", read_with_bug)
    with pytest.raises(AssertionError):
        getattr(TestPickles(), test)(texts, tmp_path)
