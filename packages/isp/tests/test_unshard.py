"""Tests when and how many weights are unsharded, and that they are never older than their shards."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kinds import kind_plan, records_or_codes
from torch import Tensor, nn

from sley_core.engine.shards import gather_full_tensors
from sley_core.errors import RunError
from sley_isp import sharded_modules
from sley_isp.sharded_modules import ShardedModule
from sley_testing.collectives import assert_same_sequence, collectives
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import running, weights
from sley_trainer.run import Run

BLOCKS = 3
SHORT = {"batch": {"global_size": 4, "micro_size": 2}, "evaluation": {"every": 99, "steps": 1}, "run__steps": 9}
DEEP: dict[str, Any] = SHORT | {"model__num_layers": BLOCKS}


@contextmanager
def record_gathers(run: Run) -> Iterator[list[str]]:
    """Yields the list of the groups that are gathered within the block."""
    communicator, names = run.stepper.executor.communicator, []
    all_gather = communicator._all_gather

    def spy(group: Any) -> Any:
        names.append(group.name)
        return all_gather(group)

    communicator._all_gather = spy
    yield names
    communicator._all_gather = all_gather


def count_gathers(plans: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Returns the gathers, exchanges and counters of the third step and of an evaluation for each plan."""
    seen = []
    for tables in plans:
        with running(tables, folder) as run:
            run.step()
            run.step()
            pool = run.stepper.executor.communicator.groups[0].pool
            num_allocations = pool.num_allocations
            with record_gathers(run) as training, collectives() as calls:
                run.step()
            assert pool.num_allocations == num_allocations, "the pool has all buffers after two steps"
            with record_gathers(run) as evaluating:
                run.evaluate()
            communicator = run.stepper.executor.communicator
            rest = communicator.groups[0].pool.num_lent, len(communicator.prefetch.unsharded)
            seen.append({"training": Counter(training), "evaluating": Counter(evaluating), "rest": rest})
            seen[-1] |= {"counts": communicator.counts(), "calls": list(calls)}
    return seen


@pytest.mark.parametrize(
    "cases",
    [[("layer", 0.0), ("module", 1.0)], pytest.param([("layer", 1.0), ("module", 0.0)], marks=pytest.mark.campaign)],
    ids=["few", "more"],
)
def test_counts_of_one_micro_batch(ranks, sharded, texts, cases):
    """Each group is gathered twice, however much is recomputed. The table, and groups that are still unsharded when their
    backward starts, are gathered once. An evaluation gathers each group once.
    """
    plans = [
        sharded(2, weights={"unit": unit}, activations={"use": "core.recompute", "fraction": fraction}, **DEEP)
        for unit, fraction in cases
    ]
    for (unit, fraction), first, second in zip(cases, *ranks(2, 120)(count_gathers, plans, texts), strict=True):
        last = f"blocks.{BLOCKS - 1}" if unit == "layer" else f"blocks.{BLOCKS - 1}.feed_forward.down"
        assert_same_sequence([first.pop("calls"), second.pop("calls")])
        assert first == second
        for name, number in first["training"].items():
            is_last = name == last and not (unit == "module" and fraction == 1.0)
            assert number == (1 if name.startswith(("embed", "head")) or is_last else 2), name
        assert set(first["evaluating"].values()) == {1}
        assert first["counts"]["demand_gathers_per_step"] == 1
        assert first["counts"]["most_unsharded_groups"] <= (2 if unit == "layer" else 2 * 7 + 1)
        assert first["rest"] == (0, 0)


def record_launch_order(plans: list[dict[str, Any]], folder: Path) -> list[list[str]]:
    """Returns the modules called in the first block, and the groups gathered meanwhile, for each plan."""
    seen = []
    for tables in plans:
        with running(tables, folder) as run:
            run.step()
            with record_gathers(run) as events:
                block = next(layer.module for layer in run.layers if layer.name == "blocks.0")
                for name, module in block.named_modules():
                    module.register_forward_pre_hook(lambda *_, name=name, events=events: events.append(name))
                run.step()
            seen.append(events)
    return seen


def test_gathers_start_at_the_launch_point(ranks, sharded, texts):
    """The next block's gather starts at the launch point, which may be sharded or not."""
    points = {
        "attention": ("attention.query", ""),
        "attention.output": ("feed_forward", "attention.query"),
        "feed_forward*": ("feed_forward.gate", "attention.output"),
    }
    plans = [sharded(2, weights={"launch": launch}, **SHORT) for launch in points]
    for found in ranks(2, 60)(record_launch_order, plans, texts):
        for (before, after), events in zip(points.values(), found, strict=True):
            assert events.index(after) < events.index("blocks.1") < events.index(before)


def write_within_step(tables: dict[str, Any], folder: Path) -> tuple[int, dict[str, Tensor]]:
    """Writes a block's shards in the third step after their gather. Returns the number of later gathers, and the weights."""
    with running(tables, folder) as run:
        run.step()
        run.step()
        block = next(layer.module for layer in run.layers if layer.name == "blocks.1")

        def write(module: Any, args: Any) -> None:
            handle.remove()
            with torch.no_grad():
                run.registry["blocks.1.attention.query.weight"].parameter.mul_(1.5)

        handle = block.attention.register_forward_pre_hook(write)
        if run.stepper.executor.communicator is None:
            run.step()
            return 0, weights(run)
        with record_gathers(run) as names:
            run.step()
        return names.count("blocks.1"), weights(run)


