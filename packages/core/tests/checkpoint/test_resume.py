"""A run that goes on from a checkpoint is the run that was never stopped."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.testing.plans import changed, small_plan
from sley_core.testing.resumed import assert_goes_on, assert_same_stretch, saving_at, stretch

DP = {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]}


def plan(**changes: Any) -> dict[str, Any]:
    return changed(small_plan(run__steps=6, batch__micro_size=4, learning_rate={"use": "core.cosine"}), **changes)


KINDS = {
    "fp64": {},
    "fp32": {"precision__compute": "fp32"},
    "bf16, with masters": {"precision__compute": "bf16"},
    "fp16, with a scale that moves": {
        "precision": {"compute": "fp16", "loss_scale": {"init_scale": 2.0**18, "growth_interval": 2}}
    },
    "momentum": {"optimizer": {"use": "core.sgd", "lr": 0.1, "momentum": 0.9}},
    "a factory's optimizer": {"optimizer": {"factory": "torch.optim:NAdam", "lr": 1e-3}},
    "per matrix": {"optimizer": {"factory": "torch.optim:Adafactor", "lr": 1e-2}},
    "values in states": {"optimizer": {"factory": "torch.optim:Rprop", "lr": 1e-3}},
    "frozen": {"optimizer__groups": [{"match": "blocks.0.*", "freeze": True}]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_layout_goes_on_bit_for_bit(texts, tmp_path, kind):
    tables = plan(**KINDS[kind])
    whole = stretch(tables, 6, folder=texts, prepare=saving_at(3, tmp_path / "saved"))
    assert_same_stretch([whole], [stretch(tables, 3, folder=texts, load=tmp_path / "saved")])


def test_two_replicas_go_on_bit_for_bit(texts, tmp_path, ranks):
    tables = plan(**DP, precision__compute="bf16")
    whole = ranks(2, init=False)(stretch, tables, 6, folder=texts, prepare=saving_at(3, tmp_path / "saved"))
    assert_same_stretch(whole, ranks(2, init=False)(stretch, tables, 3, folder=texts, load=tmp_path / "saved"))


def test_the_number_of_replicas_may_change(texts, tmp_path, ranks):
    whole = stretch(plan(), 6, folder=texts)
    ranks(2, init=False)(stretch, plan(**DP), 2, folder=texts, save=tmp_path / "of two")
    assert_goes_on(whole, [stretch(plan(), 4, folder=texts, load=tmp_path / "of two")], "fp64")
    stretch(plan(), 2, folder=texts, save=tmp_path / "of one")
    assert_goes_on(whole, ranks(2, init=False)(stretch, plan(**DP), 4, folder=texts, load=tmp_path / "of one"), "fp64")
