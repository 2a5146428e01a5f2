"""Tests when and how many weights are unsharded, and that they are never older than their shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sley_cma import offers
from sley_core.engine.shards import gather_full_tensors
from sley_core.errors import RunError
from sley_core.run import Run
from sley_isp.sharded_module import ShardedModule
from sley_testing.collectives import assert_same_sequence, can_read_peers, collectives
from sley_testing.live_bytes import memory_profile
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import record, running, weights

BLOCKS = 4
SHORT = {"batch": {"global_size": 4, "micro_size": 2}, "evaluation": {"every": 99, "steps": 1}, "run__steps": 9}
DEEP: dict[str, Any] = SHORT | {"model__num_layers": BLOCKS}


@contextmanager
def gathers_of(run: Run) -> Iterator[list[str]]:
    """Yields the list of the groups that are gathered within the block."""
    communicator, names = run.stepper.executor.weights, []
    all_gather = communicator._all_gather

    def spy(group: Any) -> Any:
        names.append(group.name)
        return all_gather(group)

    communicator._all_gather = spy
    yield names
    communicator._all_gather = all_gather


def counted(plans: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Returns the gathers, exchanges and counters of the third step and of an evaluation for each plan."""
    seen = []
    for tables in plans:
        with running(tables, folder) as run:
            run.step()
            run.step()
            with gathers_of(run) as training, collectives() as calls:
                run.step()
            with gathers_of(run) as evaluating:
                run.evaluate()
            communicator = run.stepper.executor.weights
            rest = communicator.pool.num_lent, len(communicator.prefetch.unsharded)
            seen.append({"training": Counter(training), "evaluating": Counter(evaluating), "rest": rest})
            seen[-1] |= {"counts": communicator.counts(), "calls": list(calls)}
    return seen


@pytest.mark.parametrize("unit", ["layer", "module"])
def test_counts_of_one_micro_batch(ranks, sharded, texts, unit):
    """Each group is gathered twice, however much is recomputed. The table, and groups that are still unsharded when their
    backward starts, are gathered once. An evaluation gathers each group once.
    """
    fractions = [0.0, 0.5, 1.0]
    plans = [
        sharded(2, weights={"unit": unit}, activations={"use": "core.recompute", "fraction": fraction}, **DEEP)
        for fraction in fractions
    ]
    last = f"blocks.{BLOCKS - 1}" if unit == "layer" else f"blocks.{BLOCKS - 1}.feed_forward.down"
    for fraction, one, other in zip(fractions, *ranks(2, 120)(counted, plans, texts), strict=True):
        assert_same_sequence([one.pop("calls"), other.pop("calls")])
        assert one == other
        for name, number in one["training"].items():
            is_last = name == last and not (unit == "module" and fraction == 1.0)
            assert number == (1 if name.startswith(("embed", "head")) or is_last else 2), name
        assert set(one["evaluating"].values()) == {1}
        assert one["counts"]["demand_gathers_per_step"] == 1
        assert one["counts"]["most_unsharded_groups"] <= (2 if unit == "layer" else 2 * 7 + 1)
        assert one["counts"]["allocations_after_step_2"] == 0
        assert one["rest"] == (0, 0)


def order(plans: list[dict[str, Any]], folder: Path) -> list[list[str]]:
    """Returns the modules called in the first block, and the groups gathered meanwhile, for each plan."""
    seen = []
    for tables in plans:
        with running(tables, folder) as run:
            run.step()
            with gathers_of(run) as events:
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
        "feed_forward": ("feed_forward.gate", "attention.output"),
        "attention.output": ("feed_forward", "attention.query"),
        "*": ("attention.output", "attention.query"),
        "feed_forward*": ("feed_forward.gate", "attention.output"),
    }
    plans = [sharded(2, weights={"launch": launch}, **SHORT, model__num_layers=3) for launch in points]
    for found in ranks(2, 60)(order, plans, texts):
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
        if run.stepper.executor.weights is None:
            run.step()
            return 0, weights(run)
        with gathers_of(run) as names:
            run.step()
        return names.count("blocks.1"), weights(run)