def test_a_write_within_a_step_takes_effect_at_the_next_use(ranks, sharded, texts):
    _, reference = write_within_step(sharded(1, 1, **DEEP), texts)
    for number, found in ranks(2)(write_within_step, sharded(2, **DEEP), texts):
        assert_close_gradients(reference, found, 1e-10)
        assert number == 3


def record_counted_gathers(tables: dict[str, Any], folder: Path) -> tuple[list[str], dict[str, float]]:
    """Returns the gathers of the second step, and the counters."""
    sharded_modules.MIN_BYTES = 0
    with running(tables, folder) as run:
        run.step()
        with record_gathers(run) as names:
            run.step()
        return names, run.stepper.executor.communicator.counts()


def test_groups_of_a_layer_are_prefetched_together(ranks: Any, own: Path) -> None:
    for names, _ in ranks(2)(record_counted_gathers, kind_plan("Stacked", weights={"groups": [{"match": "*.experts*"}]}), own):
        assert names.count("block1") == names.count("block1 (2)") == 2
        assert names.index("block1 (2)") < names.index("block2")


def test_frozen_weights_are_gathered_for_forwards_and_input_gradients(ranks: Any, own: Path) -> None:
    """The layers before the first trainable one are gathered in forwards, a later frozen one twice. Neither reduces gradients.
    The linears of the first block are in the last one, too.
    """
    frozen = [{"match": match, "freeze": True} for match in ("embed.*", "block0.*", "block2.*", "head.*")]
    tables = kind_plan("Stacked", weights={"ahead": 0}, optimizer={"use": "core.sgd", "lr": 0.1, "groups": frozen})
    for names, counts in ranks(2)(record_counted_gathers, tables, own):
        assert [names.count(name) for name in ("embed", "block0", "block1", "block2")] == [1, 3, 2, 2]
        assert counts["reductions_per_step"] == 1


def model_output(run: Run) -> Tensor:
    hidden: Any = torch.arange(4)[None]
    for layer in run.layers:
        hidden = layer.module(hidden, torch.arange(4)[None]) if layer.name == "again" else layer.module(hidden)
    return hidden


