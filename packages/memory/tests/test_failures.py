"""What fails in the middle leaves no wrong numbers: interrupted offloads, failed steps, reads while memory is away."""

from __future__ import annotations

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.copies import HostStream
from sley_core.comm.world import World
from sley_core.errors import StateError
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.plans import small_plan
from sley_testing.runs import weights

EVERYTHING = [{"use": "memory.everything", "bucket_mb": 0.004}]


@pytest.fixture
def run(texts):
    plan = plan_from_dict(small_plan(precision__compute="bf16", offload=EVERYTHING), texts)
    with World.join("cpu") as world, assemble(plan, world) as made:
        made.step()
        yield made


@pytest.mark.parametrize("number", [0, 3, 20])
def test_an_offload_that_is_interrupted_brings_back_what_had_left(run, monkeypatch, number):
    """Also the second one, of which the host had older values."""
    for _ in range(2):
        before = _held(run)
        calls, copy = [], HostStream.copy

        def late(stream, target, source, calls=calls, copy=copy):
            calls.append(1)
            if len(calls) == number + 1:
                raise KeyboardInterrupt
            copy(stream, target, source)

        with monkeypatch.context() as patch:
            patch.setattr(HostStream, "copy", late)
            with pytest.raises(KeyboardInterrupt):
                run.memory.offload()
        run.memory.onload()
        assert_same_bits(before, _held(run))
        run.memory.offload()
        run.memory.onload()
        run.step()


def _held(run):
    parts = ("weights", "masters", "optimizer_states")
    return {f"{part} {name}": value.clone() for part in parts for name, value in run.memory.host(part)}


def test_a_step_by_hand_while_gradients_are_away_is_refused(run):
    run.memory.offload("gradients")
    with pytest.raises(StateError, match="gradients, but they are offloaded"):
        run.store.begin_step()
    run.memory.onload()
    run.store.begin_step()


def test_a_state_dict_while_weights_are_away_is_refused(run):
    layer = run.layers[1].module
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    run.memory.offload()
    with pytest.raises(StateError, match="weights, but they are offloaded"):
        layer.state_dict()
    run.memory.onload()
    assert_same_bits(before, dict(layer.state_dict()))


def test_what_is_read_of_memory_that_is_here_is_a_copy(run):
    first = dict(run.memory.host("weights"))
    kept = {name: value.clone() for name, value in first.items()}
    run.step()
    assert_same_bits(kept, first)
    assert any(not torch.equal(value, first[name]) for name, value in weights(run).items() if name in first)


def fail_and_offload(tables, folder):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()

        def fail(*_):
            raise ValueError("within the backward")

        hook = run.registry.trainable[0].parameter.register_hook(fail)
        with pytest.raises(ValueError, match="within the backward"):
            run.step()
        hook.remove()
        with pytest.raises(StateError, match="the last step failed"):
            run.memory.offload()
        run.step()
        run.memory.offload()
        run.memory.onload()
        run.step()
        return weights(run)


def test_nothing_leaves_while_exchanges_of_a_failed_step_may_be_at_work(ranks, texts):
    tables = small_plan(offload=EVERYTHING, gradient_handlers=[{"use": "core.each"}])
    first, second = ranks(2)(fail_and_offload, tables, texts)
    assert_same_bits(first, second)


def evaluate_and_offload(tables, folder, fails):
    """Two times: an evaluation that fails where `fails`, then one call after which memory may leave. Returns the weights."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        run.evaluate()

        def fail(*_):
            raise ValueError("within the evaluation")

        for mends in (run.evaluate, run.step):
            if fails:
                hook = run.layers[1].module.register_forward_hook(fail)  # the next layer's shards are on their way
                with pytest.raises(ValueError, match="within the evaluation"):
                    run.evaluate()
                hook.remove()
                with pytest.raises(StateError, match=r"step-failed.*the last evaluation failed"):
                    run.memory.offload()
            mends()
            run.memory.offload()
            run.memory.onload()
        run.step()
        return {name: value.clone() for name, value in run.memory.host("weights")}


def test_nothing_leaves_while_gathers_of_a_failed_evaluation_may_be_at_work(ranks, texts):
    """A peer reads shards where they lie. The next evaluation or step waits until it has; no number is another for it."""
    tables = small_plan(offload=EVERYTHING, parallel={"wp": 2}, weights={"use": "isp.communicator"})
    tables |= {"evaluation": {"every": 100, "steps": 1}}
    failed, plain = (ranks(2)(evaluate_and_offload, tables, texts, fails) for fails in (True, False))
    for one, other in zip(failed, plain, strict=True):
        assert_same_bits(one, other)


def backward_by_hand(tables, folder, moves):
    """What the backward of a forward by hand is told while weights are away, and the gradient once they are back."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        run.store.begin_step()
        hidden = torch.stack([run.dataset[at]["tokens"] for at in range(2)])
        for layer in run.layers:
            hidden = layer.module(hidden)
        told = ""
        if moves:
            run.memory.offload("weights").wait()
            with pytest.raises(StateError) as raised:
                hidden.sum().backward(retain_graph=True)
            told = str(raised.value)
            run.memory.onload("weights")
        run.store.begin_step()
        hidden.sum().backward()
        param = run.registry["blocks.1.attention.query.weight"]
        gradient = run.store.gradient(param).clone()
        run.step()
        return told, gradient, weights(run)


def test_shards_are_not_gathered_while_they_are_away(ranks, texts):
    """By a backward whose forward came before they left; torch would read memory that is not there, and so would peers."""
    tables = small_plan(offload=EVERYTHING, parallel={"wp": 2}, weights={"use": "isp.communicator"})
    moved, plain = (ranks(2, 60)(backward_by_hand, tables, texts, moves) for moves in (True, False))
    for (told, gradient, after), (_, wanted, wanted_after) in zip(moved, plain, strict=True):
        assert "needs the run's weights, but they are offloaded" in told
        assert 'run.memory.onload("weights")' in told
        assert torch.equal(gradient, wanted)
        assert_same_bits(after, wanted_after)
