"""Defines the tests that every gradient handler must pass, for a plugin's tests to inherit.

    class TestTopK(GradientHandlerContract):
        handler = {"use": "topk.compressed", "ratio": 0.1}

Two ranks train a small model. Gradients of the first layer are reduced over a group of one rank, and all other gradients over
both ranks. If the reducer leaves shards, all gradients are reduced over both ranks, and gathered for comparisons.

The gradients of a reducer are compared with gradients of `core.each`. If its record has no tolerance, every step must match.
Otherwise, the first step and the sum over all steps must match within the tolerance. The learning rate is tiny, so that weights
stay almost equal. A handler of another role runs after `core.each`, or before it if its record declares `before=("reducer",)`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Generator, Tensor, nn

from sley_core.data.dataset import DataContext, DataInfo, Field
from sley_core.engine.buffers import group_by_reduce_group
from sley_core.engine.parts import StepNumbers
from sley_core.plan.load import plan_from_dict
from sley_core.records import GradientHandlerRecord
from sley_core.table import Table
from sley_testing.collectives import assert_same_sequence
from sley_testing.parity import assert_close_gradients, assert_same_bits, train_tensors
from sley_testing.plans import Tables
from sley_testing.ranks import Ranks
from sley_testing.runs import RunRecord, assert_same_runs, fail_once, record
from sley_trainer.run import Run

EACH: Tables = {"use": "core.each"}  # the table of the reducer with which other reducers are compared
NUM_STEPS = 3  # optimizer steps per run
MICRO_SIZE = 2  # samples per microbatch
WIDTH = 6  # features of each layer's input and output
LR = 1e-6  # the learning rate, which is so small that the weights of compared runs stay almost equal
UNREDUCED_LAYER = "first"  # the layer whose gradients are reduced over a group of one rank


class Samples:
    """A base class for datasets of 64 random samples, which differ between training and held-out data."""

    def __init__(self, context: DataContext) -> None:
        self.first_seed = 0 if context.split == "train" else len(self)

    def __len__(self) -> int:
        return 64

    def generator(self, index: int) -> Generator:
        """Returns a new generator for sample `index`."""
        return torch.Generator().manual_seed(self.first_seed + index)


class Squares:
    """A loss: the sum of squared errors. The weight of a batch is the number of target vectors `y[..., :]`."""

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(batch["y"][..., 0].numel())

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output - batch["y"]).square().sum()


class UnevenBlock(nn.Module):
    """Uses the linear `often` twice and `never` not at all; `frozen` is not trained. The gradient store reports complete
    gradients in reverse order of the parameters. Since `never` gets no gradient, the store reports it and all earlier
    parameters after the backward, but `often` during the backward.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.never = nn.Linear(width, 3)
        self.often = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Any:
        return self.often(self.frozen(self.often(hidden).tanh()))


def contract_plan(module: str, **tables: Any) -> Tables:
    """Returns an fp64 CPU plan with the model `layers` and the dataset `Data` of `module`, extended by `tables`."""
    return {
        "run": {"name": "contract", "steps": 9, "device": "cpu", "seed": 3},
        "model": {"factory": f"{module}:layers"},
        "data": {"factory": f"{module}:Data"},
        "precision": {"compute": "fp64"},
        **tables,
    }


SQUARES = {"factory": f"{__name__}:Squares"}  # the `[loss]` table of `Squares`


class Data(Samples):
    """A dataset of samples with float64 inputs `x` and targets `y`, both [WIDTH]."""

    info = DataInfo({"x": Field("float64"), "y": Field("float64")})

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = torch.randn(2, WIDTH, generator=self.generator(index), dtype=torch.float64)
        return {"x": x, "y": y}


class TanhLinear(nn.Linear):
    """Converts its input to the dtype of the weight, and applies a linear and tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).tanh()


def layers() -> list[tuple[str, nn.Module]]:
    """Returns the contract's two layers with their names."""
    return [(UNREDUCED_LAYER, TanhLinear(WIDTH, WIDTH)), ("second", UnevenBlock(WIDTH))]


def handler_plan(handlers: list[Tables], num_microbatches: int, *, dp: int = 2, reduction: str = "fast") -> Tables:
    """Returns the contract's fp64 plan with `handlers`. A step has twice `num_microbatches` microbatches over all ranks."""
    return contract_plan(
        __name__,
        run={"name": "contract", "steps": NUM_STEPS, "device": "cpu"},
        loss=SQUARES,
        batch={"global_size": 2 * MICRO_SIZE * num_microbatches, "micro_size": MICRO_SIZE},
        optimizer={"use": "core.sgd", "lr": LR},
        parallel={"dp": dp, "reduction": reduction},
        gradient_handlers=handlers,
    )


