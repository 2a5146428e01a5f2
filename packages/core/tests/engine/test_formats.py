"""`[precision] keep` and the formats of buffers: what is narrow, what is not, in a run and in what it saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sley_core.errors import PlanError
from sley_testing.parity import assert_same_bits
from sley_testing.runs import record, same_on_all, weights

KEEP = {"compute": "bf16", "keep": ["*.router.*"]}


def tables(small, precision=KEEP, **changes):
    return small(model={"factory": "own_formats:layers"}, precision=precision, **changes)


def by_hand(first, batches):
    """Steps the layers with SGD, fp32 masters of what is narrow, and routers in fp32; returns losses and weights."""
    import own_data
    import own_formats

    made = own_formats.layers(own_data.Rows.info)
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
    losses, wanted = by_hand(found.first, batches)
    assert [row["loss"] for row in found.rows] == pytest.approx(losses, rel=2**-8)
    for name, one in wanted.items():
        value = found.weights[name]
        assert value.dtype is (torch.float32 if ".router." in name else torch.bfloat16)
        torch.testing.assert_close(value, one, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("changes", [{}, {"parallel__reduction": "canonical"}, {"activations": {"use": "core.recompute"}}])
def test_replicas_are_those_of_one_process(ranks, own, small, changes):
    plan = tables(small, batch__global_size=4, **changes)
    reference = record(plan, 3, folder=own)
    layouts = ranks(2)(record, plan, 3, folder=own)
    same_on_all(layouts)
    for name, value in reference.weights.items():
        assert layouts[0].weights[name].dtype is value.dtype
        torch.testing.assert_close(layouts[0].weights[name].double(), value.double(), rtol=2**-7, atol=2**-9)


def test_it_goes_on_from_a_checkpoint_with_the_same_bits(own, small, alone, tmp_path):
    with alone(tables(small)) as run:
        run.step()
        place = run.save_checkpoint(tmp_path / "checkpoint")
        run.step()
        wanted = weights(run)
        run.load_checkpoint(place)
        run.step()
        assert_same_bits(wanted, weights(run))
    with alone(tables(small)) as run:
        run.load_checkpoint(place)
        run.step()
        assert_same_bits(wanted, weights(run))


def test_a_run_says_what_becomes_what(small, alone):
    with alone(tables(small)) as run:
        (note,) = [one for one in run.notes if "stay in" in one]
    assert note == (
        "7 parameters compute in bfloat16 and are stepped in float32, 4 stay in float32; buffers keep their format: "
        "`blocks.0.table` (float32), `blocks.0.narrow` (float16), `blocks.0.quantized` (float8_e4m3fn), "
        "`blocks.1.table` (float32), `blocks.1.narrow` (float16), ..."
    )


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_buffers_have_the_format_that_the_factory_gave_them(own, small, compute):
    """The forward asks; without `keep` the router of a narrow model is narrow too."""
    plan = tables(small, {"compute": compute, "keep": ["*.router.*"]})
    assert record(plan, 1, folder=own).rows[0]["loss"] > 0


def test_formats_that_do_not_meet_are_explained(own, small):
    plan = small(model={"factory": "own_formats:layers", "options": {"casts": False}}, precision=KEEP)
    with pytest.raises(RuntimeError, match="dtype") as caught:
        record(plan, 1, folder=own)
    assert any("buffers keep their format" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("keep", "message"),
    [(["*.routers.*"], "`*.routers.*` matches no parameter"), (["*.router.*", "nothing"], "`nothing` matches no parameter")],
)
def test_patterns_that_match_nothing_are_refused(small, alone, keep, message):
    with pytest.raises(PlanError) as caught, alone(tables(small, {"compute": "bf16", "keep": keep})):
        pass
    (one,) = caught.value.diagnostics
    assert (one.code, one.message) == ("precision-keep", message)