def test_a_write_within_a_step_takes_effect_at_the_next_use(ranks, sharded, texts):
    _, reference = write_within_step(sharded(1, 1, **DEEP), texts)
    for number, found in ranks(2)(write_within_step, sharded(2, **DEEP), texts):
        assert_close_gradients(reference, found, 1e-10)
        assert number == 3


Offered = tuple[list[int], int, dict[str, Tensor]]


def offered(tables: dict[str, Any], folder: Path, kinds: list[str]) -> list[Offered]:
    """Returns the offers of weights per step, the number of waits, and the weights after four steps, for each type of wait.

    never: no wait is due. block: one layer's shards are invalid after each step until its wait.
    """
    found = []
    offer = offers.Offers.offer
    for kind in kinds:
        with running(tables, folder) as run:
            steps, calls, kept = [], [0], {}

            def count(ring: Any, tensors: Any, mark: Any, *more: Any, steps: Any = steps) -> int:
                steps[-1] += "weights" in mark.label
                return offer(ring, tensors, mark, *more)

            @torch.no_grad()
            def bring(kept: Any = kept, calls: Any = calls) -> None:
                calls[0] += 1
                for param, value in kept.items():
                    param.parameter.data.copy_(value)  # as a collective writes: no version tells of it
                kept.clear()

            for layer in run.layers if kind != "none" else ():
                is_due = partial(bool, kept if kind == "block" and layer.name == "blocks.1" else {})
                run.parts.waits.before_layer(layer.name, bring, None if kind == "always" else is_due)
            offers.Offers.offer = count
            try:
                for _ in range(4):
                    steps.append(0)
                    run.step()
                    if kind == "block":
                        own = [param for param in run.registry if param.name.startswith("blocks.1.")]
                        kept |= {param: param.parameter.detach().clone() for param in own}
                        for param in own:
                            param.parameter.data.fill_(torch.nan)
                bring()
            finally:
                offers.Offers.offer = offer
            found.append((steps, calls[0] - 1, weights(run)))
    return found


@pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")
def test_shards_are_published_once_per_step_unless_a_wait_is_due(ranks, sharded, texts):
    kinds = ["none", "never", "block", "always"]
    for none, never, block, always in ranks(2, 120)(offered, sharded(2, **SHORT, model__num_layers=3), texts, kinds):
        assert none[0] == never[0] == [1] * 4
        assert never[1] == 0, "no wait is called for weights that are there"
        assert block[0][0] == 1
        assert 2 <= block[0][1] < always[0][1], "those of the other layers stay one offer"
        assert block[1] == 3, "once in each step after the first"
        for other in (never, block, always):
            assert_same_bits(none[2], other[2])


def allocated(tables: dict[str, Any], folder: Path) -> list[int]:
    """Returns the allocations of the third step that are at least as large as a shard."""
    with running(tables, folder) as run:
        run.step()
        run.step()
        with memory_profile() as profile:
            run.step()
        own = run.registry["experts.0.weight"].parameter.nbytes
    return [one.num_bytes for one in profile if one.num_bytes >= own]


def test_a_step_allocates_nothing_as_large_as_a_shard(ranks, sharded, texts):
    """Four microbatches allocate no placeholder, no product outside of the buffers, and no second sum."""
    plan = sharded(2, factory="experts", options={"number": 3, "width": 50}, **SHORT)
    assert ranks(2, 60)(allocated, plan, texts) == [[], []]


def output(run: Run) -> Tensor:
    hidden: Any = torch.arange(4)[None]
    for layer in run.layers:
        hidden = layer.module(hidden, torch.arange(4)[None]) if layer.name == "again" else layer.module(hidden)
    return hidden


