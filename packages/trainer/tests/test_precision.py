"""bf16 computes, fp32 remembers; `[precision] keep` and the formats of buffers."""

import random
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from sley_core.errors import PlanError
from sley_core.memory import ALIGNMENT_BYTES
from sley_core.protocols import GradientHandler
from sley_testing.parity import assert_same_bits
from sley_testing.runs import record, weights


def test_16_equal_gradients_sum_exactly_on_any_number_of_ranks(ranks, own, small):
    """A bf16 gradient has 8 bits and 16 of them carry 4 more, which fp32 holds and bf16 does not.

    The weight of the batch is 16 times as large too, and 1/12 and 1/192 have the same digits.
    """
    one, many = (
        small(
            data__options={"num_samples": 1},
            data__shuffle=False,
            precision__compute="bf16",
            batch={"global_size": size, "micro_size": 1},
        )
        for size in (1, 16)
    )
    wanted = record(one, 1, folder=own).gradients[0]
    assert {gradient.dtype for gradient in wanted.values()} == {torch.float32}
    for found in (record(many, 1, folder=own), *ranks(2)(record, many, 1, folder=own)):
        assert_same_bits(wanted, found.gradients[0])


class Ones(GradientHandler):
    """Every gradient is 1."""

    def attach(self, parts):
        self.store = parts.store

    def finish_step(self, step):
        for param in self.store.params:
            self.store.gradient(param).fill_(1.0)


def test_updates_that_bf16_cannot_hold_come_together_in_the_masters(alone, small):
    """1 - 0.001 is 1 in bf16, whose next number below is 0.9961; ten such steps arrive at 0.99 all the same."""
    with alone(small(precision__compute="bf16", optimizer__lr=1e-3)) as run:
        handler = Ones()
        handler.attach(run.parts)
        run.stepper.handlers.append(handler)
        gain = run.registry["blocks.0.norm.weight"].parameter
        assert gain.eq(1).all()
        found = []
        for step in range(1, 11):
            run.step()
            found.append(gain[0].item())
            master = torch.tensor(1 - step * 1e-3, dtype=torch.float64)
            assert found[-1] == master.to(torch.bfloat16).item(), step
        assert found[0] == 1.0
        assert len(set(found)) == 4, "in fewer moves than steps"


def autocast_results(run, around_all):
    """Returns the results of drawn uses of weights. around_all: whether one autocast block contains all uses, or each one."""
    weight = run.registry["head.weight"].parameter
    uses = {
        "step": lambda: run.step()["loss"],
        "evaluate": run.evaluate,
        "product": lambda: F.linear(torch.ones(weight.shape[1]), weight).tolist(),
    }
    results = []
    with torch.autocast("cpu", torch.bfloat16) if around_all else nullcontext():
        for use in random.Random(1).choices(list(uses), k=12):
            with nullcontext() if around_all else torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(use == "step"):
                results.append((use, uses[use]()))
    return results


def test_one_autocast_block_around_many_steps_changes_nothing(alone, small):
    """torch keeps casts of weights until the end of the block, also those without a graph. A step or evaluation drops them."""
    plan = small(precision__compute="fp32", evaluation={"every": 99, "steps": 1})
    with alone(plan) as run, alone(plan) as other:
        assert autocast_results(run, True) == autocast_results(other, False)


