"""What is wrong with the user's own code, or in the way of the run's folder, is one diagnostic at its place in the plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLAN_INVALID = 3

Refused = Callable[..., None]


def test_factory_not_importable(own_model: Callable[[str], Path], refused: Refused) -> None:
    path = own_model("import nothing_of_this_name")
    refused(path, "factory-import", '"own:layers"')


def test_factory_returns_no_layers(own_model: Callable[[str], Path], refused: Refused) -> None:
    refused(own_model("def layers(): return 42"), "model-factory", "[model]")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("self.rows = torch.nn.Parameter(self.weight[:4])", "model-init"),
        ("self.kept = [self.weight]", "model-init"),
        ("self.weight.register_post_accumulate_grad_hook(lambda weight: None)", "model-hook"),
    ],
    ids=["shared memory", "held unregistered", "hook on a sum"],
)
def test_parameters_that_a_run_would_not_train_alike(
    own_model: Callable[[str], Path], refused: Refused, line: str, code: str
) -> None:
    path = own_model(
        f"""
        import torch

        class Table(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(256, 256))
                {line}

            def forward(self, tokens):
                return self.weight[tokens]

        def layers():
            return [Table()]
        """
    )
    refused(path, code, "[model]")


def test_a_plain_error_in_a_factory_is_placed_in_its_file(
    own_model: Callable[[str], Path], cli: Callable[..., Any], folder: Path
) -> None:
    path = own_model("def layers():\n    return [1 / 0]")
    result = cli("run", path, "--message-format", "short")
    assert result.code == PLAN_INVALID
    assert "ZeroDivisionError" in result.err
    assert "Traceback" not in result.err
    assert not (folder / "runs").exists()


def test_run_folder_exists(plan: Path, folder: Path, refused: Refused) -> None:
    (folder / "runs" / "small").mkdir(parents=True)
    (folder / "runs" / "small" / "notes.txt").write_text("mine", "utf-8")
    refused(plan, "run-folder", '"small"')
    # Not even then: it is not the folder of a run.
    refused(plan, "run-folder", '"small"', "--overwrite")


def test_run_folder_below_a_file(plan: Path, folder: Path, refused: Refused) -> None:
    (folder / "runs").touch()
    refused(plan, "run-folder", "[run]")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_folder_not_writable(plan: Path, folder: Path, refused: Refused) -> None:
    (folder / "runs").mkdir(mode=0o500)
    refused(plan, "run-folder", "[run]")
