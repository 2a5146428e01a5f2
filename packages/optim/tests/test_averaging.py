"""Averages of the weights equal those of torch's AveragedModel in a plain loop, in every layout and after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from averaging_runs import EMA, MEAN, Tables, average_plainly, average_with_torch, plan, train, train_and_resume

from sley_testing.parity import assert_close_gradients
from sley_testing.plans import changed
from sley_testing.runs import WEIGHTS

RULES: dict[str, Any] = {
    "ema": EMA,
    "ema of every second step": EMA | {"every": 2},
    "mean": MEAN,
    "mean of every third step": MEAN | {"every": 3},
}
LAYOUTS: dict[str, Tables] = {
    "sharded": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.001}]},
    "wp": {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}},
    "pp": {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}},
}


@pytest.mark.parametrize("name", RULES)
def test_one_process_averages_as_torch_does(name, tmp_path):
    result = train(plan(RULES[name]), tmp_path)
    expected = average_plainly(RULES[name], result.first)
    assert_close_gradients(expected, result.files, 1e-10)
    assert_close_gradients(expected, result.exported, 1e-10)


@pytest.mark.parametrize("averaging", [EMA, MEAN], ids=["ema", "mean"])
def test_layouts_average_as_torch_does_and_resume_in_one_another(ranks, tmp_path, averaging):
    plans = [changed(plan(averaging), **layout) for layout in LAYOUTS.values()]
    by_rank = ranks(2)(train_and_resume, plans, tmp_path)
    expected = average_plainly(averaging, train(plan(averaging), tmp_path).first)
    for results in by_rank:
        for whole, resumed, other in results:
            assert resumed.bits == whole.bits
            for result in (whole, resumed, other):
                assert_close_gradients(expected, result.files, 1e-10)
                assert_close_gradients(expected, result.exported, 1e-10)


def test_fp32_masters_of_bf16_weights_are_averaged(ranks, tmp_path):
    """Compares with averages of the masters of the same run, since gradients in bf16 differ between layouts."""
    plans = [changed(plan(EMA), precision__compute="bf16", **layout) for layout in LAYOUTS.values()]
    for results in ranks(2)(train_and_resume, plans, tmp_path):
        for whole, resumed, other in results:
            expected = average_with_torch(EMA, whole.masters)
            assert {value.dtype for value in expected.values()} == {torch.float32}
            assert resumed.bits == whole.bits
            assert_close_gradients(expected, {name: whole.files[name] for name in expected}, 1e-6)
            assert_close_gradients(whole.files, resumed.exported, 1e-6)
            assert_close_gradients(whole.files, other.files, WEIGHTS["bf16"])
