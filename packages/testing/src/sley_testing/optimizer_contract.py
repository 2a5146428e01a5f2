"""Defines the tests that every optimizer and learning-rate schedule must pass, for a plugin's or your own tests to inherit.

    class TestLion(OptimizerContract):
        optimizer = {"factory": "lion:Lion", "lr": 1e-3, "scope": "elementwise"}

The tests first update two small parameters, as the start of every run does. Then they train a small model, and compare it with
a plain loop that uses the same optimizer and the same gradients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from sley_core.checkpointing import checkpoint_files, load_plan_and_weights
from sley_core.engine.registry import parameter_roles
from sley_core.errors import SleyError
from sley_core.generators import derive_seed, find_optimizer_generators, seed_generators, use_seed
from sley_core.model.layers import as_model
from sley_core.optim.config import scope_of
from sley_core.optim.optimizers import parameter_groups, set_training_mode
from sley_core.plan.load import plan_from_dict
from sley_core.weight_files.read import WeightFiles
from sley_testing.contract import SQUARES, WIDTH, TanhLinear, contract_plan
from sley_testing.parity import assert_close_gradients
from sley_testing.plain import NamedParameter
from sley_testing.plans import Tables, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import (
    RunRecord,
    Tensors,
    assert_equal_replicas,
    assert_same_run,
    record,
    record_reference,
    running,
    save_at,
)
from sley_trainer.optimizer_probe import try_optimizer
from sley_trainer.run import Run

NUM_STEPS = 7  # optimizer steps per run
SAVED_AT = 3  # the step after which checkpoints are saved
EXACT_TOLERANCE = 1e-9  # the relative tolerance of weights in fp64


def layers(has_biases: bool = True) -> list[tuple[str, nn.Module]]:
    """Returns the contract's two layers with their names."""
    return [(name, TanhLinear(WIDTH, WIDTH, bias=has_biases)) for name in ("first", "second")]


@dataclass
class TrainingObservation:
    """Holds the results of a run. recorded: the record of the run. initial_parameters, final_parameters: the optimizer's
    parameters by name, before the first step and after the last. step_gradients: the gradients of each step, by name.
    """

    recorded: RunRecord = field(default_factory=RunRecord)
    initial_parameters: Tensors = field(default_factory=dict)
    step_gradients: list[Tensors] = field(default_factory=list)
    final_parameters: Tensors = field(default_factory=dict)


def train(tables: Tables, *, save: Path | None = None, steps_separately: bool = False) -> TrainingObservation:
    """Takes NUM_STEPS steps in this process, and returns their results. save: the path for a checkpoint after SAVED_AT steps;
    None saves none. steps_separately: whether the optimizer updates one parameter at a time.
    """
    observation = TrainingObservation()

    def prepare(run: Run) -> None:
        events, params = run.parts.events, run.stepper.update.masters.local_params

        def copy_parameters() -> Tensors:
            return {entry.name: entry.parameter.detach().clone() for entry in params}

        def record_gradients() -> None:  # clone them, since the update may write to gradients
            trained = [entry.param for entry in params if entry.param in run.store]
            observation.step_gradients.append({param.name: run.store.part(param).clone() for param in trained})

        observation.initial_parameters = copy_parameters()
        events.gradients_done.append(record_gradients)
        run.listeners.append(lambda row: observation.final_parameters.update(copy_parameters()))
        if steps_separately:
            events.step_in_buckets = lambda params: ([entry] for entry in params[::-1])
        if save is not None:
            save_at(SAVED_AT, save, run)

    observation.recorded = record(tables, NUM_STEPS, prepare=prepare)
    return observation


def resume(tables: Tables, checkpoint: Path) -> RunRecord:
    """Resumes from `checkpoint`, takes the steps after SAVED_AT, and returns the record. Evaluates before the last step."""
    num_steps = NUM_STEPS - SAVED_AT

    def evaluate_before_last_step(run: Run, number: int) -> None:
        if number == num_steps - 1:
            run.evaluate()

    return record(tables, num_steps, load=checkpoint, before_step=evaluate_before_last_step)


def train_in_plain_loop(tables: Tables, observation: TrainingObservation, *, evaluates: bool = False) -> Tensors:
    """Steps a new optimizer in a plain loop with the gradients of `observation`, and returns the final parameters by name.
    evaluates: whether to call the optimizer's `eval()` after the last step.
    """
    plan = plan_from_dict(tables)
    config: Any = plan.optimizer.config
    copies = [
        NamedParameter(name, nn.Parameter(value.clone()), value.ndim > 1)
        for name, value in observation.initial_parameters.items()
    ]
    model = as_model(layers(**plan.model.config.options))
    groups = parameter_groups(copies, config, roles=parameter_roles(plan.optimizer, model.layers))
    optimizer: Any = set_training_mode(plan.optimizer.build(groups, torch.device("cpu")))
    generators = find_optimizer_generators(optimizer)
    for step, (gradients, row) in enumerate(zip(observation.step_gradients, observation.recorded.rows, strict=True)):
        for copy in copies:
            copy.parameter.grad = gradients[copy.name].clone().to(copy.parameter.dtype)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * row["lr"] / config.lr
        seed = derive_seed(plan.run.seed, "update", step)
        with use_seed(seed):
            seed_generators(generators, seed)
            optimizer.step()
    if evaluates:
        optimizer.eval()
    return {copy.name: copy.parameter.detach() for copy in copies}


