"""An evaluation measures what it says and changes nothing."""

import pytest
import torch

from sley_core.errors import RunError, UsageError
from sley_testing.parity import assert_same_bits
from sley_testing.plain import split_batch
from sley_testing.runs import weights
from sley_testing.verify import find_dropout_modules

EVERY_2 = {"every": 2, "steps": 3}


def test_it_is_the_mean_over_the_first_held_out_samples(alone, small):
    """The sum over all labels that count by their number: twice the same, and that of one large microbatch."""
    found = []
    for micro_size in (1, 4):
        with alone(small(evaluation=EVERY_2, batch__micro_size=micro_size)) as run:
            found += [run.evaluate(), run.evaluate()]
            assert run.held_out.state() == {"samples": 12}
    assert found == pytest.approx([found[0]] * 4, rel=1e-12)
    with alone(small(evaluation=EVERY_2)) as run:
        loss = weight = 0.0
        run.held_out.restore({"samples": 0})
        for _ in range(3):
            batch = run.held_out.next()
            hidden = batch["tokens"]
            for layer in run.layers:
                hidden = layer.module(hidden)
            kept = batch["labels"] != -100
            loss += torch.nn.functional.cross_entropy(hidden[kept], batch["labels"][kept], reduction="sum").item()
            weight += kept.sum().item()
    assert found[0] == pytest.approx(loss / weight, rel=1e-12)


def test_held_out_losses_stand_in_the_rows_of_their_steps(alone, small):
    rows = []
    with alone(small(evaluation=EVERY_2, run__steps=5)) as run:
        run.listeners.append(rows.append)
        run.train()
        assert rows[-1]["held_out_loss"] == run.evaluate()
    assert [row["step"] for row in rows if "held_out_loss" in row] == [2, 4, 5], "and after the last step"


def test_nothing_is_changed_nor_kept(alone, small):
    with alone(small(evaluation=EVERY_2, model__options={"dropout": 0.5})) as run:
        assert find_dropout_modules(run) == [f"blocks.{number}.dropout" for number in range(4)]
        run.step()
        held = run.layers[1].module.dropout.eval()
        gradients = {param.name: run.store.gradient(param).clone() for param in run.store.params}
        before = weights(run)
        run.evaluate()
        assert_same_bits(before, weights(run))
        assert_same_bits(gradients, {param.name: run.store.gradient(param) for param in run.store.params})
        parts = [part for layer in run.layers for part in layer.module.modules()]
        assert [part for part in parts if not part.training] == [held], "a part that is held in evaluation mode stays so"


def test_fields_that_no_layer_reads_may_be_left_out_and_no_others(alone, small):
    with alone(small()) as run:
        batch = run.feed.next()
        tokens = {"tokens": batch["tokens"]}
        assert torch.equal(run.predict(tokens), run.predict(batch))
        assert torch.equal(torch.cat(run.predict(split_batch(tokens, 1))), run.predict(batch))
        for wrong in ({"labels": batch["labels"]}, {**tokens, "masks": batch["tokens"]}, {}, []):
            with pytest.raises(RunError, match="batch"):
                run.predict(wrong)
        with pytest.raises(RunError, match="a batch must have the declared fields"):
            run.evaluate(tokens)
        with pytest.raises(UsageError, match="no held-out samples"):
            run.evaluate()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_loss_of_a_batch_needs_no_evaluation_and_changes_nothing(alone, small, dropout):
    with alone(small(model__options={"dropout": dropout})) as run, alone(small(model__options={"dropout": dropout})) as same:
        batch = run.feed.next()
        before, drawn = weights(run), torch.get_rng_state()
        losses = [run.evaluate(batch), run.evaluate(split_batch(batch, 1))]
        logits = run.predict(batch)
        kept = batch["labels"] != -100
        wanted = torch.nn.functional.cross_entropy(logits[kept], batch["labels"][kept]).item()
        assert losses == pytest.approx([wanted] * 2, rel=1e-12)
        assert_same_bits(before, weights(run))
        assert torch.equal(drawn, torch.get_rng_state())
        assert all(part.training for layer in run.layers for part in layer.module.modules())
        assert run.step(batch)["loss"] == same.step(batch)["loss"], "the next step draws as if nothing had been"


def test_outputs_of_a_step_are_those_of_its_own_forward(alone, small):
    """The masks that dropout drew are in them, and what the loss writes in place is not."""
    tables = small(model__options={"dropout": 0.5}, loss={"factory": "own_losses:InPlace"})
    with alone(tables) as run:
        batch = run.feed.next()
        row, outputs = run.step(batch, return_outputs=True)
        kept = batch["labels"] != -100
        loss = torch.nn.functional.cross_entropy(outputs[kept], batch["labels"][kept]).item()
        assert row["loss"] == pytest.approx(loss, rel=1e-12)
        assert not outputs.requires_grad
        row, listed = run.step(split_batch(batch, 1), return_outputs=True)
        assert isinstance(listed, list)
        assert len(listed) == 4


@pytest.mark.parametrize("outputs", ["pair", "scalar", "number", "named"])
def test_outputs_in_containers(alone, small, outputs):
    model = {"factory": "own_models:giving", "options": {"what": outputs}}
    with alone(small(model=model, loss={"factory": "own_losses:OfFirst"})) as run:
        batch = run.feed.next()
        if outputs == "number":
            with pytest.raises(RunError, match="cannot be sent to another stage or returned"):
                run.predict(batch)
        elif outputs == "scalar":
            with pytest.raises(RunError, match=r"outputs-apart.* does not have the 1 samples of its microbatch along dim 0"):
                run.predict(batch)
            assert [each[1].shape for each in run.predict(split_batch(batch, 1))] == [()] * 4
        else:
            first, second = run.predict(batch)
            assert first.shape == second.shape == (4, 12, 16)
            assert torch.equal(second, -first)
        assert run.evaluate(batch) == pytest.approx(run.step(batch)["loss"], rel=1e-12)
