"""Averages of the weights equal those of torch's AveragedModel in a plain loop, in every layout and after a resume."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from averaging_runs import (
    EMA,
    MEAN,
    STEPS,
    Tables,
    average_plainly,
    average_with_torch,
    averaging_plan,
    batches,
    train,
    train_and_resume,
)
from torch import nn

from sley_core.checkpointing import AVERAGES
from sley_core.errors import PlanError, RunError, StateError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_optim.plugin import EMAConfig, MeanConfig, build_ema, build_mean
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.plans import changed
from sley_testing.runs import WEIGHTS, running
from sley_trainer.update import Averages

RULES: dict[str, Any] = {
    "ema": EMA,
    "ema of every second step": EMA | {"every": 2},
    "mean": MEAN,
    "mean of every third step": MEAN | {"every": 3},
}
LAYOUTS: dict[str, Tables] = {
    "sharded": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.001}]},
    "pp": {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RULES)
def test_one_process_averages_as_torch_does(name, tmp_path):
    result = train(averaging_plan(RULES[name]), tmp_path)
    expected = average_plainly(RULES[name], result.first)
    assert_close_gradients(expected, result.files, 1e-10)
    assert_close_gradients(expected, result.exported, 1e-10)


def test_fp32_masters_of_bf16_weights_are_averaged(ranks, tmp_path):
    """Compares with averages of the masters of the same run, since gradients in bf16 differ between layouts."""
    layouts = LAYOUTS["sharded"], LAYOUTS["pp"]
    plans = [changed(averaging_plan(EMA), precision__compute="bf16", **layout) for layout in layouts]
    for results in ranks(2)(train_and_resume, plans, tmp_path):
        for uninterrupted, resumed, moved in results:
            expected = average_with_torch(EMA, uninterrupted.values)
            expected.pop("middle.up.bias", None)  # frozen, and so without a master
            assert {value.dtype for value in expected.values()} == {torch.float32}
            assert resumed.bits == uninterrupted.bits
            assert_close_gradients(expected, {name: uninterrupted.files[name] for name in expected}, 1e-6)
            assert_close_gradients(uninterrupted.files, resumed.exported, 1e-6)
            assert_close_gradients(uninterrupted.files, moved.files, WEIGHTS["bf16"])


class Switching(torch.optim.SGD):
    """Has an evaluation mode, like schedule-free optimizers."""

    def train(self):
        pass

    def eval(self):
        pass


BETWEEN_STEPS = {"offload": [{"use": "memory.optimizer_states", "when": "between_steps"}]}


@pytest.mark.parametrize(
    ("averaging", "tables", "message"),
    [(EMA, {}, "evaluates and saves its own weights"), (None, BETWEEN_STEPS, "states must be on the device at once")],
)
def test_optimizer_with_own_evaluation_weights_is_refused(averaging, tables, message):
    optimizer = {"factory": f"{__name__}:Switching", "lr": 0.05, "scope": "elementwise"}
    with pytest.raises(PlanError, match=message), running(averaging_plan(averaging, optimizer=optimizer, **tables)):
        pass


def test_training_ignores_averages_and_evaluations_use_them(tmp_path):
    averaged, baseline = train(averaging_plan(EMA), tmp_path / "ema"), train(averaging_plan(None), tmp_path / "none")
    assert {name: value for name, value in averaged.bits.items() if not name.startswith(AVERAGES)} == baseline.bits
    assert averaged.loss != baseline.loss
    with running(averaging_plan(None)) as run:
        run.load_weights(averaged.files)
        assert run.evaluate(batches()[0]) == averaged.loss


@pytest.mark.parametrize("averaging", [EMA, MEAN], ids=["ema", "mean"])
def test_skipped_steps_are_not_averaged(tmp_path, averaging):
    def lose_step(run):
        nan = math.nan if run.num_steps_done == 4 else 0.0
        hook = run.registry["last.bias"].parameter.register_hook(lambda gradient: (hook.remove(), gradient + nan)[1])

    tables = averaging_plan(averaging, run={"name": "skip", "steps": STEPS, "device": "cpu", "on_nan": "skip"})
    result = train(tables, tmp_path, before_step=lose_step)
    assert_same_bits(result.values[3], result.values[4])
    values = [result.values[step] for step in range(STEPS) if step != 4]
    assert_close_gradients(average_with_torch(averaging, values), result.files, 1e-10)


def test_parameters_that_a_program_unfreezes_are_averaged(tmp_path):
    """As torch does: their average is at first their constant value."""

    def unfreeze(run):
        run.registry["middle.up.bias"].parameter.requires_grad_(run.num_steps_done >= 3)

    result = train(averaging_plan(EMA), tmp_path, before_step=unfreeze)
    assert_close_gradients(average_with_torch(EMA, result.values), result.files, 1e-10)
    assert not torch.equal(result.values[-1]["middle.up.bias"], result.values[2]["middle.up.bias"])


def test_resumes_start_and_drop_averages_of_changed_plans(tmp_path):
    train(averaging_plan(None), tmp_path, save={3: "without"})
    started = train(averaging_plan(MEAN), tmp_path, load="without")
    assert "the checkpoint has no averages of the weights, so they start from its weights" in started.notes
    assert_close_gradients(average_with_torch(MEAN | {"last": STEPS - 3}, [{}] * 3 + started.values), started.files, 1e-10)
    train(averaging_plan(EMA), tmp_path, save={3: "with"})
    dropped = train(averaging_plan(None), tmp_path, load="with")
    assert "the checkpoint's averages of the weights are dropped, because the plan has no [averaging]" in dropped.notes
    assert_same_bits(dropped.values[-1], dropped.files)


def test_loaded_weights_start_new_averages():
    with running(averaging_plan(EMA)) as run:
        first = {param.name: param.parameter.detach().clone() for param in run.registry}
        before = run.evaluate(batches()[0])
        run.step(batches()[0])
        run.step(batches()[1])
        assert run.evaluate(batches()[0]) != before
        run.load_weights(first)
        assert run.evaluate(batches()[0]) == before


@pytest.mark.parametrize("manager", ["memory.everything", "memory.host_optimizer"])
def test_offloaded_averages_are_stepped_and_saved(tmp_path, manager):
    def offload(run):
        if run.num_steps_done and manager == "memory.everything":
            run.memory.offload().wait()
            with pytest.raises(StateError):
                run.evaluate(batches()[0])
            run.save_checkpoint(tmp_path / f"away {run.num_steps_done}")
            run.memory.onload()

    result = train(averaging_plan(EMA, offload=[{"use": manager}]), tmp_path, before_step=offload)
    expected = train(averaging_plan(EMA), tmp_path)
    assert_same_bits(expected.files, result.files)
    if manager == "memory.everything":
        assert train(averaging_plan(EMA), tmp_path, load="away 5").bits == expected.bits


@pytest.mark.parametrize(
    ("averaging", "tables", "code"),
    [(MEAN | {"last": STEPS + 1}, {}, "averaging-steps"), (EMA, BETWEEN_STEPS, "offload-averages")],
)
def test_plans_without_possible_averages_are_refused(averaging, tables, code):
    assert [problem.code for problem in check_plan(plan_from_dict(averaging_plan(averaging, **tables)), 1)] == [code]


def test_warmup_and_first_step():
    assert [build_ema(EMAConfig(decay=0.5, warmup=True), 9)(step, step) for step in (1, 8)] == pytest.approx([1 - 2 / 11, 0.5])
    rule = build_mean(MeanConfig(last=7), 9)
    assert [rule(step, max(step - 2, 1)) for step in range(6)] == [1, 1, 1, 1 / 2, 1 / 3, 1 / 4]


def test_steps_that_the_device_skips_change_no_average():
    """On CUDA the host does not know whether a step is taken, and so calls the rule for the same update again."""
    averages = Averages(build_ema(EMAConfig(decay=0.5), 9), "optim.ema")
    entry: Any = SimpleNamespace(parameter=nn.Parameter(torch.zeros(3)))
    for step, (value, index, is_taken, expected) in enumerate(
        [(1.0, 0, False, 0.0), (2.0, 0, True, 2.0), (4.0, 1, True, 3.0), (9.0, 2, False, 3.0), (5.0, 2, True, 4.0)]
    ):
        averages.add([entry])
        entry.parameter.data.fill_(value)
        averages.update([entry], step, index, torch.tensor(is_taken))
        assert averages.tensors[entry.parameter].tolist() == [expected] * 3, step


@pytest.mark.gpu
@pytest.mark.parametrize("manager", [None, "memory.everything", "memory.host_optimizer"])
def test_averages_on_a_gpu_are_those_of_torch(tmp_path, manager):
    offload = [] if manager is None else [{"use": manager}]
    run = {"name": "gpu", "steps": STEPS, "device": "cuda", "on_nan": "skip"}
    result = train(averaging_plan(EMA, run=run, offload=offload, precision={"compute": "bf16"}), tmp_path)
    values = [{name: value.cpu() for name, value in tensors.items()} for tensors in result.values]
    expected = average_with_torch(EMA, values)
    for name in set(expected) - {"middle.up.bias"}:
        torch.testing.assert_close(result.files[name], expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weight", [-0.1, 1.1, math.nan])
def test_rule_with_an_impossible_weight_is_refused(weight):
    averages = Averages(lambda step, age: weight, "own.rule")
    averages.update([], 0, 0, None)
    with pytest.raises(RunError, match=r"the weight that `own\.rule` returns must be"):
        averages.update([], 1, 1, None)
