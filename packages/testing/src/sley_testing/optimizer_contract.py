"""Tests what every optimizer must pass; the tests of a plugin, or of a class of your own, inherit them.

    class TestLion(OptimizerContract):
        optimizer = {"factory": "lion:Lion", "lr": 1e-3, "scope": "elementwise"}

A run gives an optimizer masters in place of weights, parts in place of whole parameters, some parameters at a time, and
another process after a restart. Two small parameters are tried first, as every run does; then a small model is trained, and
compared with a plain loop of the same optimizer over the same gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import SleyError
from sley_core.generators import derive, optimizer_generators, seed_generators, use_seed
from sley_core.optim.build import parameter_groups
from sley_core.optim.config import scope_of
from sley_core.optim.shared import set_training_mode
from sley_core.optimizer_probe import try_optimizer
from sley_core.plan.load import plan_from_dict
from sley_core.run_state.state import checkpoint_files
from sley_core.run_state.tensors import plan_and_weights
from sley_core.weight_files.read import WeightFiles
from sley_testing.contract import SQUARES, WIDTH, contract_plan
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import Tensors, record, weights

NUM_STEPS = 7
SAVED_AT = 3
EXACT = 1e-9  # how far weights of fp64 may be from those of the plain loop, relative


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).tanh()


def layers(biases: bool = True) -> list[tuple[str, nn.Module]]:
    """Returns the layers of the contract's model. biases: whether it has vectors besides matrices."""
    return [("first", Layer(WIDTH, WIDTH, bias=biases)), ("second", Layer(WIDTH, WIDTH, bias=biases))]


@dataclass
class Seen:
    """Records what one rank saw. first: what was stepped, before the first step. given: the gradients of each step, and rates:
    its learning rate. stepped: what was stepped, after the last step; weights: of the model then. evaluated: the held-out loss
    before and after the last step, if it was asked for.
    """

    first: Tensors = field(default_factory=dict)
    given: list[Tensors] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    stepped: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    evaluated: list[float] = field(default_factory=list)


def train(
    tables: dict[str, Any],
    *,
    save: Path | None = None,
    load: Path | None = None,
    one_by_one: bool = False,
    evaluates: bool = False,
) -> Seen:
    """Takes the contract's steps on this rank. save: where to save after SAVED_AT steps; load: where to go on from. one_by_one:
    steps parameters in buckets of one. evaluates: before the last step.
    """
    seen = Seen()
    with World.join("cpu") as world, assemble(plan_from_dict(tables), world) as run:
        if one_by_one:
            run.parts.events.step_in_buckets = lambda every: ([one] for one in every[::-1])
        if load is not None:
            run.load_checkpoint(load)
        stepped = run.stepper.update.masters.stepped

        def note() -> None:  # the update may write into them
            parts = zip(stepped, run.store.parts([one.param for one in stepped]), strict=True)
            seen.given.append({one.name: gradient.clone() for one, gradient in parts if gradient is not None})

        run.parts.events.gradients_done.append(note)
        seen.first = {one.name: one.parameter.detach().clone() for one in stepped}
        while run.num_steps_done < NUM_STEPS:
            if evaluates and run.num_steps_done == NUM_STEPS - 1:
                seen.evaluated.append(run.evaluate())
            row = run.step()
            seen.rates.append(float(row["lr"]))
            if save is not None and run.num_steps_done == SAVED_AT:
                run.save_checkpoint(save)
        seen.stepped = {one.name: one.parameter.detach().clone() for one in stepped}
        seen.weights = weights(run)
    return seen


class _Copy(NamedTuple):
    """A parameter of the plain loop, as `parameter_groups` takes it."""

    name: str
    parameter: nn.Parameter
    decays: bool


def by_hand(tables: dict[str, Any], seen: Seen, *, evaluates: bool = False) -> Tensors:
    """Returns the parameters after a plain loop over the gradients that a run has recorded: each gradient in new memory.
    evaluates: whether `eval()` is called after the last step.
    """
    plan = plan_from_dict(tables)
    config: Any = plan.optimizer.config
    copies = [_Copy(name, nn.Parameter(one.clone()), one.ndim > 1) for name, one in seen.first.items()]
    optimizer: Any = set_training_mode(plan.optimizer.build(parameter_groups(copies, config), torch.device("cpu")))
    generators = optimizer_generators(optimizer)
    for step, (gradients, rate) in enumerate(zip(seen.given, seen.rates, strict=True)):
        for copy in copies:
            copy.parameter.grad = gradients[copy.name].clone().to(copy.parameter.dtype)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate / config.lr
        seed = derive(plan.run.seed, "update", step)
        with use_seed(seed):
            seed_generators(generators, seed)
            optimizer.step()
    if evaluates:
        optimizer.eval()
    return {copy.name: copy.parameter.detach() for copy in copies}


