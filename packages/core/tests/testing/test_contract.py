"""The contract of gradient handlers puts a handler where its record says that it must stand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from sley_core.testing.contract import GradientHandlerContract
from sley_core.testing.ranks import Ranks

SOURCE = """\
from sley_core.hookspecs import hookimpl
from sley_core.table import Table
from sley_core.protocols import GradientHandler
from sley_core.records import GradientHandlerRecord


class Nothing(Table):
    '''A table without keys.'''


class Early(GradientHandler):
    '''Sees what this rank has before the reducer sums it, as a gradient noise scale must.'''

    def __init__(self, config):
        self.norms = []

    def attach(self, parts):
        self.store = parts.store

    def gradient_ready(self, entry, step):
        self.norms.append(float(self.store.gradient(entry).norm()))


@hookimpl
def sley_gradient_handlers():
    early = "early_of_a_test:Early"
    return [GradientHandlerRecord(name="seen", config=Nothing, build=early, role="observer", before=("reducer",))]
"""


class Early(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "early.seen"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with the plugin `early` on sys.path, as pip leaves it."""
    (tmp_path / "early_of_a_test.py").write_text(SOURCE, "utf-8")
    info = tmp_path / "early-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: early\nVersion: 1.0\nRequires-Dist: sley-core\n")
    (info / "entry_points.txt").write_text("[sley.plugins]\nearly = early_of_a_test\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_a_handler_that_must_stand_before_the_reducer_can_hold_the_contract(ranks: Callable[..., Ranks]) -> None:
    Early().test_reduces_as_its_record_promises(ranks(2), 1)
    Early().test_recovers_from_a_failed_backward(ranks(2))