class OptimizerContract:
    """Tests an optimizer. Subclass it, and set `optimizer` to the `[optimizer]` table. only_matrices: whether the optimizer
    accepts only 2-d parameters, as Muon does.
    """

    optimizer: ClassVar[Tables]
    only_matrices: ClassVar[bool] = False

    def test_optimizer_probe_passes(self) -> None:
        """Runs the check at a run's start: full and partial parameters, joint and separate steps, a resume, and rates."""
        for dtype in (torch.float32, torch.float64):
            _, faults = self._run_probe(dtype)
            messages = "; ".join(f"{fault.message} ({fault.hint})" for fault in faults)
            assert not faults, f"the optimizer {messages}"

    @pytest.mark.parametrize("compute", ["fp64", "bf16"])
    def test_run_matches_plain_loop(self, compute: str) -> None:
        """Compares a run with a plain loop at decreasing rates. In bf16, weights must be the rounded master weights."""
        tables = self._plan(precision={"compute": compute})
        observation = train(tables)
        expected = train_in_plain_loop(tables, observation)
        assert_close_gradients(expected, observation.final_parameters, EXACT_TOLERANCE if compute == "fp64" else 1e-5)
        for name, parameter in observation.final_parameters.items():
            is_unchanged = torch.equal(parameter, observation.initial_parameters[name])
            assert not is_unchanged, f"{name} has not changed since before the first step"
            weight = observation.recorded.weights[name]
            is_rounded = torch.equal(weight, parameter.to(weight.dtype))
            assert is_rounded, f"the weight {name} is not the rounded parameter of the optimizer"

    def test_single_parameter_steps_match_plain_loop(self) -> None:
        if not self._can_step_separately():
            pytest.skip("the optimizer's scope needs all parameters at once")
        tables = self._plan()
        observation = train(tables, steps_separately=True)
        if not self._run_probe(torch.float64)[0].draws_random:
            assert_close_gradients(train_in_plain_loop(tables, observation), observation.final_parameters, EXACT_TOLERANCE)

    @pytest.mark.parametrize("compute", ["fp64", "bf16"])
    def test_resumed_run_is_bit_identical(self, compute: str, tmp_path: Path) -> None:
        """Compares an uninterrupted run with a resumed run that also evaluates."""
        tables = self._plan(precision={"compute": compute})
        uninterrupted = record(tables, NUM_STEPS, prepare=partial(save_at, SAVED_AT, tmp_path / "saved"))
        # If the runs differ, the optimizer has state outside the checkpoint.
        assert_same_run(uninterrupted, resume(tables, tmp_path / "saved"))

    @pytest.mark.parametrize("handler", ["core.each", "dp.sharded"])
    def test_two_ranks_match_one_process(self, ranks: Callable[..., Ranks], handler: str, tmp_path: Path) -> None:
        """Compares two ranks with one process, and with one process that resumes their checkpoint. The ranks are replicas
        (`core.each`), or each rank updates a part of the parameters (`dp.sharded`).
        """
        tables = self._plan()
        if handler == "dp.sharded":
            if find_spec("sley_dp") is None or not self._can_step_separately():
                pytest.skip("the test needs sley-dp, and an optimizer that can update one parameter at a time")
            if self._run_probe(torch.float64)[0].draws_random:
                pytest.skip("the optimizer draws other random numbers for parts")
        expected = record_reference(tables, NUM_STEPS).weights
        two_rank_plan = self._plan(parallel={"dp": 2}, gradient_handlers=[{"use": handler}])
        replicas = ranks(2)(record, two_rank_plan, NUM_STEPS, prepare=partial(save_at, SAVED_AT, tmp_path / "saved"))
        assert_equal_replicas(replicas)
        assert_close_gradients(expected, replicas[0].weights, EXACT_TOLERANCE)
        assert_close_gradients(expected, resume(tables, tmp_path / "saved").weights, EXACT_TOLERANCE)

    def test_eval_weights_are_evaluated_and_saved(self, tmp_path: Path) -> None:
        """Expects evaluations, weight files and exports to use the `eval()` weights of an optimizer with modes."""
        tables = self._plan(precision={"compute": "bf16"})
        if not self._run_probe(torch.float32)[0].has_modes:
            pytest.skip("the optimizer has no modes")
        observation = train(tables, save=tmp_path / "saved")
        with running(tables) as run:
            run.load_checkpoint(tmp_path / "saved")
            while run.num_steps_done < NUM_STEPS:
                run.step()
            loss = run.evaluate()
            run.save_weights(tmp_path / "weights", precision="full")
            run.save_checkpoint(tmp_path / "last")
        files = WeightFiles(tmp_path / "weights")
        saved = {name: files.tensor(name) for name in files.names}
        reader = checkpoint_files(run.plan.loader)
        checkpoint = None if reader is None else reader.open(str(tmp_path / "last"))
        assert checkpoint is not None, "there is no checkpoint"
        _, exported = load_plan_and_weights(checkpoint)
        with running(tables) as run:
            run.load_weights(saved)
            reloaded_loss = run.evaluate()
        expected = train_in_plain_loop(tables, observation, evaluates=True)
        assert_close_gradients(expected, saved, 1e-5)
        assert_close_gradients(expected, {name: exported.tensor(name) for name in exported.names}, 1e-5)
        error = abs(loss - reloaded_loss) / abs(reloaded_loss)
        assert error < 2**-7, f"the held-out loss is {loss}, but {reloaded_loss} with the weights after `eval()`"

    def test_parameter_without_gradient_is_unchanged(self) -> None:
        """Expects a step to skip a parameter without a gradient, such as one that a program froze between two steps."""
        plan = plan_from_dict(self._plan())
        parameters = [NamedParameter(name, nn.Parameter(torch.ones(3, 4, dtype=torch.float64)), True) for name in "ab"]
        optimizer = set_training_mode(
            plan.optimizer.build(parameter_groups(parameters, plan.optimizer.config), torch.device("cpu"))
        )
        parameters[0].parameter.grad = torch.full((3, 4), 0.5, dtype=torch.float64)
        try:
            optimizer.step()
        except Exception as error:
            raise AssertionError(f"a parameter whose `grad` is None cannot be updated: {error}") from error
        assert torch.equal(parameters[1].parameter, torch.ones(3, 4)), "a parameter without a gradient has changed"

    def _can_step_separately(self) -> bool:
        """Returns whether the optimizer's scope lets it update one parameter at a time."""
        optimizer = plan_from_dict(self._plan()).optimizer
        return scope_of(optimizer.record, optimizer.config) not in ("global", "unknown")

    def _run_probe(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """Returns the traits and the faults of the optimizer, as the check at the start of each run finds them."""
        ndims = (2,) if self.only_matrices else (2, 1)
        return try_optimizer(plan_from_dict(self._plan()), ndims, dtype, torch.device("cpu"))

    def _plan(self, **tables: Any) -> Tables:
        """Returns the contract's plan with the tested optimizer, extended by `tables`."""
        return contract_plan(
            __name__,
            model={"factory": f"{__name__}:layers", "options": {"has_biases": not self.only_matrices}},
            data={"factory": "sley_testing.contract:Data"},
            loss=SQUARES,
            batch={"global_size": 4, "micro_size": 2},
            optimizer=self.optimizer,
            learning_rate={"use": "core.linear"},
            evaluation={"every": 100, "steps": 2},
            **tables,
        )


NUM_EXTRA_STEPS = 10  # the number of steps after the plan's last step, which a custom program may take


class LRScheduleContract:
    """Tests a learning-rate schedule. Subclass it, and set `learning_rate` to its table. num_steps: the length of the run."""

    learning_rate: ClassVar[Tables]
    num_steps: ClassVar[int] = 100

    def test_every_step_has_finite_rate(self) -> None:
        """Expects finite, non-negative factors, even after the last step, and at least one factor above 0 within the run."""
        rates = self._compute_factors(self.num_steps)
        for step, rate in enumerate(rates):
            is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
            assert is_number, f"the factor of step {step} is a {type(rate).__name__}, not a number"
            assert math.isfinite(rate), f"the factor of step {step} is {rate}"
            assert rate >= 0, f"the factor of step {step} must not be negative, but is {rate}"
        assert max(rates[: self.num_steps]) > 0, "no step of the run has a rate above 0"

    def test_rate_depends_only_on_step(self) -> None:
        factors = self._compute_factors(self.num_steps)
        reverse_schedule = self._build_schedule(self.num_steps)
        for step in reversed(range(self.num_steps)):
            actual = reverse_schedule(step)
            message = f"the factor of step {step} is {factors[step]} in order, but {actual} in reverse order"
            assert actual == factors[step], f"{message}: a resumed run would have different rates"

    @pytest.mark.parametrize("num_steps", [1, 2, 3])
    def test_short_run_has_rates_or_is_refused(self, num_steps: int) -> None:
        try:
            rates = self._compute_factors(num_steps)
        except SleyError:
            return
        except Exception as error:
            raise AssertionError(f"with run.steps = {num_steps}: {type(error).__name__}: {error}") from error
        assert all(math.isfinite(rate) for rate in rates), f"with run.steps = {num_steps} the factors are {rates}"

    def _build_schedule(self, num_steps: int) -> Any:
        return plan_from_dict(small_plan(learning_rate=self.learning_rate)).learning_rate.build(num_steps)

    def _compute_factors(self, num_steps: int) -> list[float]:
        """Returns the factors of the learning rate for all steps of a run and for NUM_EXTRA_STEPS later steps, in order."""
        factor = self._build_schedule(num_steps)
        return [factor(step) for step in range(num_steps + NUM_EXTRA_STEPS)]
