"""Tests what every gradient handler must pass; the tests of a plugin inherit them.

    class TestTopK(GradientHandlerContract):
        handler = {"use": "topk.compressed", "ratio": 0.1}

Two ranks train a small model whose parameters have two reduce groups: one of both ranks, and one of a single rank. A handler
must not change the parameters of the latter, nor a frozen parameter. (With a reducer whose result is a shard, all parameters
are reduced over both ranks, and gathered for the comparison: its layout is fixed before the groups could be changed.) A reducer
is compared with `core.each` in every step, exactly or within the tolerance that its record declares for this table; a handler
of another role runs after `core.each`, or before it if its record says `before=("reducer",)`. The learning rate is tiny, so
that even with a reducer that is not exact the gradients stay comparable with those under `core.each`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Generator, Tensor, nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.data.dataset import DataContext, DataInfo, Field
from sley_core.engine.buffers import by_reduce_group
from sley_core.engine.parts import StepNumbers
from sley_core.plan.load import plan_from_dict
from sley_core.records import GradientHandlerRecord
from sley_core.run import Run
from sley_core.table import Table
from sley_testing.collectives import Collective, assert_same_sequence, collectives
from sley_testing.parity import differing, trained
from sley_testing.ranks import Ranks
from sley_testing.runs import fail_once, gradients

Handler = dict[str, Any]
EACH: Handler = {"use": "core.each"}
NUM_STEPS = 3
SAMPLES = 4
WIDTH = 6
LR = 1e-6
ALONE = "first"  # the layer whose parameters reduce over a group of one


class Samples:
    """64 samples, each made from its number alone; those of held-out data have other numbers."""

    def __init__(self, context: DataContext) -> None:
        self.first = 0 if context.split == "train" else len(self)

    def __len__(self) -> int:
        return 64

    def generator(self, index: int) -> Generator:
        """Returns what draws sample `index`."""
        return torch.Generator().manual_seed(self.first + index)


class Squares:
    """The sum of squared errors; every row of numbers weighs one."""

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(batch["y"][..., 0].numel())

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output - batch["y"]).square().sum()


class Uneven(nn.Module):
    """Uses `often` twice, `never` not at all; `frozen` is not trained. All are linears of `width` inputs.

    The store reports parameters from the last one back, and `never` only when the backward is over: so those of `often`
    are reported while it runs, and what comes before this module after it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.never = nn.Linear(width, 3)
        self.often = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Any:
        return self.often(self.frozen(self.often(hidden).tanh()))


def contract_plan(module: str, **tables: Any) -> dict[str, Any]:
    """Returns a plan in fp64 on the CPU with the functions `layers` and `Data` of `module`, and these tables."""
    return {
        "run": {"name": "contract", "steps": 9, "device": "cpu", "seed": 3},
        "model": {"factory": f"{module}:layers"},
        "data": {"factory": f"{module}:Data"},
        "precision": {"compute": "fp64"},
        **tables,
    }


SQUARES = {"factory": f"{__name__}:Squares"}  # the table `[loss]` of `Squares`


class Data(Samples):
    """Serves samples of WIDTH numbers and a target each."""

    info = DataInfo({"x": Field("float64"), "y": Field("float64")})

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = torch.randn(2, WIDTH, generator=self.generator(index), dtype=torch.float64)
        return {"x": x, "y": y}


