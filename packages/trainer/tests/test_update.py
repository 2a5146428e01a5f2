"""The end of a step: norms and clipping as torch has them, options per parameter, frozen and unfrozen ones."""

import math
from functools import partial

import pytest
import torch

from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import assert_equal_replicas, assert_parity, record, weights


def given_gradients(run):
    """From now on `run.given` has copies of the gradients as they reach the update, before it clips."""
    step = run.stepper.update.step

    def watched(*arguments):
        run.given = {param.name: run.store.gradient(param).clone() for param in run.store.params}
        return step(*arguments)

    run.stepper.update.step = watched


def kept_gradients(run):
    return {param.name: run.store.gradient(param).clone() for param in run.store.params}


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, "inf"])
def test_norm_and_clipping_are_torchs(alone, small, kind):
    p = math.inf if kind == "inf" else kind
    with alone(small(optimizer__clip_norm=0.01, optimizer__clip_kind=kind)) as run:
        given_gradients(run)
        for _ in range(2):
            row = run.step()
            # torch clips `given` in place.
            parameters = [torch.nn.Parameter(torch.empty_like(value)) for value in run.given.values()]
            for parameter, value in zip(parameters, run.given.values(), strict=True):
                parameter.grad = value
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=p).item()
            assert norm > 0.02
            assert row["grad_norm"] == pytest.approx(norm, rel=1e-12)
            assert_close_gradients(run.given, kept_gradients(run), 1e-12)


@pytest.mark.parametrize("clip_norm", [None, 1e6])
@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, "inf"])
def test_gradients_that_need_no_clipping_keep_every_bit(alone, small, clip_norm, kind):
    with alone(small(precision__compute="fp32", optimizer__clip_norm=clip_norm, optimizer__clip_kind=kind)) as run:
        given_gradients(run)
        row = run.step()
        assert row["grad_norm"] > 0
        assert_same_bits(run.given, kept_gradients(run))


def test_a_step_uses_the_rate_and_decay_of_each_group(own, small):
    """Plain SGD: w becomes w - factor x lr x (g + decay x w); norms and biases decay only where a group says so."""
    groups = [
        {"match": "blocks.0.*", "lr": 0.3},
        {"match": "blocks.1.inner.bias", "weight_decay": 0.5},
        {"match": "head.weight", "lr": 0.2, "weight_decay": 0.0},
    ]
    optimizer = {"use": "core.sgd", "lr": 0.1, "weight_decay": 0.25, "groups": groups}
    # The first of two steps of warm-up has half of every rate.
    tables = small(optimizer=optimizer, learning_rate={"use": "core.constant", "warmup_steps": 2})
    recorded = record(tables, 1, folder=own)
    expected = {}
    for name, gradient in recorded.gradients[0].items():
        lr = 0.3 if name.startswith("blocks.0.") else 0.2 if name == "head.weight" else 0.1
        decay = 0.25 if gradient.ndim > 1 and name != "head.weight" else 0.0
        decay = 0.5 if name == "blocks.1.inner.bias" else decay
        expected[name] = -0.5 * lr * (gradient + decay * recorded.initial_weights[name])
    assert len(expected) == 1 + 4 * 4 + 2
    changes = {name: value - recorded.initial_weights[name] for name, value in recorded.weights.items()}
    assert_close_gradients(expected, changes, 1e-12)


FROZEN = {"use": "core.sgd", "lr": 0.1, "groups": [{"match": "blocks.*", "freeze": True}]}


def test_what_a_group_freezes_has_no_gradient_and_keeps_its_bits(own, small):
    recorded = record(small(optimizer=FROZEN), 2, folder=own)
    names = set(recorded.initial_weights)
    frozen = {name for name in names if name.startswith("blocks.")}
    assert len(frozen) == 16
    assert recorded.gradients[0].keys() == names - frozen
    for name in names:
        assert torch.equal(recorded.initial_weights[name], recorded.weights[name]) == (name in frozen)


def thaw(run, after):
    """Lets everything be trained after that step."""

    def listener(row):
        if row["step"] == after:
            for param in run.registry:
                param.parameter.requires_grad_(True)

    run.listeners.append(listener)


@pytest.mark.parametrize(
    "optimizer", [FROZEN, FROZEN | {"use": "core.adamw", "lr": 1e-2, "clip_norm": 0.5}], ids=["sgd", "adamw"]
)
def test_what_is_unfrozen_between_steps_is_reduced_and_stepped(ranks, own, small, optimizer):
    tables = small(optimizer=optimizer)
    reference = record(tables, 3, folder=own, prepare=partial(thaw, after=1))
    layouts = ranks(2)(record, tables, 3, folder=own, prepare=partial(thaw, after=1))
    assert [len(gradients) for gradients in reference.gradients] == [3, 19, 19]
    assert all(not torch.equal(reference.initial_weights[name], reference.weights[name]) for name in reference.initial_weights)
    assert_parity(reference, layouts, "fp64")
    assert_equal_replicas(layouts)
    for layout in layouts:
        for wanted, found in zip(reference.gradients, layout.gradients, strict=True):
            assert_close_gradients(wanted, found, 1e-10)


def test_gradients_in_one_memory_are_added_and_clipped_apart_in_any_number_of_microbatches(own, small):
    optimizer = {"use": "core.sgd", "lr": 0.1, "clip_norm": 0.1}
    model = {"factory": "own_models:model", "options": {"kind": "Positions"}}
    whole, split = (
        record(small(model=model, optimizer=optimizer, batch={"global_size": 4, "micro_size": size}), 2, folder=own)
        for size in (4, 1)
    )
    assert_close_gradients(whole.gradients[0], split.gradients[0], 1e-10)
    assert_close_gradients(whole.weights, split.weights, 1e-10)
    for gradients in split.gradients:
        assert sum(gradient.square().sum() for gradient in gradients.values()) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_what_is_frozen_between_steps_stays_as_it_is(alone, small, precision):
    """With momentum, which would move it on without any gradient."""
    optimizer = {"use": "core.sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    with alone(small(optimizer=optimizer, precision__compute=precision)) as run:
        run.step()
        param = run.registry["blocks.2.inner.weight"]
        param.parameter.requires_grad_(False)
        before = weights(run)
        run.step()
        after = weights(run)
        matrices = [name for name in before if name.endswith("inner.weight")]  # in bf16 a vector may keep its bits
        assert [name for name in matrices if torch.equal(before[name], after[name])] == [param.name]
        param.parameter.requires_grad_(True)
        run.step()
        assert not torch.equal(weights(run)[param.name], after[param.name])


@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_what_a_program_freezes_before_the_first_step_is_trained_when_it_is_unfrozen(own, small, dampening):
    """As in a loop with torch's own SGD, in which it has no momentum yet and the others have."""
    momentum = {"momentum": 0.9, "dampening": dampening}
    late = "blocks.1.inner.weight", "blocks.2.inner.bias"

    def prepare(run):
        for name in late:
            run.registry[name].parameter.requires_grad_(False)
        thaw(run, after=2)

    recorded = record(small(optimizer={"use": "core.sgd", "lr": 0.1, **momentum}), 4, folder=own, prepare=prepare)
    assert [len(gradients) for gradients in recorded.gradients] == [17, 17, 19, 19]
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in recorded.initial_weights.items()}
    theirs = torch.optim.SGD(parameters.values(), lr=0.1, foreach=False, fused=False, **momentum)
    for gradients in recorded.gradients:
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        theirs.step()
    assert_close_gradients({name: value.detach() for name, value in parameters.items()}, recorded.weights, 1e-12)
