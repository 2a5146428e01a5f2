"""A run that goes on from a checkpoint is the run that was never stopped."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any, ClassVar

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import SleyError
from sley_core.plan.load import plan_from_dict
from sley_testing.attention_contract import tables as with_dropout
from sley_testing.checkpointer_contract import CheckpointerContract, assert_same_stretch, save_at, stretch
from sley_testing.plans import changed, small_plan

DP = {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]}


def plan(**changes: Any) -> dict[str, Any]:
    return changed(small_plan(run__steps=6, batch__micro_size=4, learning_rate={"use": "core.cosine"}), **changes)


KINDS = {
    "bf16, with masters": {"precision__compute": "bf16"},
    "fp32": {"precision__compute": "fp32"},
    "a factory's optimizer": {"optimizer": {"factory": "torch.optim:NAdam", "lr": 1e-3}},
    "fp16, with a scale that moves": {
        "precision": {"compute": "fp16", "loss_scale": {"init_scale": 2.0**18, "growth_interval": 2}}
    },
    "momentum": {"optimizer": {"use": "core.sgd", "lr": 0.1, "momentum": 0.9}},
    "values in states": {"optimizer": {"factory": "torch.optim:Rprop", "lr": 1e-3}},
    "per matrix": {"optimizer": {"factory": "torch.optim:Adafactor", "lr": 1e-2}},
    "frozen": {"optimizer__groups": [{"match": "blocks.0.*", "freeze": True}]},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_layout_goes_on_bit_for_bit(texts, tmp_path, kind):
    tables = plan(**KINDS[kind])
    whole = stretch(tables, 6, folder=texts, prepare=partial(save_at, 3, tmp_path / "saved"))
    assert_same_stretch([whole], [stretch(tables, 3, folder=texts, load=tmp_path / "saved")])


def put(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def swapped(folder: Path) -> None:
    one, other = (folder / "text" / name for name in ("a.txt", "b.txt"))
    put(one, lambda text: text + other.read_bytes())
    put(other, lambda text: one.read_bytes()[: -len(text)])
    put(one, lambda text: text[-len(other.read_bytes()) :])


CHANGES: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "every letter": (lambda to: put(to / "text/b.txt", lambda text: text.replace(b"home", b"away")), True),
    "one letter": (lambda to: put(to / "text/a.txt", lambda text: text[:-1] + b"!"), True),
    "names": (swapped, True),
    "the order of documents": (lambda to: put(to / "text/a.txt", lambda text: b"\n\n".join(text.split(b"\n\n")[::-1])), True),
    "a boundary": (lambda to: put(to / "text/a.txt", lambda text: text.replace(b"\n\n", b"\n ", 1)), True),
    "the clock": (lambda to: os.utime(to / "text/a.txt", (1, 1)), False),
    "a name, in the same order": (lambda to: (to / "text/b.txt").rename(to / "text/c.txt"), False),
    "another document": (lambda to: (to / "text/c.txt").write_text("another " * 9), True),
    "nothing": (lambda _: None, False),
    "a token": (lambda to: put(to / "ids.bin", lambda ids: ids[:4000] + b"\1" + ids[4001:]), True),
    "tokens at the end": (lambda to: put(to / "ids.bin", lambda ids: ids[:-2] + b"\1\0"), True),
}


def loaded(tables: dict[str, Any], folders: list[Path], path: Path) -> str:
    """Returns why this rank refuses the checkpoint, with its data in the folder of its number; "" if it does not."""
    try:
        stretch(tables, 1, folder=folders[int(os.environ.get("RANK", "0"))], load=path)
    except SleyError as error:
        return error.diagnostics[0].code
    return ""


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_than_those_of_the_checkpoint_are_refused(texts, tmp_path, change):
    make, is_refused = CHANGES[change]
    before, now = tmp_path / "before", tmp_path / "now"
    copytree(texts, before)
    drawn = Random(0)
    (before / "ids.bin").write_bytes(array("H", [drawn.randrange(200) for _ in range(4000)]).tobytes())
    copytree(before, now)
    tables = plan()
    if "token" in change:
        data = {"use": "data.tokens", "files": ["ids.bin"], "vocab_size": 256, "sequence": 24}
        tables = plan(data=data)
    stretch(tables, 1, folder=before, save=tmp_path / "saved")
    make(now)
    assert loaded(tables, [now], tmp_path / "saved") == ("data-changed" if is_refused else "")


def test_all_ranks_refuse_data_that_have_changed_or_that_differ_between_them(texts, tmp_path, ranks):
    now = tmp_path / "now"
    copytree(texts, now)
    put(now / "text/a.txt", lambda text: text[:-1] + b"!")
    stretch(plan(), 1, folder=texts, save=tmp_path / "saved")
    assert ranks(2, init=False)(loaded, plan(**DP), [now, now], tmp_path / "saved") == ["data-changed"] * 2
    assert ranks(2, init=False)(loaded, plan(**DP), [texts, now], tmp_path / "saved") == ["ranks-disagree"] * 2


class Samples:
    """Samples of a program's own; another length and other samples by the environment."""

    def __init__(self) -> None:
        self.shift = int(os.environ.get("SHIFT", "0"))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (torch.arange(25) * (index + 3) + self.shift) % 256
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def test_other_samples_of_a_programs_own_are_said(tmp_path, monkeypatch):
    data = {"factory": f"{__name__}:Samples", "vocab_size": 256, "sequence": 24}
    tables = plan(data=data, checkpoint={"every_steps": 5})
    stretch(tables, 1, save=tmp_path / "saved")
    assert not stretch(tables, 1, load=tmp_path / "saved").notes
    monkeypatch.setenv("SHIFT", "1")
    (note,) = stretch(tables, 1, load=tmp_path / "saved").notes
    assert "the length of the dataset, or samples" in note


