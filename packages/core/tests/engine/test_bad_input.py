"""What a model or a batch gets wrong is told before it does harm, with the name of what is wrong."""

from __future__ import annotations

import importlib
import warnings
from functools import partial

import pytest
import torch
from torch.nn.utils import prune

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError, RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.runs import assert_by_hand, record, weights


@pytest.fixture
def batch(own):
    """`batch(first, number)`: samples of the plan's dataset, as a program's own batch."""
    return importlib.import_module("own_data").batch


@pytest.fixture
def refused(alone, small):
    """`refused(batch, **changes)`: the one diagnostic of a step on `batch`, which leaves the run as it was."""

    def refused(bad, **changes):
        with alone(small(**changes)) as run:
            before = weights(run)
            with pytest.raises(RunError) as caught:
                run.step(bad)
            assert run.num_steps_done == 0
            assert all(torch.equal(value, weights(run)[name]) for name, value in before.items())
            assert run.step()["step"] == 1, "a program may go on"
        (diagnostic,) = caught.value.diagnostics
        return diagnostic

    return refused


def test_a_token_beyond_the_vocabulary_is_told_with_its_place(refused, batch):
    bad = batch(0, 4)
    bad["tokens"][2, 5] = 16
    found = refused(bad)
    assert found.code == "token-out-of-range"
    assert found.message == ("field `tokens` has the token id 16 in row 2 of the batch at position 5; the vocabulary has 16")


@pytest.mark.parametrize(("samples", "micro_size"), [(0, 1), (1, 2), (3, 2), (5, 4)])
def test_a_batch_that_is_no_number_of_micro_batches_is_refused(refused, batch, samples, micro_size):
    """Silently taking one micro-batch of another size, or none, would be a step nobody asked for."""
    bad = batch(0, 8)
    found = refused({name: value[:samples] for name, value in bad.items()}, batch__micro_size=micro_size)
    assert found.code == "batch-size"
    assert f"{samples} samples" in found.message
    assert f"micro_size = {micro_size}" in found.message


def test_a_buffer_that_training_writes_is_refused_with_its_name(alone, small):
    with alone(small(model={"factory": "own_models:batch_norm"})) as run, pytest.raises(PlanError) as caught:
        run.train()
    (found,) = caught.value.diagnostics
    assert found.code == "model-buffer-written"
    assert "3 buffers of BatchNorm1d (`blocks.0.norm.running_mean`" in found.message


def test_a_buffer_that_is_declared_per_rank_may_be_written(ranks, own, small):
    tables = small(model={"factory": "own_models:batch_norm", "options": {"declared": True}})
    means = ranks(2)(running_mean, tables, own)
    assert means[0].any()
    assert not torch.equal(*means)


def running_mean(tables, folder):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        assert run.train() == "finished"
        return weights(run)["blocks.0.norm.running_mean"]


@pytest.mark.parametrize("how", ["detached", "frozen"])
def test_a_loss_that_no_gradient_can_leave_is_refused(alone, small, how):
    with alone(small(model={"factory": "own_models:plain"})) as run:
        if how == "detached":
            run.layers[-1].module.register_forward_hook(lambda _, args, output: output.detach())
        else:
            for param in run.registry:
                param.parameter.requires_grad_(False)
        with pytest.raises(RunError, match="depends on no parameter that is trained"):
            run.step()


def stepped(tables, folder):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()


def test_a_sparse_gradient_is_refused_with_its_name(ranks, own, small):
    tables = small(model={"factory": "own_models:sparse"})
    with pytest.raises(RunError, match=r"the gradient of the parameter 'embed\.weight' is sparse"):
        ranks(1)(stepped, tables, own)


