"""What a model or a batch gets wrong is told before it does harm, with the name of what is wrong."""

import importlib
import warnings
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from sley_core.errors import PlanError, RunError
from sley_testing.parity import assert_same_bits
from sley_testing.runs import running, weights


@pytest.fixture
def batch(own):
    """`batch(first, number)`: samples of the plan's dataset, as a program's own batch."""
    return importlib.import_module("own_data").batch


def test_a_token_beyond_the_vocabulary_is_told_with_its_place_and_leaves_the_run_as_it_was(alone, small, batch):
    bad = batch(0, 4)
    bad["tokens"][2, 5] = 16
    with alone(small()) as run:
        before = weights(run)
        with pytest.raises(RunError, match="field `tokens` has the token id 16 in row 2 of the batch at position 5; the vocab"):
            run.step(bad)
        assert run.num_steps_done == 0
        assert_same_bits(before, weights(run))
        assert run.step()["step"] == 1, "a program may go on"


@pytest.mark.parametrize("how", ["detached", "frozen"])
def test_a_loss_that_no_gradient_can_leave_is_refused(alone, small, how):
    with alone(small(model={"factory": "own_models:plain"})) as run:
        if how == "detached":
            run.layers[-1].module.register_forward_hook(lambda _, args, output: output.detach())
        else:
            for param in run.registry:
                param.parameter.requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require grad"):
            run.step()


def stepped(tables, folder):
    with running(tables, folder) as run:
        run.step()


def test_a_sparse_gradient_is_refused_with_its_name(ranks, own, small):
    tables = small(model={"factory": "own_models:embedding", "options": {"sparse": True}})
    with pytest.raises(RunError, match=r"the gradient of the parameter 'embed\.weight' is sparse"):
        ranks(1)(stepped, tables, own)


def weight_norm_of_old(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(linear)


COMPUTED = "became a Tensor instead of a parameter"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (torch.nn.utils.parametrizations.weight_norm, COMPUTED),
        (torch.nn.utils.parametrizations.spectral_norm, COMPUTED),
        (lambda linear: parametrize.register_parametrization(linear, "weight", nn.Tanh()), COMPUTED),
        (lambda linear: prune.l1_unstructured(linear, "weight", amount=0.5), COMPUTED),
        (weight_norm_of_old, COMPUTED),
        (
            lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight * 0)),
            "is not the tensor that the optimizer updates",
        ),
    ],
    ids=["weight_norm", "spectral_norm", "parametrization", "pruning", "weight_norm of old", "another parameter"],
)
def test_weights_that_a_program_computes_or_replaces_after_the_run_was_made(alone, small, change, says):
    """The optimizer steps what was there before, and would go on to, without any effect."""
    with alone(small()) as run:
        run.step()
        change(run.layers[1].module.inner)
        with pytest.raises(RunError, match=rf"weight-replaced.*'blocks\.0\.inner\.weight'.*{says}") as caught:
            run.step()
    assert says != COMPUTED or "in the factory" in caught.value.diagnostics[0].hint


@pytest.mark.parametrize(
    ("name", "part"), [("scale", nn.Parameter(torch.ones(()))), ("adapter.weight", nn.Linear(2, 2))], ids=["scale", "adapter"]
)
def test_parameters_that_a_program_adds_after_the_run_was_made(alone, small, name, part):
    """No optimizer would have them."""
    with alone(small()) as run:
        setattr(run.layers[1].module.inner, name.split(".")[0], part)
        with pytest.raises(RunError, match=rf"weight-unknown.*'blocks\.0\.inner\.{name}' was added after"):
            run.step()


@pytest.mark.parametrize(("value", "why"), [({1}, "set is not plain data"), (torch.eye(2).to_sparse(), "sparse")])
def test_a_state_that_no_checkpoint_can_store_is_refused_by_name(alone, small, tmp_path, monkeypatch, value, why):
    with alone(small(optimizer={"use": "core.adamw", "lr": 0.1})) as run:
        run.step()
        place = run.save_checkpoint(tmp_path / "saved")
        next(iter(run.stepper.update.optimizer.state.values()))["own"] = value
        with pytest.raises(RunError, match=rf"a checkpoint cannot store .*own', which .*{why}"):
            run.save_checkpoint(tmp_path / "other")
        monkeypatch.setattr("sley_trainer.run_state.RunRestorer.restore", Mock(side_effect=OSError("the disk is gone")))
        with pytest.raises(RunError, match="rank 0 could not load the checkpoint: OSError: the disk is gone"):
            run.load_checkpoint(place)


def by_factory(small, name, **changes):
    return small(loss={"factory": f"own_losses:{name}", **changes.pop("options", {})}, **changes)


@pytest.mark.parametrize("micro_size", [1, 2])
def test_a_mean_is_refused_at_the_first_batch_with_the_way_to_write_a_sum(alone, small, micro_size):
    with alone(by_factory(small, "Mean", batch__micro_size=micro_size, evaluation={"every": 9, "steps": 1})) as run:
        before = {param.name: param.parameter.detach().clone() for param in run.registry}
        for ask in (run.step, run.evaluate, run.train):
            with pytest.raises(
                RunError, match=r'the \d microbatches must add up to the loss weight of the batch, 1, but.*\n.*reduction="sum"'
            ) as caught:
                ask()
            assert caught.value.diagnostics[0].code == "loss-not-additive"
        assert all(torch.equal(param.parameter, before[param.name]) for param in run.registry)
        assert run.num_steps_done == 0


@pytest.mark.parametrize(("name", "parameter"), [("Tempered", "temperature"), ("Centres", "parts.bias"), ("Closed", "loss")])
def test_parameters_of_a_loss_are_refused_by_name(alone, small, name, parameter):
    with pytest.raises(PlanError, match=rf"loss-parameters.*`{parameter}`.*\n.*last layer"), alone(by_factory(small, name)):
        pass
