"""Tests that the policies of `memory`, activations on the host and selective recomputation, change no bit."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.engine.parts import MicroStep, Phase
from sley_core.errors import PlanError, RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_memory.plugin import SelectiveConfig
from sley_memory.selective import ATTENTION_OPERATORS, AttentionResults, AttentionStats, SelectiveRecompute
from sley_testing.habits import HABITS
from sley_testing.plans import small_plan
from sley_testing.runs import running

pytestmark = pytest.mark.timeout(120)
SHARING = ("GRU", "unsafe_split", "views of both", "data", "detach", "next layer")
HOST = {"use": "memory.host", "min_bytes": 1}
SELECTIVE = {"use": "memory.selective"}
MODEL = {"factory": "attending:layers"}

policies = pytest.mark.parametrize("policy", [HOST, SELECTIVE], ids=["host", "selective"])

# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@policies
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision__compute": "bf16"},
        {"precision__compute": "fp32", "precision__accumulation": "direct"},
        {"model": MODEL | {"options": {"dropout": 0.3}}},
    ],
    ids=["fp64", "bf16", "direct", "dropout"],
)
def test_policies_give_the_same_bits(compare_with_keep: Any, policy: dict[str, Any], changes: dict[str, Any]) -> None:
    counts = compare_with_keep(policy, **changes)
    if policy is HOST:
        assert counts["moved_bytes"] == counts["fetched_bytes"] > 0
        return
    assert counts["kept_attentions"] > 0
    assert counts["kept_bytes"] >= counts["max_kept_bytes"] > 0
    assert counts["recomputed_attentions"] == 0


def test_attention_with_dropout_is_recomputed(compare_with_keep: Any) -> None:
    """Otherwise its random numbers would be missing from the generator, and later dropouts would silently differ."""
    model = MODEL | {"options": {"attention_dropout": 0.3, "dropout": 0.3}}
    assert compare_with_keep(SELECTIVE, model=model, precision__compute="fp32")["kept_attentions"] == 0
    results = AttentionResults(AttentionStats())
    results.add([torch.ones(2)], has_dropout=True)
    assert (results.next_result(), results.stats.num_recomputed, results.num_bytes) == (None, 1, 0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("habit", HABITS)
@policies
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # forward-mode derivatives
def test_habits_of_models(compare_with_keep: Any, policy: dict[str, Any], habit: str) -> None:
    """Habits are double backwards, backwards within a forward, checkpoints within a layer, new weights and torch.func."""
    if policy is SELECTIVE and habit in ("AdaptiveAgain", "GradientInForward"):
        pytest.skip("`core.recompute` does not run it either")
    model = {"factory": "sley_testing.habits:model", "options": {"habit": habit}}
    counts = compare_with_keep(policy | {"layers": ["*"]}, model=model, data__sequence=16, evaluation=None)
    assert policy is SELECTIVE or counts["moved_bytes"] > 0


@pytest.mark.parametrize("policy", [HOST, HOST | {"min_bytes": 2**30}, SELECTIVE], ids=["host", "small", "selective"])
def test_writes_to_saved_tensors_are_refused(own: Path, texts: Path, policy: dict[str, Any]) -> None:
    """Autograd does not check packed tensors, so the backward would silently use other numbers."""
    tables = small_plan(model=MODEL | {"options": {"in_place": True}}, activations=policy)
    with running(tables, texts) as run:
        with pytest.raises(RunError) as caught:
            run.step()
        assert caught.value.diagnostics[0].code == "saved-in-place"


@policies
def test_a_step_that_fails_leaves_nothing(own: Path, texts: Path, policy: dict[str, Any]) -> None:
    import attending

    def lent() -> int:
        there = run.caller.policy
        return there.arena.num_lent_bytes if policy is HOST else there.stats.num_bytes

    tables = small_plan(model=MODEL, activations=policy)
    with running(tables, texts) as run:
        run.step()
        made = run.counts[policy["use"]].get("host_allocations")
        for _ in range(3):
            attending.FAILS[0] = True
            with pytest.raises(ValueError, match="asked to fail"):
                run.step()
            attending.FAILS[0] = False
            gc.collect()
            run.step()
            assert lent() == 0
        assert run.counts[policy["use"]].get("host_allocations") == made
    if policy is HOST:
        assert (run.caller.policy.arena.num_bytes, list(run.caller.policy.named_tensors())) == (0, []), "the run is closed"


# -- on the host -------------------------------------------------------------------------------------------------------


def test_storages_leave_the_device_before_the_backward_and_come_back_ahead(own: Path, texts: Path) -> None:
    """The head's backward fetches the last block's storages, and each block's those of the block before it, so that no backward
    waits. Only the outputs of blocks, which the next block holds, stay.
    """
    tables = small_plan(model=MODEL | {"options": {"num_blocks": 4}}, activations=HOST, batch__global_size=2)
    with running(tables, texts) as run:
        run.step()
        policy, whole = run.caller.policy, run.stepper.executor.loss.loss
        sizes: list[tuple[int, bool]] = []

        def loss(output: Any, batch: Any) -> Any:
            sizes.extend((storage.num_bytes, not storage.weak_reference.expired()) for storage in policy._storages.values())
            return whole(output, batch)

        run.stepper.executor.loss.loss = loss
        run.step()
        assert sum(size for size, is_alive in sizes if is_alive) < 0.1 * sum(size for size, _ in sizes)
        assert run.counts["memory.host"]["fetched_on_demand"] == 0


def test_a_storage_moves_once(own: Path, texts: Path) -> None:
    """Two blocks save one hidden state, and autograd saves views of one storage, but no byte is copied twice. Weights are
    not copied.
    """
    tables = small_plan(model=MODEL | {"options": {"num_blocks": 1}}, activations=HOST, batch__global_size=2)
    with running(tables, texts) as run:
        keys: list[tuple[int, int]] = []
        policy = run.caller.policy
        prepared = policy._fits_budget

        def sent(tensor: torch.Tensor) -> Any:
            keys.append((tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()))
            return prepared(tensor)

        policy._fits_budget = sent
        run.step()
        own_ones = {param.parameter.untyped_storage().data_ptr() for param in run.registry}
        own_ones |= {buffer.untyped_storage().data_ptr() for layer in run.layers for buffer in layer.module.buffers()}
    micro = 2 * 24
    # LayerNorm: input, mean, rstd; qkv's input; q, k, v as one; attention's two; dropouts are off; two linears, relu, sigmoid.
    assert not {address for address, _ in keys} & own_ones
    assert len(keys) == len(set(keys))
    assert sum(size == 8 * micro * 3 * 16 for _, size in keys) == 1, "q, k and v are one storage"


def test_host_memory_is_used_again(compare_with_keep: Any) -> None:
    counts = compare_with_keep(HOST, 3, model=MODEL, batch__global_size=16)
    assert counts["host_allocations"] < counts["moved_storages"] / 12, "24 microbatches share one's buffers"
    assert counts["host_bytes"] <= 1.02 * counts["max_away_bytes"] + 4096 * counts["host_allocations"]


def test_a_budget_of_host_memory_is_kept(compare_with_keep: Any) -> None:
    counts = compare_with_keep(HOST | {"budget_bytes": 40_000}, model=MODEL)
    assert 20_000 < counts["max_away_bytes"] <= 40_000
    none = compare_with_keep(HOST | {"budget_bytes": 0}, model=MODEL)
    assert none["moved_bytes"] == 0
    assert none["over_budget_bytes"] == counts["over_budget_bytes"] + counts["moved_bytes"]


def test_chosen_layers(compare_with_keep: Any) -> None:
    one = compare_with_keep(HOST | {"layers": 1}, num_steps=1, model=MODEL)["moved_bytes"]
    assert compare_with_keep(HOST | {"layers": ["2", "3"]}, num_steps=1, model=MODEL)["moved_bytes"] == 2 * one > 0


def test_unknown_layers_are_refused(texts: Path) -> None:
    tables = small_plan(activations=HOST | {"layers": ["block.1"]})
    with pytest.raises(PlanError, match=r"no layer matches `block\.1`") as caught, running(tables, texts):
        pass
    assert caught.value.diagnostics[0].code == "unknown-layer"


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", SHARING)
def test_tensors_of_one_storage_are_restored(compare_with_keep: Any, kind: str) -> None:
    model = {"factory": "attending:sharing", "options": {"kind": kind}}
    counts = compare_with_keep(HOST | {"layers": ["*"]}, model=model, evaluation=None)
    assert counts["moved_bytes"] > 0


@pytest.mark.parametrize("kind", ["data", "unsafe_chunk"])
def test_writes_to_another_layers_saved_tensors_are_refused(texts: Path, kind: str) -> None:
    """`core.keep` would use the written values, but the host has the saved ones. The next step starts without errors."""
    model = {"factory": "attending:spoiled", "options": {"kind": kind}}
    tables = small_plan(model=model, activations=HOST | {"layers": ["*"]})
    with running(tables, texts) as run:
        with pytest.raises(RunError, match="that shares its memory") as caught:
            run.step()
        assert caught.value.diagnostics[0].code == "saved-in-place"
        policy = run.caller.policy
        run.layers[2].module.forward = lambda h: h
        run.step()
        del caught
        gc.collect()
        assert policy.arena.num_lent_bytes == 0


# -- recomputed but for attention --------------------------------------------------------------------------------------


class Attentions(TorchDispatchMode):
    """Counts the attentions and the other operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.num, self.num_others = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_one = func in ATTENTION_OPERATORS
        self.num, self.num_others = self.num + is_one, self.num_others + (not is_one)
        return func(*args, **(kwargs or {}))