def told(tables, folder):
    """What rank 1's impossible token does to both ranks."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        own = importlib.import_module("own_data").batch(4 * world.rank, 2)
        if world.rank == 1:
            own["tokens"][0, 0] = 99
        run.step(own)


def test_a_bad_batch_of_one_rank_ends_all(ranks, own, small):
    with pytest.raises(RunError, match="token id 99") as caught:
        ranks(2)(told, small(limits={"collective_timeout_s": 5}), own)
    assert any(note.startswith("rank 1 of 2 failed first") for note in caught.value.__notes__)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (torch.nn.utils.parametrizations.weight_norm, "became a Tensor, which is no parameter"),
        (torch.nn.utils.parametrizations.spectral_norm, "became a Tensor, which is no parameter"),
        (lambda linear: torch.nn.utils.parametrize.register_parametrization(linear, "weight", torch.nn.Tanh()), "a Tensor"),
        (lambda linear: prune.l1_unstructured(linear, "weight", amount=0.5), "became a Tensor"),
        (lambda linear: weight_norm_of_old(linear), "became a Tensor"),
    ],
    ids=["weight_norm", "spectral_norm", "parametrization", "pruning", "weight_norm of old"],
)
def test_weights_that_a_program_computes_after_the_run_was_made(alone, small, change, said, is_first):
    """The optimizer steps what was there before, and would go on to, without any effect."""
    with alone(small()) as run:
        if not is_first:
            run.step()
        change(run.layers[1].module.inner)
        with pytest.raises(RunError) as caught:
            run.step()
    (problem,) = caught.value.diagnostics
    assert problem.code == "weight-replaced"
    assert "'blocks.0.inner.weight'" in problem.message
    assert said in problem.message
    assert "model factory" in problem.hint


def weight_norm_of_old(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(linear)


def add(linear):
    linear.scale = torch.nn.Parameter(torch.ones(()))


def wrap(linear):
    linear.adapter = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(("change", "name"), [(add, "scale"), (wrap, "adapter.weight")])
def test_parameters_that_a_program_adds_after_the_run_was_made(alone, small, change, name):
    """No optimizer would have them."""
    with alone(small()) as run:
        change(run.layers[1].module.inner)
        with pytest.raises(RunError, match=rf"'blocks\.0\.inner\.{name}' was added after") as caught:
            run.step()
    assert caught.value.diagnostics[0].code == "weight-unknown"


def by_factory(small, name, **changes):
    return small(loss={"factory": f"own_losses:{name}", **changes.pop("options", {})}, **changes)


@pytest.mark.parametrize("micro_size", [1, 2])
def test_a_mean_is_refused_at_the_first_batch_with_the_way_to_write_a_sum(alone, small, micro_size):
    with alone(by_factory(small, "Mean", batch__micro_size=micro_size, evaluation={"every": 9, "steps": 1})) as run:
        before = {param.name: param.parameter.detach().clone() for param in run.registry}
        for ask in (run.step, run.evaluate, run.train):
            with pytest.raises(RunError, match=r'batch is 1, but its \d micro-batches.*\n.*reduction="sum"') as caught:
                ask()
            assert caught.value.diagnostics[0].code == "loss-not-additive"
        assert all(torch.equal(param.parameter, before[param.name]) for param in run.registry)
        assert run.num_steps_done == 0


def test_what_the_hint_says_is_the_loop_by_hand_with_labels_ignored_unevenly(own, small):
    import own_data
    import own_models

    batches = [own_data.batch(5 * step, 4) for step in range(3)]
    batches[1]["labels"][2] = -100  # a micro-batch of which nothing counts
    found = record(by_factory(small, "Sum"), 3, folder=own, batches=batches)
    by_hand = partial(torch.optim.SGD, lr=0.1)
    assert_by_hand(found, own_models.plain(own_data.Rows.info), batches, by_hand, micro_size=1)


@pytest.mark.parametrize(("name", "parameter"), [("Tempered", "temperature"), ("Centres", "parts.bias"), ("Closed", "loss")])
def test_parameters_of_a_loss_are_refused_by_name(alone, small, name, parameter):
    with pytest.raises(PlanError, match=rf"loss-parameters.*`{parameter}`.*\n.*last layer"), alone(by_factory(small, name)):
        pass
