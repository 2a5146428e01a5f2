"""Which files belong to libraries."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import torch

from sley_core.factory import is_installed


def test_python_and_packages_are_libraries_and_a_project_is_not() -> None:
    assert is_installed(json.__file__)
    assert is_installed(torch.__file__)
    assert not is_installed(__file__)


def test_a_project_in_or_beside_an_environment_is_no_library() -> None:
    environment = sysconfig.get_path("data")
    assert not is_installed(f"{environment}-project/model.py")
    assert not is_installed(str(Path(environment, "src", "model.py")))