def call_selectively(layer: nn.Module, hidden: torch.Tensor, policy: SelectiveRecompute | None = None) -> torch.Tensor:
    """Returns the output of `layer`, called through the policy."""
    policy = policy or SelectiveRecompute(SelectiveConfig(layers=("layer",)), ["layer"])
    output: torch.Tensor = policy.call("layer", layer, (hidden,), {}, MicroStep(0, 0, Phase.TRAIN, 0, 0))
    return output


def test_attention_is_computed_once(own: Path, texts: Path) -> None:
    found = {}
    for policy in ("core.keep", "core.recompute", "memory.selective"):
        tables = small_plan(model=MODEL, activations={"use": policy}, batch__global_size=2)
        with running(tables, texts) as run, Attentions() as computed:
            run.step()
            found[policy] = computed.num, computed.num_others
    assert [found[policy][0] for policy in found] == [3, 6, 3]
    assert found["memory.selective"][1] > found["core.keep"][1], "nothing was recomputed"


def test_kept_attentions_are_freed_with_the_graph(own: Path, texts: Path) -> None:
    tables = small_plan(model=MODEL, activations=SELECTIVE)
    with running(tables, texts) as run:
        for _ in range(2):
            run.step()
            tally = run.caller.policy.stats
            assert tally.num_bytes == 0
        # Three blocks, one microbatch in flight: the output, fp64 [2, 2, 24, 8], and a number of each row.
        assert tally.max_bytes == 3 * (8 * 2 * 2 * 24 * 8 + 8 * 2 * 2 * 24)


