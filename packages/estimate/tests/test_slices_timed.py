"""Layers of a slice are timed where no other rank is: whatever their attention exchanges brings what this rank has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict
from sley_estimate.calibrate import echo
from sley_estimate.calibrate.layers import measure_layers
from sley_estimate.testing.short_calibration import shortly
from sley_testing.plans import small_plan

OWN = Path(__file__).parent / "own"


@pytest.fixture
def seen(plugin_folder: Callable[..., None]) -> Iterator[list[torch.Tensor]]:
    """What attentions looked along, with the plugin `asking` installed."""
    plugin_folder(OWN, asking="asking_attention")
    import asking_attention  # type: ignore[import-not-found]  # in the folder that was just installed

    asking_attention.Gathers.seen.clear()
    yield asking_attention.Gathers.seen
    asking_attention.Gathers.seen.clear()


def timed(attention: str) -> list[dict[str, Any]]:
    """The tables of a plan's layers, on one of three slices."""
    changes = {"parallel": {"sp": 3}, "sequence": {"use": f"asking.{attention}"}, "model__num_layers": 1}
    plan = plan_from_dict(small_plan(data={"use": "data.text", "source": "python-stdlib", "sequence": 24}, **changes))
    with World.alone("cpu") as world, shortly():
        return measure_layers(plan, world.device)


@pytest.mark.parametrize("attention", ["gathers", "published", "sums", "functions", "ring"])
def test_an_attention_gets_its_own_slice_in_the_place_of_each_other(seen: list[torch.Tensor], attention: str) -> None:
    tables = timed(attention)
    assert [table["name"] for table in tables] == ["embed", "blocks.0", "head"]
    assert seen
    for whole in seen:
        own, *others = whole.chunk(3, dim=1)
        assert own.shape[1] == 8
        assert own.abs().max() > 0
        for other in others:
            torch.testing.assert_close(other, own)


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize(
    ("attention", "asked"),
    [("only", "waits for a message (a slice)"), ("raw", "asks for the communicator"), ("early", "asks for the comm")],
)
def test_what_only_other_ranks_can_answer_is_told_with_the_table_that_asks(attention: str, asked: str) -> None:
    with pytest.raises(PlanError) as raised:
        timed(attention)
    (one,) = raised.value.diagnostics
    assert (one.code, one.path) == ("calibrate-slice", ("sequence", "use"))
    assert one.message.startswith(f'the attention of `[sequence] use = "asking.{attention}"` {asked}')
    assert one.hint is not None
    assert "group.transport()" in one.hint


@pytest.mark.usefixtures("seen")
def test_what_an_exchange_copies_is_not_among_the_seconds_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates count it with the exchange, which is timed by itself; it was counted with the layer too."""
    put, copies = echo.put, []

    def slowly(shard: torch.Tensor, place: torch.Tensor) -> None:
        copies.append(shard)
        time.sleep(0.02)
        put(shard, place)

    monkeypatch.setattr(echo, "put", slowly)
    block = timed("gathers")[1]
    assert len(copies) == 2 * (1 + 3) * 3 * 3, "whole and in halves, of q, k and v, from each of three ranks"
    assert block["forward"] < 0.1 < 3 * 3 * 0.02