class OptimizerContract:
    """Tests an optimizer: inherit, set `optimizer` to the table `[optimizer]`, and pytest does the rest. only_matrices: whether
    it takes parameters of two dims alone, as Muon does.
    """

    optimizer: ClassVar[dict[str, Any]]
    only_matrices: ClassVar[bool] = False

    def test_optimizer_probe_passes(self) -> None:
        """Tried as before a run: whole and in parts, together and one by one, resumed, at other learning rates."""
        plan = plan_from_dict(self._plan())
        ndims = (2,) if self.only_matrices else (2, 1)
        for dtype in (torch.float32, torch.float64):
            _, faults = try_optimizer(plan, ndims, dtype, torch.device("cpu"))
            said = "; ".join(f"{fault.message} ({fault.hint})" for fault in faults)
            assert not faults, f"`{plan.optimizer.name}` {said}"

    @pytest.mark.parametrize("compute", ["fp64", "fp32", "bf16"])
    def test_run_matches_plain_loop(self, compute: str) -> None:
        """Over the same gradients, at a rate that falls; in bf16 masters are stepped, and the weights are these, rounded."""
        tables = self._plan(precision={"compute": compute})
        seen = train(tables)
        wanted = by_hand(tables, seen)
        assert_close_gradients(wanted, seen.stepped, EXACT if compute == "fp64" else 1e-5)
        for name, one in seen.stepped.items():
            assert not torch.equal(one, seen.first[name]), f"{name} is as it was before the first step: nothing is trained"
            working = seen.weights[name]
            assert torch.equal(working, one.to(working.dtype)), f"the weight {name} is not what the optimizer has stepped"

    def test_single_parameter_steps_match_plain_loop(self) -> None:
        """With the bits of one step, whatever it counts; as managers of memory do it."""
        optimizer = plan_from_dict(self._plan()).optimizer
        if scope_of(optimizer.record, optimizer.config) in ("global", "unknown"):
            pytest.skip("its scope says that it needs all parameters at once")
        tables = self._plan()
        seen = train(tables, one_by_one=True)
        ndims = (2,) if self.only_matrices else (2, 1)
        if not try_optimizer(plan_from_dict(tables), ndims, torch.float64, torch.device("cpu"))[0].draws:
            assert_close_gradients(by_hand(tables, seen), seen.stepped, EXACT)

    @pytest.mark.parametrize("compute", ["fp64", "bf16"])
    def test_resumed_run_is_bit_identical(self, compute: str, tmp_path: Path) -> None:
        """With the bits of one that was never stopped."""
        tables = self._plan(precision={"compute": compute})
        whole = train(tables, save=tmp_path / "saved")
        resumed = train(tables, load=tmp_path / "saved")
        for name, one in whole.stepped.items():
            assert torch.equal(one, resumed.stepped[name]), (
                f"{name} has other bits in a run that goes on from a checkpoint: the optimizer keeps something that none has"
            )

    def test_replicas_match_one_process(self, ranks: Callable[..., Ranks], tmp_path: Path) -> None:
        """Both have the same weights, those of one process; also if one process goes on from their checkpoint."""
        one, two = self._plan(), self._plan(parallel={"dp": 2}, gradient_handlers=[{"use": "core.each"}])
        whole = train(one)
        found = ranks(2)(train, two, save=tmp_path / "saved")
        for name, weight in found[0].weights.items():
            assert torch.equal(weight, found[1].weights[name]), f"{name} differs between two replicas"
        assert_close_gradients(whole.weights, found[0].weights, EXACT)
        assert_close_gradients(whole.weights, train(one, load=tmp_path / "saved").weights, EXACT)

    def test_evaluation_changes_no_weights(self) -> None:
        """Not the bits of the steps after it."""
        tables = self._plan(evaluation={"every": 100, "steps": 2})
        seen, undisturbed = train(tables, evaluates=True), train(tables)
        for name, one in undisturbed.stepped.items():
            assert torch.equal(one, seen.stepped[name]), f"{name} has other bits after an evaluation"

    @pytest.mark.parametrize("compute", ["fp64", "bf16"])
    def test_eval_weights_are_evaluated_and_saved(self, compute: str, tmp_path: Path) -> None:
        """If it has modes, as schedule-free ones do: the weights of an evaluation, of files and of an export."""
        tables = self._plan(evaluation={"every": 100, "steps": 2}, precision={"compute": compute})
        seen = train(tables, save=tmp_path / "saved")
        with World.join("cpu") as world, assemble(plan_from_dict(tables), world) as run:
            if not run.stepper.update.traits.has_modes:
                pytest.skip("it has no modes")
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
        _, exported = plan_and_weights(checkpoint)
        with World.join("cpu") as world, assemble(plan_from_dict(tables), world) as run:
            run.load_weights(saved)
            again = run.evaluate()
        wanted = by_hand(tables, seen, evaluates=True)
        within = EXACT if compute == "fp64" else 1e-5
        assert_close_gradients(wanted, saved, within)
        assert_close_gradients(wanted, {name: exported.tensor(name) for name in exported.names}, within)
        error = abs(loss - again) / abs(again)
        assert error < (EXACT if compute == "fp64" else 2**-7), (
            f"the held-out loss is {loss}, and {again} with the weights after `eval()`"
        )

    def test_parameter_without_gradient_is_unchanged(self) -> None:
        """As one that a program freezes between two steps."""
        plan = plan_from_dict(self._plan())
        pair = [_Copy(name, nn.Parameter(torch.ones(3, 4, dtype=torch.float64)), True) for name in "ab"]
        optimizer = set_training_mode(plan.optimizer.build(parameter_groups(pair, plan.optimizer.config), torch.device("cpu")))
        pair[0].parameter.grad = torch.full((3, 4), 0.5, dtype=torch.float64)
        try:
            optimizer.step()
        except Exception as error:
            raise AssertionError(f"a parameter whose `grad` is None cannot be stepped: {error}") from error
        assert torch.equal(pair[1].parameter, torch.ones(3, 4)), "a parameter without a gradient has changed"

    def _plan(self, **tables: Any) -> dict[str, Any]:
        return contract_plan(
            __name__,
            model={"factory": f"{__name__}:layers", "options": {"biases": not self.only_matrices}},
            data={"factory": "sley_testing.contract:Data"},
            loss=SQUARES,
            batch={"global_size": 4, "micro_size": 2},
            optimizer=self.optimizer,
            learning_rate={"use": "core.linear"},
            **tables,
        )