def test_a_backward_may_run_twice(own: Path) -> None:
    """With `retain_graph` the layer is recomputed each time, with the same kept attention."""
    from attending import Block

    block = Block(16, 2, 0.0, 0.0, False)
    hidden = torch.randn(2, 8, 16, requires_grad=True)
    policy = SelectiveRecompute(SelectiveConfig(layers=("layer",)), ["layer"])
    output = call_selectively(block, hidden, policy)
    (first,) = torch.autograd.grad(output.sum(), hidden, retain_graph=True)
    (second,) = torch.autograd.grad(output.sum(), hidden)
    (wanted,) = torch.autograd.grad(block(hidden).sum(), hidden)
    assert torch.equal(first, wanted)
    assert torch.equal(second, wanted)
    assert policy.stats.num_kept == 1


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen below"])
@pytest.mark.parametrize(("when", "how"), [(1, "less often"), (2, "more often")])
def test_different_numbers_of_attentions_are_refused(own: Path, when: int, how: str, is_frozen: bool) -> None:
    """Otherwise attentions would get the results of others, which have the same shape."""
    from attending import ExtraAttention

    layer = ExtraAttention(16, when)
    layer.project.requires_grad_(not is_frozen)
    output = call_selectively(layer, torch.randn(2, 8, 16, requires_grad=not is_frozen))
    with pytest.raises(
        RunError, match=rf"calls its attention {how} than its first forward did \({2 + (when == 1)} times\)"
    ) as caught:
        output.sum().backward()
    assert caught.value.diagnostics[0].code == "attention-differs"


def test_a_recomputation_may_stop_before_an_attention(own: Path) -> None:
    from attending import NestedCheckpoint

    hidden = torch.randn(2, 8, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(NestedCheckpoint()(hidden).sum(), hidden)
    assert torch.equal(torch.autograd.grad(call_selectively(NestedCheckpoint(), hidden).sum(), hidden)[0], wanted)


def test_a_compiled_layer_with_slices_is_refused(texts: Path) -> None:
    sequence = {"use": "isp.all_to_all"}
    changes: dict[str, Any] = {"model__compile": True, "parallel": {"sp": 2}, "sequence": sequence}
    plan = plan_from_dict(small_plan(activations=SELECTIVE, **changes), texts)
    assert [problem.code for problem in check_plan(plan, 2)] == ["selective-compiled"]


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_compiled_layers_change_no_bit(compare_with_keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compare_with_keep(SELECTIVE, 2, model=MODEL | {"options": {"dropout": 0.3, "num_blocks": 1}, "compile": True})


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_compiled_layers_save_only_their_input_and_attention(own: Path) -> None:
    from attending import Block

    policy, block = SelectiveRecompute(SelectiveConfig(layers=("layer",)), ["layer"]), Block(16, 2, 0.0, 0.0, False)
    compiled = torch.compile(policy.compiled_forward("layer", block.forward), backend="aot_eager")
    assert policy.compiled_forward("other", print) is print
    hidden, saved = torch.randn(2, 24, 16, requires_grad=True), dict[int, torch.Tensor]()
    with saved_tensors_hooks(lambda tensor: saved.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor):
        output = compiled(hidden)
    weights_and_buffers = {tensor.data_ptr() for tensor in block.state_dict().values()}
    assert sum(tensor.nbytes for pointer, tensor in saved.items() if pointer not in weights_and_buffers) == (
        hidden.nbytes + hidden.nbytes + 4 * 2 * 2 * 24
    ), "the input, the attention's output, and a number of each of its rows"
    (expected,) = torch.autograd.grad(block(hidden).sum(), hidden)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), hidden)[0], expected)