class First(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def layers() -> list[tuple[str, nn.Module]]:
    """Returns the layers of the contract's model."""
    return [(ALONE, First(WIDTH, WIDTH)), ("second", Uneven(WIDTH))]


def tables(handlers: list[Handler], num_micros: int, *, dp: int = 2, reduction: str = "fast") -> dict[str, Any]:
    """Returns the contract's plan: two ranks, fp64, every handler of the list."""
    return contract_plan(
        __name__,
        run={"name": "contract", "steps": NUM_STEPS, "device": "cpu"},
        loss=SQUARES,
        batch={"global_size": SAMPLES * num_micros, "micro_size": SAMPLES // 2},
        optimizer={"use": "core.sgd", "lr": LR},
        parallel={"dp": dp, "reduction": reduction},
        gradient_handlers=handlers,
    )


@dataclass
class Seen:
    """Records what one rank saw: the gradients and the collectives of each step, and the hooks that are left after `detach`."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    calls: list[list[Collective]] = field(default_factory=list)
    hooks_left: int = -1


def observe(handlers: list[Handler], num_micros: int, fail: bool, splits: bool = True, reduction: str = "fast") -> Seen:
    """Runs the contract's plan on this rank. fail: takes a failing step before the first and before the last step.

    A failing step fails at the end of its last backward, when handlers have been called for the second layer's gradients: sums
    are in flight, or wait for more gradients. splits: whether the parameters of ALONE are reduced over one rank.
    """
    seen = Seen()
    with World.join("cpu") as world:
        run = assemble(plan_from_dict(tables(handlers, num_micros, reduction=reduction)), world)
        own_hooks = _num_hooks(run)
        if splits:
            # Like a weight that is sharded over all ranks, parameters of ALONE reduce over a group of one. Handlers are
            # attached again, with new numbers, since ranks have already agreed on those of the run.
            for param in run.registry:
                if param.name.startswith(ALONE):
                    param.reduce_group = "sp"
            assert run.groups["sp"].size == 1, run.groups["sp"]
            run.store.lay_out(by_reduce_group)
            for handler in run.stepper.handlers:
                handler.attach(replace(run.parts, numbers=StepNumbers(run.groups)))
        for number in range(NUM_STEPS):
            if fail and number in (0, NUM_STEPS - 1):
                fail_once(run, num_micros - 1)
            with collectives() as calls:
                run.step()
            seen.calls.append(list(calls))
            seen.gradients.append(gradients(run))
        assert own_hooks == _num_hooks(run), "a handler installs no autograd hooks"
        run.close()
        seen.hooks_left = _num_hooks(run)
    return seen


class GradientHandlerContract:
    """Tests a gradient handler: inherit, set `handler` to its table, and pytest does the rest."""

    handler: ClassVar[Handler]

    @pytest.fixture
    def ranks_of_two(self, ranks: Callable[..., Ranks]) -> Ranks:
        return ranks(2)

    @pytest.mark.parametrize("num_micros", [1, 3])
    def test_reduction_matches_record(self, ranks_of_two: Ranks, num_micros: int) -> None:
        """Equal to `core.each` or within the record's tolerance, in every step; parameters of a group of one untouched."""
        expected = ranks_of_two.once(observe, [EACH], num_micros, False, self._splits())
        found = ranks_of_two.once(observe, self._handlers(), num_micros, False, self._splits())
        record, config = self._record()
        tolerance = record.tolerance_with(config)
        assert 0.0 <= tolerance < 1.0, f"a tolerance of {tolerance} lets a reducer pass that sums nothing"
        for wanted, got in zip(expected, found, strict=True):
            due, given = wanted.gradients, got.gradients
            if record.role == "transform":
                shapes = [[{name: one.shape for name, one in step.items()} for step in steps] for steps in (due, given)]
                assert shapes[0] == shapes[1], "a transform leaves gradients their shapes"
            elif tolerance == 0.0:
                _assert_equal(due, given, within=1e-12)
            else:
                left_alone = [name for name in due[0] if name.startswith(ALONE)]
                alone, given_alone = ([{name: step[name] for name in left_alone} for step in steps] for steps in (due, given))
                _assert_equal(alone[:1], given_alone[:1], within=1e-12)
                _assert_equal(alone, given_alone, within=100 * LR)
                for name in due[0].keys() - set(left_alone):
                    _assert_within(name, [step[name] for step in due], [step[name] for step in given], tolerance)

    def test_gradients_are_deterministic_and_equal_on_all_ranks(self, ranks_of_two: Ranks) -> None:
        """Two runs give the same bits, and replicas hold the same gradient of what they share."""
        first = ranks_of_two.once(observe, self._handlers(), 2, False, self._splits())
        second = ranks_of_two(observe, self._handlers(), 2, False, self._splits())
        _assert_same_bits(first, second, "a second run gives other bits")
        for step, (mine, theirs) in enumerate(zip(first[0].gradients, first[1].gradients, strict=True)):
            differing = [name for name in mine if not name.startswith(ALONE) and not torch.equal(mine[name], theirs[name])]
            assert not differing, f"step {step}: ranks that hold one weight have different gradients of it: {differing}"

    def test_ranks_issue_same_collectives_once_per_step(self, ranks_of_two: Ranks) -> None:
        """Every rank issues the same collectives in the same order, and more micro-batches cost no more of them."""
        few, many = (ranks_of_two.once(observe, self._handlers(), num_micros, False, self._splits()) for num_micros in (1, 3))
        for seen in (few, many):
            for step in range(NUM_STEPS):
                assert_same_sequence([rank.calls[step] for rank in seen])
        for one, three in zip(few[0].calls, many[0].calls, strict=True):
            less, more = [call.op for call in one], [call.op for call in three]
            assert less == more, f"a step of one micro-batch has {len(less)} collectives, and of three {len(more)}"

    def test_failed_backward_leaves_no_state(self, ranks_of_two: Ranks) -> None:
        """What a failed step left is discarded at the next `begin_step`."""
        clean = ranks_of_two.once(observe, self._handlers(), 2, False, self._splits())
        failed = ranks_of_two(observe, self._handlers(), 2, True, self._splits())
        _assert_same_bits(clean, failed, "after a step that failed there are other bits")

    def test_canonical_sums_match_one_process(self, ranks_of_two: Ranks) -> None:
        """The hash equals that of one process, if the record says `canonical`; also after a failed step."""
        record, config = self._record()
        if not record.fixed_order or record.role != "reducer" or record.tolerance_with(config):
            pytest.skip("its record does not promise it")
        plans = (tables(self._handlers(), 6 // dp, dp=dp, reduction="canonical") for dp in (1, 2))
        one, two = ({**plan, "batch": {"global_size": 12, "micro_size": 2}} for plan in plans)
        assert differing([trained(one, 2)], ranks_of_two(trained, two, 2)) == []
        clean, failed = (ranks_of_two(observe, self._handlers(), 1, fail, False, "canonical") for fail in (False, True))
        _assert_same_bits(clean, failed, "after a step that failed canonical sums have other bits")

    def test_detach_removes_all_hooks(self, ranks_of_two: Ranks) -> None:
        """After `Run.close` no hook is left on any parameter."""
        for seen in ranks_of_two.once(observe, self._handlers(), 1, False, self._splits()):
            assert seen.hooks_left == 0, f"after the run {seen.hooks_left} hooks are left on parameters"

    def test_duplicate_or_missing_reducer_is_refused(self) -> None:
        """Core checks the list: every handler that correctness needs must be there exactly once."""
        from sley_core.plan.check import check_plan

        if self._record()[0].role != "reducer":
            pytest.skip("only a reducer is needed exactly once")
        for handlers in ([], [self.handler, EACH]):
            problems = check_plan(plan_from_dict(tables(handlers, 1)), 2)
            assert problems, f"{handlers} should be refused"
            assert all(problem.code.startswith("handler") for problem in problems), problems

    def _handlers(self) -> list[Handler]:
        """Returns the handlers of the test's plan: the tested one, with a reducer before or after it if it is none."""
        record, _ = self._record()
        if record.role == "reducer":
            return [self.handler]
        return [self.handler, EACH] if "reducer" in record.before else [EACH, self.handler]

    def _splits(self) -> bool:
        return self._record()[0].result == "full"

    def _record(self) -> tuple[GradientHandlerRecord, Table]:
        (*_, component) = plan_from_dict(tables([self.handler], 1)).gradient_handlers
        assert isinstance(component.record, GradientHandlerRecord)
        return component.record, component.config


def _assert_same_bits(clean: list[Seen], others: list[Seen], what: str) -> None:
    """Asserts that all ranks' gradients are bit for bit equal in two runs. what: begins the message."""
    for rank, (one, other) in enumerate(zip(clean, others, strict=True)):
        for step, (before, after) in enumerate(zip(one.gradients, other.gradients, strict=True)):
            differing = [name for name, gradient in before.items() if not torch.equal(gradient, after[name])]
            assert not differing, f"{what}: rank {rank}, step {step}: the gradients of {', '.join(differing)}"


def _assert_equal(due: list[dict[str, Tensor]], given: list[dict[str, Tensor]], within: float) -> None:
    """Asserts that gradients are equal within a tolerance, relative and absolute."""
    for number, (wanted, found) in enumerate(zip(due, given, strict=True)):
        for name, gradient in wanted.items():
            is_close = torch.allclose(found[name], gradient, rtol=within, atol=within)
            error, norm, due_norm = (float(one.norm()) for one in (found[name] - gradient, found[name], gradient))
            alone = "what this rank has" if name.startswith(ALONE) else "the sum over the reduce group"
            assert is_close, (
                f"step {number}: the gradient of {name} is not {alone}: its norm is {norm:.3g}, not "
                f"{due_norm:.3g}, and that of the difference {error:.3g}"
            )


def _assert_within(name: str, due: list[Tensor], given: list[Tensor], tolerance: float) -> None:
    """Compares the first step, and the sum over all steps: a reducer may deliver later what it left out, but not twice."""
    for num_steps in (1, NUM_STEPS):
        missing = torch.stack(given[:num_steps]).sum(0) - torch.stack(due[:num_steps]).sum(0)
        error = missing.norm() / torch.stack([one.norm() for one in due[:num_steps]]).sum().clamp_min(1e-12)
        assert error <= tolerance, (
            f"{name}: relative error {error:.3g} after {num_steps} steps; its record allows {tolerance:.3g}"
        )


def _num_hooks(run: Run) -> int:
    """Returns the number of hooks on the run's parameters."""
    hooks = ((one._post_accumulate_grad_hooks, one._backward_hooks) for one in (param.parameter for param in run.registry))
    return sum(len(each or ()) for pair in hooks for each in pair)