def by_hand(plans: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Returns outputs between two steps, before and after a write, the gradient of a backward by hand, the state after failed
    calls, and the weights after the next step, for each plan.
    """
    found = []
    for tables in plans:
        with running(tables, folder) as run:
            run.step()
            with torch.no_grad():
                first = output(run)
                for param in run.registry:
                    param.parameter.mul_(2.0)
                second = output(run)
            if run.world.size > 1:
                run.stepper.executor.weights.pool.trim()
            with torch.inference_mode():
                assert torch.equal(output(run), second)
            if run.world.size > 1:
                with pytest.raises(RunError) as caught:
                    output(run).sum().backward()
                assert caught.value.diagnostics[0].code == "gradient-complete"
                _fail(run)
            run.store.begin_step()
            output(run).sum().backward()
            param = run.registry["head.weight"]
            gradient = run.store.gradient(param) if param.shard else param.parameter.grad
            gradient = gather_full_tensors({param: gradient}, run.groups)[param] / run.world.size
            run.step()
            found.append((first, second, gradient, weights(run)))
            communicator = run.stepper.executor.weights
            assert communicator is None or communicator.pool.num_lent == 0
    return found


def _fail(run: Run) -> None:
    """Calls layers with wrong shapes, and with an all-gather that cannot start. All buffers return to the pool."""
    pool = run.stepper.executor.weights.pool
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
            output(run)
    assert pool.num_lent == 0


def test_a_model_called_by_hand(ranks, sharded, texts):
    """Outputs are right with and without gradients and after a write. No call leaves gathered weights."""
    models = [("mixed", {}), ("mixed", {"reduce": "step"}), ("tables", {"embedding": "hidden"})]
    references = by_hand([sharded(1, 1, factory=name) for name, _ in models], texts)
    plans = [sharded(2, weights=options, factory=name) for name, options in models]
    for found in ranks(2, 60)(by_hand, plans, texts):
        for one, reference in zip(found, references, strict=True):
            for value, expected in zip(one[:3], reference[:3], strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
            assert_close_gradients(reference[3], one[3], 1e-10)


# -- reductions --------------------------------------------------------------------------------------------------------


BATCH = {"batch": {"global_size": 12, "micro_size": 2}, "evaluation": {"every": 9, "steps": 1}}
"""Three microbatches on each of two ranks."""


def count_reductions(plans: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Returns the counters, the names of count_reductions weights, and the bytes of gradients and weights for each plan."""
    seen = []
    for tables in plans:
        with running(tables, folder) as run:
            communicator, names = run.stepper.executor.weights, set()
            add = communicator.reducer.add

            def spy(group: Any, param: Any, write: Any, names: Any = names, add: Callable[..., None] = add) -> None:
                names.add(param.name)
                add(group, param, write)

            communicator.reducer.add = spy
            for _ in range(3):
                run.step()
            numbers = {"names": names, "lent": communicator.pool.num_lent, "gradients": run.store.num_bytes}
            shards = sum(param.parameter.nbytes for param in run.registry)
            seen.append(communicator.counts() | numbers | {"shards": shards})
    return seen


def test_each_gradient_is_reduced_once(ranks, sharded, texts):
    """Each gradient is reduced once per microbatch or step, also that of a tied weight."""
    cases = [(reduce, tied) for reduce in ("micro_batch", "step") for tied in (False, True)]
    plans = [sharded(2, weights={"reduce": reduce}, model__tie_embeddings=tied, **BATCH) for reduce, tied in cases]
    for found in ranks(2)(count_reductions, plans, texts):
        for (reduce, tied), one in zip(cases, found, strict=True):
            assert one["reductions_per_step"] == (3 * 4 if reduce == "micro_batch" else 4 - tied)
            assert one["most_full_gradients"] == (2 * 7 if reduce == "micro_batch" else 2 * 7 + 2 - tied)
            assert (one["allocations_after_step_2"], one["lent"]) == (0, 0)
            assert one["gradients"] <= 1.2 * one["shards"], "a gradient of a shard's size each, and alignment"


def test_nothing_is_reduced_for_frozen_weights(ranks, sharded, texts):
    """These are frozen weights of adapters, and a frozen weight with a trainable bias."""
    trained = {"base": [], "down": ["weight"], "up": ["weight"], "shifted": ["bias"]}
    names = {f"block{at}.{name}.{one}" for at in (0, 1) for name, attributes in trained.items() for one in attributes}
    for (found,) in ranks(2)(count_reductions, [sharded(2, factory="adapted")], texts):
        assert found["names"] == {"embed.table.weight", "head.weight", "head.bias", *names}


VARIANTS: list[dict[str, Any]] = [
    {"overlap": False},
    {},
    {"unit": "module", "ahead": 3, "reductions": 1},
    {"ahead": 0},
    {"launch": "attention.output"},
]


def all_recorded(plans: list[dict[str, Any]], folder: Path) -> list[Any]:
    return [record(tables, 2, folder=folder) for tables in plans]


def test_no_option_changes_a_bit(ranks, sharded, texts):
    """The bits equal those of the mode without overlap, on three ranks, whose sums have an order."""
    changes = {"precision__compute": "fp32", "batch": {"global_size": 6, "micro_size": 1}, "evaluation": None}
    plans = [sharded(3, weights=options, **changes) for options in VARIANTS]
    for reference, *others in ranks(3, 120)(all_recorded, plans, texts):
        for other in others:
            assert [row["loss"] for row in other.rows] == [row["loss"] for row in reference.rows]
            assert_same_bits(reference.weights, other.weights)


def uneven(plans: list[dict[str, Any]], folder: Path, fails: bool = False) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Returns losses and weights after steps of one, four and two microbatches on each of two ranks. fails: before the
    last step, a step fails in its second forward, while gradients of the first microbatch are in flight.
    """
    found = []
    for tables in plans:
        with running(tables, folder) as run:
            dp, losses = run.groups["dp"], []
            for number, size in enumerate([2, 8, 4]):
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
    ((losses, reference),) = uneven([sharded(1, 1, **changes)], texts)
    plans = [sharded(2, weights=options, **changes) for options in ({}, {"reduce": "step"}, {"embedding": "hidden"})]
    for found in ranks(2)(uneven, plans, texts, fails=True):
        for found_losses, one in found:
            assert found_losses == pytest.approx(losses, rel=1e-10)
            assert_close_gradients(reference, one, 1e-10)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest result of operations, except `known`."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known = known
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result is not self.known:
            self.numel = max(self.numel, result.numel())
        return result


def write(module: nn.Module, rows: Tensor, tokens: Tensor, full: Tensor, adds: bool) -> None:
    ShardedModule.write_gradient(SimpleNamespace(module=module), None, rows, tokens, full, adds)  # type: ignore[arg-type]


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_table(dtype, padding):
    """Many tokens share few rows. Sums have torch's order, without a second tensor of the table's size."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(11, (40,), generator=generator)
    rows = torch.randn(40, 4, generator=generator, dtype=torch.float64).to(dtype)
    before = rows.clone()
    table = nn.Embedding(300, 4, padding_idx=padding)
    expected = torch.ops.aten.embedding_dense_backward(rows, tokens, 300, -1 if padding is None else padding, False)
    full = torch.full((300, 4), torch.nan, dtype=dtype)
    with Largest(full) as largest:
        write(table, rows, tokens, full, False)
        assert torch.equal(full, expected)
        write(table, rows, tokens, full, True)
    torch.testing.assert_close(full, 2 * expected)
    assert torch.equal(rows, before), "the output's gradient is autograd's"
    assert largest.numel <= max(rows.numel(), 300)


def test_bf16_gradients_of_a_table_are_summed_in_fp32():
    """300 bf16 rows of ones add up to 300 in an fp32 buffer, but would not in bf16."""
    full = torch.empty(7, 2)
    write(nn.Embedding(7, 2), torch.full((300, 2), 1.0, dtype=torch.bfloat16), torch.full((300,), 5), full, False)
    assert full[5].tolist() == [300.0, 300.0]
    assert full.sum() == 600.0