def observe(
    handlers: list[Tables], num_microbatches: int, fails: bool, has_unreduced_layer: bool = True, reduction: str = "fast"
) -> RunRecord:
    """Runs the contract's plan on this rank and returns its record. Raises AssertionError if autograd hooks are left on
    parameters. fails: whether a failing step precedes the first step, and another the last. Each raises in its last backward,
    after handlers have received the gradients of the second layer, so that reductions are in flight or pending.
    has_unreduced_layer: whether gradients of UNREDUCED_LAYER are reduced over a group of one rank.
    """
    runs: list[Run] = []

    def prepare(run: Run) -> None:
        runs.append(run)
        if has_unreduced_layer:
            # Give parameters a reduce group of one rank, like weights that are sharded over all ranks. Attach handlers again
            # with new step numbers, since ranks have already agreed on those of the run.
            for param in run.registry:
                if param.name.startswith(UNREDUCED_LAYER):
                    param.reduce_group = "sp"
            assert run.groups["sp"].size == 1, run.groups["sp"]
            run.store.lay_out(group_by_reduce_group)
            for handler in run.stepper.handlers:
                handler.attach(replace(run.parts, numbers=StepNumbers(run.groups)))

    def fail(run: Run, num_steps_done: int) -> None:
        if fails and num_steps_done in (0, NUM_STEPS - 1):
            fail_once(run, num_microbatches - 1)

    plan = handler_plan(handlers, num_microbatches, reduction=reduction)
    recorded = record(plan, NUM_STEPS, prepare=prepare, before_step=fail, records_calls=not fails)
    for param in runs[0].registry:
        hooks = [*(param.parameter._backward_hooks or ()), *(param.parameter._post_accumulate_grad_hooks or ())]
        assert not hooks, f"a handler must not install autograd hooks, but {len(hooks)} are left on {param.name}"
    return recorded


def observe_runs(handlers: list[Tables], numbers: Sequence[int], has_unreduced_layer: bool) -> list[RunRecord]:
    """Returns the record of `observe` for each number of microbatches, from runs one after another on the same ranks."""
    return [observe(handlers, number, False, has_unreduced_layer) for number in numbers]


def observe_canonical(plan: Tables, handlers: list[Tables]) -> tuple[dict[str, Tensor], RunRecord, RunRecord]:
    """Returns the tensors of two steps of `plan`, and the records of canonical runs without and with failing steps."""
    clean, failed = (observe(handlers, 1, fails, False, "canonical") for fails in (False, True))
    return train_tensors(plan, 2), clean, failed