def call_by_hand(plans: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Returns outputs between two steps, before and after a write, the gradient of a backward by hand, the state after failed
    calls, and the weights after the next step, for each plan.
    """
    found = []
    for tables in plans:
        with running(tables, folder) as run:
            run.step()
            with torch.no_grad():
                first = model_output(run)
                for param in run.registry:
                    param.parameter.mul_(2.0)
                    param.parameter.data = param.parameter.mT.contiguous().mT if param.parameter.ndim > 1 else param.parameter
                second = model_output(run)
            if run.world.size > 1:
                run.stepper.executor.communicator.groups[0].pool.trim()
            with torch.inference_mode():
                assert torch.equal(model_output(run), second)
            if run.world.size > 1:
                with pytest.raises(RunError) as caught:
                    model_output(run).sum().backward()
                assert caught.value.diagnostics[0].code == "gradient-complete"
                call_with_errors(run)
            run.store.begin_step()
            model_output(run).sum().backward()
            param = run.registry["head.weight"]
            gradient = run.store.gradient(param) if param.shard else param.parameter.grad
            gradient = gather_full_tensors({param: gradient}, run.groups)[param] / run.world.size
            run.step()
            found.append((first, second, gradient, weights(run)))
            communicator = run.stepper.executor.communicator
            assert communicator is None or communicator.groups[0].pool.num_lent == 0
    return found


def call_with_errors(run: Run) -> None:
    """Calls layers with wrong shapes, and with an all-gather that cannot start. All buffers return to the pool."""
    pool = run.stepper.executor.communicator.groups[0].pool
    for graph in (False, True):
        with torch.set_grad_enabled(graph), pytest.raises(RuntimeError):
            run.layers[-1].module(torch.zeros(1, 99, dtype=torch.float64))
        with torch.set_grad_enabled(graph), pytest.raises(IndexError):
            run.layers[0].module(torch.full((1, 4), 99))
        assert pool.num_lent == 0
    (transport,) = {type(one) for one in run.groups["wp"].transports.values()}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(transport, "all_gather", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model_output(run)
    assert pool.num_lent == 0


def test_a_model_called_by_hand(ranks, sharded, texts):
    """Outputs are right with and without gradients and after a write with other strides. No call leaves gathered weights."""
    models = [("mixed", {"reduce": "step"}), ("tables", {"embedding": "hidden"})]
    references = call_by_hand([sharded(1, 1, factory=name) for name, _ in models], texts)
    plans = [sharded(2, weights=options, factory=name) for name, options in models]
    for found in ranks(2, 60)(call_by_hand, plans, texts):
        for one, reference in zip(found, references, strict=True):
            for value, expected in zip(one[:3], reference[:3], strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
            assert_close_gradients(reference[3], one[3], 1e-10)


# -- reductions --------------------------------------------------------------------------------------------------------


BATCH = {"batch": {"global_size": 8, "micro_size": 2}, "evaluation": {"every": 9, "steps": 1}}
"""Two microbatches on each of two ranks."""


def count_reductions(plans: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Returns the counters and the bytes of gradients and weights for each plan."""
    seen = []
    for tables in plans:
        with running(tables, folder) as run:
            communicator = run.stepper.executor.communicator
            for _ in range(2):
                run.step()
            numbers = {"lent": communicator.groups[0].pool.num_lent, "gradients": run.store.num_bytes}
            shards = sum(param.parameter.nbytes for param in run.registry)
            seen.append(communicator.counts() | numbers | {"shards": shards})
    return seen


def test_each_gradient_is_reduced_once(ranks, sharded, texts):
    """Each gradient is reduced once per microbatch or step, also that of a tied weight."""
    cases = [("micro_batch", True), ("step", False), ("step", True)]
    plans = [sharded(2, weights={"reduce": reduce}, model__tie_embeddings=tied, **BATCH) for reduce, tied in cases]
    for found in ranks(2)(count_reductions, plans, texts):
        for (reduce, tied), one in zip(cases, found, strict=True):
            assert one["reductions_per_step"] == (2 * 4 if reduce == "micro_batch" else 4 - tied)
            assert one["most_full_gradients"] == (2 * 7 if reduce == "micro_batch" else 2 * 7 + 2 - tied)
            assert one["lent"] == 0
            assert one["gradients"] <= 1.2 * one["shards"], "a gradient of a shard's size each, and alignment"


VARIANTS: list[dict[str, Any]] = [{"overlap": False}, {}, {"unit": "module", "ahead": 3, "launch": "attention.output"}]


def test_no_option_changes_a_bit(ranks, sharded, texts):
    """The bits equal those of the mode without overlap, on three ranks, whose sums have an order."""
    changes = {"precision__compute": "fp32", "batch": {"global_size": 6, "micro_size": 1}, "evaluation": None}
    plans = [sharded(3, weights=options, **changes) for options in VARIANTS]
    for reference, *others in ranks(3, 120)(records_or_codes, plans, texts):
        for other in others:
            assert [row["loss"] for row in other.rows] == [row["loss"] for row in reference.rows]
            assert_same_bits(reference.weights, other.weights)


def run_uneven_steps(
    plans: list[dict[str, Any]], folder: Path, fails: bool = False
) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Returns losses and weights after steps of one, three and two microbatches on each of two ranks. fails: before the
    last step, a step fails in its second forward, while gradients of the first microbatch are in flight.
    """
    found = []
    for tables in plans:
        with running(tables, folder) as run:
            dp, losses = run.groups["dp"], []
            for number, size in enumerate([2, 6, 4]):
                generator = torch.Generator().manual_seed(number)
                y = torch.randn(size, 4, 6, generator=generator, dtype=torch.float64)
                batch = {"tokens": torch.randint(11, (size, 4), generator=generator), "y": y}
                own = {name: value.chunk(dp.size)[dp.coord] for name, value in batch.items()}
                if fails and number == 2:
                    answers = iter([None, ValueError("the test's failing layer")])

                    def fail(module: Any, args: Any, answers: Any = answers) -> None:
                        if error := next(answers):
                            raise error

                    handle = run.layers[-1].module.register_forward_pre_hook(fail)
                    with pytest.raises(ValueError, match="the test's failing layer"):
                        run.step(own)
                    handle.remove()
                losses.append(run.step(own)["loss"])
            found.append((losses, weights(run)))
    return found


def test_steps_of_different_sizes_and_a_failed_step(ranks, sharded, texts):
    """No gradient includes terms of a failed or earlier step."""
    changes = {"factory": "mixed", "batch": {"global_size": 8, "micro_size": 1}}
    ((losses, reference),) = run_uneven_steps([sharded(1, 1, **changes)], texts)
    plans = [sharded(2, weights=options, **changes) for options in ({"reduce": "step"}, {"embedding": "hidden"})]
    for found in ranks(2)(run_uneven_steps, plans, texts, fails=True):
        for found_losses, one in found:
            assert found_losses == pytest.approx(losses, rel=1e-10)
            assert_close_gradients(reference, one, 1e-10)


def write_gradient(module: nn.Module, rows: Tensor, tokens: Tensor, full: Tensor, adds: bool) -> None:
    ShardedModule.write_gradient(SimpleNamespace(module=module), None, rows, tokens, full, adds)  # type: ignore[arg-type]


def test_bf16_gradients_of_a_table_are_summed_in_fp32():
    """300 bf16 rows of ones add up to 300 in an fp32 buffer, but would not in bf16."""
    full = torch.empty(7, 2)
    write_gradient(nn.Embedding(7, 2), torch.full((300, 2), 1.0, dtype=torch.bfloat16), torch.full((300,), 5), full, False)
    assert full[5].tolist() == [300.0, 300.0]
    assert full.sum() == 600.0
