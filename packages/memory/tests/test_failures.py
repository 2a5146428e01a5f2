"""Tests that interrupted offloads, failed steps and reads of offloaded memory cause no wrong numbers."""

import pytest
import torch

from sley_core.comm.device import CopyStream
from sley_core.errors import StateError
from sley_testing.parity import assert_same_bits
from sley_testing.plans import small_plan
from sley_testing.runs import running, weights

EVERYTHING = [{"use": "memory.everything", "bucket_mb": 0.004}]


@pytest.fixture
def run(texts):
    with running(small_plan(precision__compute="bf16", offload=EVERYTHING), texts) as made:
        made.step()
        yield made


@pytest.mark.parametrize("number", [0, 20])
def test_an_interrupted_offload_is_undone(run, monkeypatch, number):
    """Also tests the second offload, for which the host has older values."""
    for _ in range(2):
        before = host_values(run)
        calls, copy = [], CopyStream.copy

        def late(stream, target, source, calls=calls, copy=copy):
            calls.append(1)
            if len(calls) == number + 1:
                raise KeyboardInterrupt
            copy(stream, target, source)

        with monkeypatch.context() as patch:
            patch.setattr(CopyStream, "copy", late)
            with pytest.raises(KeyboardInterrupt):
                run.memory.offload()
        run.memory.onload()
        assert_same_bits(before, host_values(run))
        run.memory.offload()
        run.memory.onload()
        run.step()


def host_values(run):
    parts = ("weights", "masters", "optimizer_states")
    return {f"{part} {name}": value.clone() for part in parts for name, value in run.memory.host(part)}


def test_state_dicts_while_weights_are_away_are_refused(run):
    layer = run.layers[1].module
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    run.memory.offload()
    with pytest.raises(StateError, match=r"`state_dict` needs the run's weights, but they are offloaded"):
        layer.state_dict()
    with pytest.raises(StateError, match=r"`load_state_dict` needs the run's weights, but they are offloaded"):
        layer.load_state_dict(before)
    run.memory.onload()
    assert_same_bits(before, dict(layer.state_dict()))


def test_host_reads_are_copies(run):
    first = dict(run.memory.host("weights"))
    kept = {name: value.clone() for name, value in first.items()}
    run.step()
    assert_same_bits(kept, first)
    assert any(not torch.equal(value, first[name]) for name, value in weights(run).items() if name in first)


SHARDED = {"offload": EVERYTHING, "batch__global_size": 4, "parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}}


def evaluate_and_offload(tables, folder):
    """Returns the weights of two runs that offload after an evaluation and after a step. In the first run each of them follows
    an evaluation that fails.
    """
    return [_evaluate_and_offload(tables, folder, fails) for fails in (True, False)]


def _evaluate_and_offload(tables, folder, fails):
    with running(tables, folder) as run:
        run.step()
        run.evaluate()

        def fail(*_):
            raise ValueError("within the evaluation")

        for call in (run.evaluate, run.step):
            if fails:
                hook = run.layers[1].module.register_forward_hook(fail)  # the next layer's shards are on their way
                with pytest.raises(ValueError, match="within the evaluation"):
                    run.evaluate()
                hook.remove()
                with pytest.raises(StateError, match=r"step-failed.*the last evaluation failed"):
                    run.memory.offload()
            call()
            run.memory.offload()
            run.memory.onload()
        return {name: value.clone() for name, value in run.memory.host("weights")}


def test_offloads_after_a_failed_evaluation_are_refused(ranks, texts):
    """A peer reads shards where they lie, until the next evaluation or step has waited for it."""
    tables = small_plan(**SHARDED, evaluation={"every": 100, "steps": 1})
    for failed, plain in ranks(2)(evaluate_and_offload, tables, texts):
        assert_same_bits(failed, plain)


def backward_by_hand(tables, folder):
    """Returns the gradients of backwards by hand, before and after an offload of the weights, and the error of a backward
    while they are away.
    """
    with running(tables, folder) as run:
        run.step()
        run.store.begin_step()
        hidden = torch.stack([run.dataset[index]["tokens"] for index in range(2)])
        for layer in run.layers:
            hidden = layer.module(hidden)
        gradients = []
        for moves in (False, True):
            if moves:
                run.memory.offload("weights").wait()
                with pytest.raises(StateError) as raised:
                    hidden.sum().backward(retain_graph=True)
                run.memory.onload("weights")
            run.store.begin_step()
            hidden.sum().backward(retain_graph=True)
            gradients.append(run.store.gradient(run.registry["blocks.1.attention.query.weight"]).clone())
        return str(raised.value), gradients


def test_shards_are_not_gathered_while_they_are_away(ranks, texts):
    """Otherwise a backward whose forward ran before the offload would read memory that is freed, and so would peers."""
    for message, (plain, moved) in ranks(2, 60)(backward_by_hand, small_plan(**SHARDED), texts):
        assert "needs the run's weights, but they are offloaded" in message
        assert 'run.memory.onload("weights")' in message
        assert torch.equal(moved, plain)
