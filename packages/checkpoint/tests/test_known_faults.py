"""What resumed runs of others got wrong without a word: data that starts over, draws that shift, rows that are skipped.

Each of these gives a loss that looks right. Here the samples and the draws themselves are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.attention_contract import tables
from sley_testing.plans import Tables, changed, small_plan

TWO = {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]}


@dataclass
class Seen:
    """Of each step of one rank. masks: sums of what the first dropout let through."""

    samples: list[tuple[int, ...]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)


def seen(plan: Tables, num_steps: int, folder: Path | None, load: Path | None = None, save: Path | None = None) -> Seen:
    """Takes `num_steps` steps, from a checkpoint and to another if they are given."""
    found = Seen()
    with World.join("cpu") as world, assemble(plan_from_dict(plan, folder), world) as run:
        if load is not None:
            run.load_checkpoint(load)
        for layer in run.layers:
            for module in layer.module.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.register_forward_hook(lambda _, given, out: found.masks.append(float((out != 0).sum())))
        for _ in range(num_steps):
            found.losses.append(float(run.step()["loss"]))
            assert run.feed is not None
            found.samples.append(run.feed.samples)
        if save is not None:
            run.save_checkpoint(save)
    return found


def test_data_goes_on_and_no_row_is_skipped_or_taken_twice(texts, tmp_path):
    """Also the batch that was read ahead when the run was saved, and over the end of an epoch."""
    plan = small_plan(run__steps=12, batch={"global_size": 32, "micro_size": 16})
    whole = seen(plan, 12, texts)
    first = seen(plan, 5, texts, save=tmp_path / "at")
    rest = seen(plan, 7, texts, load=tmp_path / "at")
    assert first.samples + rest.samples == whole.samples
    every = list(chain(*whole.samples))
    assert len(set(every)) < len(every), "an epoch has ended"


def test_the_position_of_every_rank_is_kept_by_fewer_and_by_more(texts, tmp_path, ranks):
    plan = small_plan(run__steps=6, batch__micro_size=4)
    whole = seen(plan, 6, texts)
    two = changed(plan, **TWO)
    of_two = ranks(2, init=False)(seen, two, 3, texts, None, tmp_path / "of two")
    assert [one + other for one, other in zip(*(rank.samples for rank in of_two), strict=True)] == whole.samples[:3]
    assert seen(plan, 3, texts, load=tmp_path / "of two").samples == whole.samples[3:]
    seen(plan, 3, texts, save=tmp_path / "of one")
    again = ranks(2, init=False)(seen, two, 3, texts, tmp_path / "of one")
    assert [one + other for one, other in zip(*(rank.samples for rank in again), strict=True)] == whole.samples[3:]


@pytest.mark.parametrize("size", [1, 2])
def test_draws_are_those_of_a_run_in_one_go_and_differ_between_ranks(tmp_path, ranks, size):
    plan = changed(tables(None, dropout=0.3), run__steps=6, **(TWO if size == 2 else {}))
    whole = ranks(size, init=False)(seen, plan, 6, None)
    ranks(size, init=False)(seen, plan, 3, None, None, tmp_path / "at")
    rest = ranks(size, init=False)(seen, plan, 3, None, tmp_path / "at")
    for one, other in zip(whole, rest, strict=True):
        assert other.losses == one.losses[3:]
        assert other.masks == one.masks[-len(other.masks) :]
    assert len({tuple(rank.masks) for rank in rest}) == size, "ranks that draw alike"