NUM_LATE = 10  # a program of one's own may take more steps than the plan says

LR = 0.01


class LRScheduleContract:
    """Tests a learning-rate schedule: inherit and set `learning_rate` to its table. num_steps: of the run."""

    learning_rate: ClassVar[dict[str, Any]]
    num_steps: ClassVar[int] = 100

    def test_every_step_has_finite_rate(self) -> None:
        """A finite number, not negative; also of the steps after the plan's last one. Some rate is above 0."""
        rates = self._rates(self.num_steps)
        for step, rate in enumerate(rates):
            is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
            assert is_number, f"the factor of step {step} is a {type(rate).__name__}, not a number"
            assert math.isfinite(rate), f"the factor of step {step} is {rate}"
            assert rate >= 0, f"the factor of step {step} is {rate}: the weights would go uphill"
        assert max(rates[: self.num_steps]) > 0, "no step of the run has a rate above 0: nothing is learnt"

    def test_rate_depends_only_on_step(self) -> None:
        """Not on earlier calls: the steps are asked backwards, and of a new schedule, as after a restart."""
        rates = self._rates(self.num_steps)
        backwards = self._factor(self.num_steps)
        for step in reversed(range(self.num_steps)):
            found = backwards(step), self._factor(self.num_steps)(step) if step % 10 == 0 else rates[step]
            assert found == (rates[step], rates[step]), (
                f"the factor of step {step} is {rates[step]} when the steps are asked for in order, and {found} "
                "when it is asked for backwards or alone: a run that goes on from there has other rates"
            )

    @pytest.mark.parametrize("num_steps", [1, 2, 3])
    def test_short_run_has_rates_or_is_refused(self, num_steps: int) -> None:
        """By a SleyError that says why."""
        try:
            rates = self._rates(num_steps)
        except SleyError:
            return
        except Exception as error:
            raise AssertionError(f"with run.steps = {num_steps}: {type(error).__name__}: {error}") from error
        assert all(math.isfinite(rate) for rate in rates), f"with run.steps = {num_steps} the factors are {rates}"

    def test_run_uses_schedule_rates(self, texts: Path) -> None:
        """The rows of a run have the plan's rate times the factor."""
        plan = small_plan(optimizer__lr=LR, run__steps=self.num_steps, learning_rate=self.learning_rate)
        found = [row["lr"] for row in record(plan, 3, folder=texts).rows]
        wanted = [LR * rate for rate in self._rates(self.num_steps)[:3]]
        assert found == pytest.approx(wanted), f"a run has the rates {found}, not {wanted}"

    def _factor(self, num_steps: int) -> Any:
        """Returns the schedule of a run of `num_steps`, made anew."""
        return plan_from_dict(small_plan(learning_rate=self.learning_rate)).learning_rate.build(num_steps)

    def _rates(self, num_steps: int) -> list[float]:
        """Returns the factors of all steps of a run and of NUM_LATE more, asked for in order."""
        factor = self._factor(num_steps)
        return [factor(step) for step in range(num_steps + NUM_LATE)]