def test_masters_begin_with_what_was_drawn(alone, small):
    """In fp32, of which the working weights are the rounding."""
    with alone(small(precision__compute="bf16")) as narrow, alone(small(precision__compute="fp32")) as wide:
        masters = {entry.name: entry.parameter.detach() for entry in narrow.stepper.update.masters.local_params}
        assert_same_bits({param.name: param.parameter.detach() for param in wide.registry}, masters)
        rounded = {name: value.to(torch.bfloat16) for name, value in masters.items()}
        assert_same_bits(rounded, {param.name: param.parameter.detach() for param in narrow.registry})
        assert any(not torch.equal(masters[name], rounded[name].float()) for name in masters)


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("frozen", ["", "blocks.*"])
def test_memory_counts_masters_and_what_is_frozen_has_none(alone, small, precision, width, frozen):
    groups = [{"match": frozen, "freeze": True}] if frozen else []
    with alone(small(precision__compute=precision, optimizer={"use": "core.adamw", "lr": 1e-3, "groups": groups})) as run:
        run.step()
        assert {param.parameter.element_size() for param in run.registry} == {width}
        numels = [param.numel for param in run.registry.trainable]
        memory = run.memory.bytes
    assert memory["weights"] == width * sum(param.numel for param in run.registry)
    padded = [-(-4 * numel // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for numel in numels]
    assert memory["masters"] == (sum(padded) if precision == "bf16" else 0)
    assert memory["gradients"] == 4 * sum(numels), "no buffer, for nobody reduces"
    assert memory["optimizer_states"] == 2 * 4 * sum(numels), "two moments; step counts do not count"


KEEP = {"compute": "bf16", "keep": ["*.router.*"]}


def tables(small, precision=KEEP, **changes):
    return small(
        model={"factory": "own_models:model", "options": {"kind": "Routed", "num_blocks": 2}}, precision=precision, **changes
    )


def by_hand(first, batches):
    """Steps the layers with SGD, fp32 masters of what is narrow, and routers in fp32; returns losses and weights."""
    import own_data
    import own_models

    made = own_models.model(own_data.Rows.info, "Routed", 2)
    named = {f"{name}.{key}": one for name, module in made for key, one in module.named_parameters()}
    masters = {}
    for name, one in named.items():
        masters[name] = first[name].float().clone()
        one.data = masters[name].clone() if ".router." in name else first[name].bfloat16()
    losses = []
    for batch in batches:
        hidden = batch["tokens"]
        for _, module in made:
            hidden = module(hidden)
        count = int((batch["labels"] != -100).sum())
        loss = F.cross_entropy(hidden.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum") / count
        loss.backward()
        losses.append(float(loss.detach()))
        for name, one in named.items():
            masters[name] -= 0.5 * one.grad.float()
            one.data, one.grad = masters[name].to(one.dtype).clone(), None
    return losses, {name: one.detach() for name, one in named.items()}


def test_what_is_kept_is_computed_and_stepped_in_fp32(own, small):
    import own_data

    batches = [own_data.batch(4 * step, 4) for step in range(3)]
    plan = tables(small, batch={"global_size": 4, "micro_size": 4}, optimizer={"use": "core.sgd", "lr": 0.5})
    found = record(plan, 3, folder=own, batches=batches)
    losses, wanted = by_hand(found.initial_weights, batches)
    assert [row["loss"] for row in found.rows] == pytest.approx(losses, rel=2**-8)
    for name, one in wanted.items():
        value = found.weights[name]
        assert value.dtype is (torch.float32 if ".router." in name else torch.bfloat16)
        torch.testing.assert_close(value, one, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_buffers_keep_the_format_that_the_factory_gave_them_and_a_run_goes_on_with_the_same_bits(
    small, alone, tmp_path, compute
):
    """The forward asks; without `keep` the router of a narrow model is narrow too."""
    plan = tables(small, {"compute": compute, "keep": ["*.router.*"]}, run__on_nan="skip")
    with alone(plan) as run:
        run.step()
        place = run.save_checkpoint(tmp_path / "checkpoint")
        run.step()
        wanted = weights(run)
        run.load_checkpoint(place)
        run.step()
        assert_same_bits(wanted, weights(run))
    with alone(plan) as run:
        run.load_checkpoint(place)
        run.step()
        assert_same_bits(wanted, weights(run))


@pytest.mark.parametrize(("keep", "name"), [(["*.routers.*"], "*.routers.*"), (["*.router.*", "nothing"], "nothing")])
def test_patterns_that_match_nothing_are_refused(small, alone, keep, name):
    with pytest.raises(PlanError) as caught, alone(tables(small, {"compute": "bf16", "keep": keep})):
        pass
    (one,) = caught.value.diagnostics
    assert (one.code, one.message) == ("precision-keep", f"`{name}` matches no parameter")