# -- what resumed runs of others got wrong without a word, each with a loss that looks right ------------------------------


@dataclass
class Seen:
    """Of each step of one rank. masks: sums of what the first dropout let through."""

    samples: list[tuple[int, ...]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)


def seen(
    tables: dict[str, Any], num_steps: int, folder: Path | None, load: Path | None = None, save: Path | None = None
) -> Seen:
    """Takes `num_steps` steps, from a checkpoint and to another if they are given."""
    found = Seen()
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
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
    tables = small_plan(run__steps=12, batch={"global_size": 32, "micro_size": 16})
    whole = seen(tables, 12, texts)
    first = seen(tables, 5, texts, save=tmp_path / "at")
    rest = seen(tables, 7, texts, load=tmp_path / "at")
    assert first.samples + rest.samples == whole.samples
    every = list(chain(*whole.samples))
    assert len(set(every)) < len(every), "an epoch has ended"


def test_the_position_of_every_rank_is_kept_by_fewer_and_by_more(texts, tmp_path, ranks):
    tables = small_plan(run__steps=6, batch__micro_size=4)
    whole = seen(tables, 6, texts)
    two = changed(tables, **DP)
    of_two = ranks(2, init=False)(seen, two, 3, texts, None, tmp_path / "of two")
    assert [one + other for one, other in zip(*(rank.samples for rank in of_two), strict=True)] == whole.samples[:3]
    assert seen(tables, 3, texts, load=tmp_path / "of two").samples == whole.samples[3:]
    seen(tables, 3, texts, save=tmp_path / "of one")
    again = ranks(2, init=False)(seen, two, 3, texts, tmp_path / "of one")
    assert [one + other for one, other in zip(*(rank.samples for rank in again), strict=True)] == whole.samples[3:]


@pytest.mark.parametrize("size", [1, 2])
def test_draws_are_those_of_a_run_in_one_go_and_differ_between_ranks(tmp_path, ranks, size):
    tables = changed(with_dropout(None, dropout=0.3), run__steps=6, **(DP if size == 2 else {}))
    whole = ranks(size, init=False)(seen, tables, 6, None)
    ranks(size, init=False)(seen, tables, 3, None, None, tmp_path / "at")
    rest = ranks(size, init=False)(seen, tables, 3, None, tmp_path / "at")
    for one, other in zip(whole, rest, strict=True):
        assert other.losses == one.losses[3:]
        assert other.masks == one.masks[-len(other.masks) :]
    assert len({tuple(rank.masks) for rank in rest}) == size, "ranks that draw alike"


class TestAnyLayout(CheckpointerContract):
    checkpoint: ClassVar[dict[str, Any]] = {"use": "checkpoint.any_layout"}