class GradientHandlerContract:
    """Tests a gradient handler. Subclass it, and set `handler` to a table of `[[gradient_handlers]]`."""

    handler: ClassVar[Tables]

    @pytest.mark.parametrize("num_microbatches", [1, 3])
    def test_reduction_matches_record(self, ranks: Callable[..., Ranks], num_microbatches: int) -> None:
        """Compares gradients with the gradients of `core.each`, within the record's tolerance. A transform must keep shapes."""
        index = (1, 3).index(num_microbatches)
        baseline, results = self._observe(ranks, [EACH])[index], self._observe(ranks)[index]
        record, config = self._handler_record()
        tolerance = record.tolerance_for(config)
        assert 0.0 <= tolerance < 1.0, f"a tolerance of {tolerance} would accept a reducer that sums nothing"
        for expected_rank, actual_rank in zip(baseline, results, strict=True):
            expected, actual = expected_rank.gradients, actual_rank.gradients
            if record.role == "transform":
                for steps in zip(expected, actual, strict=True):
                    shapes = [{name: value.shape for name, value in step.items()} for step in steps]
                    assert shapes[0] == shapes[1], "a transform must keep the shapes of gradients"
                continue
            exact_names = [name for name in expected[0] if tolerance == 0.0 or name.startswith(UNREDUCED_LAYER)]
            for number, steps in enumerate(zip(expected, actual, strict=True)):
                limit = 1e-12 if tolerance == 0.0 or number == 0 else 100 * LR  # weights differ after an inexact step
                expected_exact, actual_exact = ({name: step[name] for name in exact_names} for step in steps)
                assert_close_gradients(expected_exact, actual_exact, limit)
            for name in expected[0].keys() - set(exact_names):
                # Compare the first step, and the sum over all steps, since error feedback may add residuals in later steps.
                for num_steps in (1, NUM_STEPS):
                    totals = [torch.stack([step[name] for step in rank[:num_steps]]).sum(0) for rank in (expected, actual)]
                    norm = sum(float(step[name].norm()) for step in expected[:num_steps])
                    assert_close_gradients({name: totals[0]}, {name: totals[1]}, tolerance, floor=norm)

    def test_gradients_are_deterministic_and_equal_on_all_ranks(self, ranks: Callable[..., Ranks]) -> None:
        """Expects two runs to be bit-identical, and the reduced gradients to be bit-identical on both ranks."""
        _, first, second = self._observe(ranks)
        assert_same_runs(first, second)
        for steps in zip(first[0].gradients, first[1].gradients, strict=True):
            reduced = [{name: value for name, value in step.items() if not name.startswith(UNREDUCED_LAYER)} for step in steps]
            assert_same_bits(*reduced)

    def test_ranks_issue_same_collectives_once_per_step(self, ranks: Callable[..., Ranks]) -> None:
        """Expects the same collectives on both ranks, and the same operations with three microbatches as with one."""
        baseline, accumulated, _ = self._observe(ranks)
        for results in (baseline, accumulated):
            for step in range(NUM_STEPS):
                assert_same_sequence([rank.calls[step] for rank in results])
        for baseline_calls, accumulated_calls in zip(baseline[0].calls, accumulated[0].calls, strict=True):
            baseline_ops, accumulated_ops = [call.op for call in baseline_calls], [call.op for call in accumulated_calls]
            assert baseline_ops == accumulated_ops, (
                f"a step of one microbatch has {len(baseline_ops)} collectives, a step of three has {len(accumulated_ops)}"
            )

    def test_failed_backward_leaves_no_state(self, ranks: Callable[..., Ranks]) -> None:
        failed = ranks(2)(observe, self._handlers(), 3, True, self._has_unreduced_layer())
        assert_same_runs(self._observe(ranks)[1], failed)

    def test_canonical_sums_match_one_process(self, ranks: Callable[..., Ranks]) -> None:
        """Expects weights and states to have the same bits as in one process, and a failed step to change nothing."""
        record, config = self._handler_record()
        if not record.fixed_order or record.role != "reducer" or record.tolerance_for(config):
            pytest.skip("the record declares no fixed order")
        plans = (handler_plan(self._handlers(), 6 // dp, dp=dp, reduction="canonical") for dp in (1, 2))
        one_rank, two_ranks = ({**plan, "batch": {"global_size": 12, "micro_size": 2}} for plan in plans)
        baseline = train_tensors(one_rank, 2)
        tensors, clean, failed = zip(*ranks(2)(observe_canonical, two_ranks, self._handlers()), strict=True)
        for rank_tensors in tensors:
            assert_same_bits(baseline, rank_tensors)
        assert_same_runs(clean, failed)

    def _observe(self, ranks: Callable[..., Ranks], handlers: list[Tables] | None = None) -> list[tuple[RunRecord, ...]]:
        """Returns the cached records of both ranks for one and three microbatches, and again for three if the plan has only
        the handlers of `_handlers()`. handlers: the handlers of the plan; None means `_handlers()`.
        """
        numbers = (1, 3, 3) if handlers in (None, self._handlers()) else (1, 3)
        arguments = handlers or self._handlers(), numbers, self._has_unreduced_layer()
        return [*zip(*ranks(2, 180).once(observe_runs, *arguments), strict=True)]

    def _handlers(self) -> list[Tables]:
        """Returns the handlers of the plan: the tested handler, and `core.each` if the tested handler is not a reducer."""
        record, _ = self._handler_record()
        if record.role == "reducer":
            return [self.handler]
        return [self.handler, EACH] if "reducer" in record.before else [EACH, self.handler]

    def _has_unreduced_layer(self) -> bool:
        """Returns whether tests may change the first layer's reduce group: only if the handler does not lay out shards."""
        return self._handler_record()[0].result == "full"

    def _handler_record(self) -> tuple[GradientHandlerRecord, Table]:
        """Returns the record and the options of the tested handler."""
        (*_, component) = plan_from_dict(handler_plan([self.handler], 1)).gradient_handlers
        assert isinstance(component.record, GradientHandlerRecord)
        return component.record, component.config
