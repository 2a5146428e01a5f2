"""A forward that writes weights or buffers does as in a plain loop, or is refused before the update, by name."""

import pytest
import torch

from sley_core.engine import agreement
from sley_core.errors import SleyError
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.plugin import CrossEntropyConfig
from sley_testing.plain import PlainLoop, assert_step
from sley_testing.runs import gradients, record, running, weights

KINDS = ("in place", "data", "new data", "trained")


@pytest.fixture
def tables(small):
    def tables(kind, **changes):
        if kind == "max_norm":
            return small(model={"factory": "own_models:embedding", "options": {"max_norm": 1.0}}, **changes)
        return small(model={"factory": "own_models:model", "options": {"kind": "Momentum", "way": kind}}, **changes)

    return tables


@pytest.mark.parametrize("kind", [*KINDS, "max_norm"])
def test_one_process_writes_what_a_plain_loop_writes(alone, tables, kind):
    with alone(tables(kind, batch__micro_size=2)) as run:
        import own_data
        import own_models

        info = own_data.Rows.info
        layers = (
            own_models.embedding(info, max_norm=1.0) if kind == "max_norm" else own_models.model(info, "Momentum", way=kind)
        )
        for _, module in layers:
            module.double()
        sgd = lambda named: torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1)  # noqa: E731
        loop = PlainLoop(layers, CrossEntropy(CrossEntropyConfig()), optimizer=sgd)
        loop.load(weights(run))
        for step in range(2):
            micros = [own_data.batch(4 * step + at, 2) for at in (0, 2)]
            row = run.step(own_data.batch(4 * step, 4))
            assert_step(loop.step(micros), row, gradients(run), weights(run))


def refusals(plans, folder):
    found = []
    for plan in plans:
        with pytest.raises(SleyError) as caught:
            record(plan, 1, folder=folder)
        found.append((caught.value.diagnostics[0].code, str(caught.value)))
    return found


@pytest.mark.parametrize(
    ("kind", "size", "changes", "name", "why"),
    [
        ("in place", 2, {}, "blocks.0.slow.weight", "each replica"),
        ("data", 2, {}, "blocks.0.slow.weight", "each replica"),
        ("new data", 2, {}, "blocks.0.slow.weight", "each replica"),
        ("trained", 2, {}, "blocks.0.inner.weight", "each replica"),
        ("max_norm", 2, {}, "embed.weight", "each replica"),
        (
            "in place",
            1,
            {"activations": {"use": "core.recompute"}},
            "blocks.0.slow.weight",
            "written again when the backward recomputes",
        ),
        ("trained", 1, {"precision__compute": "bf16"}, "blocks.0.inner.weight", "an fp32 copy"),
    ],
)
def test_replicas_and_what_one_process_would_write_otherwise_are_refused(ranks, own, tables, kind, size, changes, name, why):
    plans = {kind: tables(kind, **changes)} if size == 1 else {kind: tables(kind) for kind in (*KINDS, "max_norm")}
    by_rank = [refusals(plans.values(), own)] if size == 1 else ranks(size).once(refusals, [*plans.values()], own)
    for code, words in [found[[*plans].index(kind)] for found in by_rank]:
        assert code == "weight-written"
        assert f"'{name}'" in words
        assert why in words


def test_a_frozen_weight_may_be_written_in_bf16(alone, tables):
    with alone(tables("in place", precision__compute="bf16")) as run:
        before = weights(run)["blocks.0.slow.weight"]
        run.step()
        assert not torch.equal(before, weights(run)["blocks.0.slow.weight"])


@pytest.mark.parametrize("kind", ["in place", "new", "data"])
def test_a_buffer_that_is_first_written_after_the_first_step_is_refused(alone, small, monkeypatch, kind):
    monkeypatch.setattr(agreement, "COMPARE_EVERY", 4)
    plan = small(
        model={"factory": "own_models:model", "options": {"kind": "LateWrites", "way": kind}}, batch__micro_size=2, run__steps=6
    )
    with alone(plan) as run:
        for _ in range(2 if kind != "data" else 3):
            run.step()
        before = weights(run)
        with pytest.raises(SleyError, match=r"blocks\.0\.count") as caught:
            run.step()
        assert caught.value.diagnostics[0].code == "model-buffer-written"
        after = weights(run)
        assert all(torch.equal(before[name], after[name]) for name in before if name != "blocks.0.count")


def drifts(plan, folder, name):
    agreement.COMPARE_EVERY = 3
    try:
        with running(plan, folder) as run:
            run.step()
            if run.world.rank == 1:
                dict(run.layers[1].module.named_parameters())[name].data += 1e-3
            run.step()
            run.step()
            with pytest.raises(SleyError, match=rf"blocks.0.{name}") as caught:
                run.step()
            return caught.value.diagnostics[0].code
    finally:
        agreement.COMPARE_EVERY = 256


def test_replicas_that_come_apart_are_found(ranks, own, small):
    plan = small(run__steps=9, gradient_handlers=[{"use": "core.each"}])
    assert ranks(2)(drifts, plan, own, "inner.weight") == ["ranks-differ"] * 2
