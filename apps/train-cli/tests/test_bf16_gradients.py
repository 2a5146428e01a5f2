"""`[precision] gradients = "bf16"`: sums, what ranks exchange, norms, clipping and updates, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits, differing, trained
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import BF16_SUMS, GRADIENTS, alone, assert_parity_of_parts, gradients, record, weights

PLAN = small_plan(
    model__num_layers=3,
    model__heads=2,
    model__kv_heads=None,
    model__vocab_size=257,
    data__sequence=16,
    batch__micro_size=1,
    precision={"compute": "bf16", "gradients": "bf16"},
)
BUCKETED = {"use": "dp.bucketed", "bucket_mb": 0.005}
SHARDED = {"use": "dp.sharded", "bucket_mb": 0.005}
ISP = {"use": "isp.communicator"}
TIED = {"model__tie_embeddings": True}
LAYOUTS: dict[str, tuple[int, Tables]] = {
    "dp2 sharded": (2, {"parallel": {"dp": 2}, "gradient_handlers": [SHARDED]}),
    "zero bubble, tied": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.zero_bubble_h1"}, **TIED}),
    "wp2": (2, {"parallel": {"dp": 2, "wp": 2}, "weights": ISP}),
    "sp2": (2, {"parallel": {"sp": 2}, "sequence": {"use": "isp.all_to_all"}}),
    "dp4 bucketed": (4, {"parallel": {"dp": 4}, "gradient_handlers": [BUCKETED]}),
    "dp2 on the wire in bf16": (2, {"parallel": {"dp": 2}, "gradient_handlers": [{**BUCKETED, "reduction": "bf16"}]}),
    "dp2 each": (2, {"parallel": {"dp": 2}}),
    "wp2 of dp4 sharded": (4, {"parallel": {"dp": 4, "wp": 2}, "weights": ISP, "gradient_handlers": [SHARDED]}),
    "1f1b": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_within_the_declared_tolerance(ranks: Any, texts: Path, layout: str):
    size, changes = LAYOUTS[layout]
    model = {key: value for key, value in changes.items() if key.startswith("model")}
    found = ranks(size, 120)(record, changed(PLAN, **changes), 3, folder=texts)
    assert_parity_of_parts(alone(changed(PLAN, **model), 3, folder=texts), found, BF16_SUMS)


@pytest.mark.parametrize("reducer", ["core.each", "dp.sharded"])
def test_canonical_sums_have_the_bits_of_one_process(ranks: Any, texts: Path, reducer: str):
    tables = changed(PLAN, parallel={"reduction": "canonical"}, evaluation={"every": 2, "steps": 1})
    layout = changed(tables, parallel__dp=2, gradient_handlers=[{"use": reducer}])
    assert differing([trained(tables, 2, folder=texts)], ranks(2)(trained, layout, 2, folder=texts)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision__accumulation": "direct"},
        {"optimizer__clip_kind": "inf", "optimizer__clip_norm": 0.1},
        {"offload": [{"use": "memory.host_optimizer", "bucket_mb": 0.01}]},
        {"offload": [{"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.01}]},
    ],
)
def test_a_step_is_that_of_the_sums(texts: Path, changes: Tables):
    """The norm is that of the gradients in fp64, clipping multiplies by a factor of more than 8 bits, and masters are stepped
    by the gradients in fp32; sums are near those in fp32.
    """
    tables = changed(PLAN, **{"optimizer__clip_norm": 0.37, "optimizer__weight_decay": 0.0, **changes})
    with World.alone("cpu") as world, assemble(plan_from_dict(tables, texts), world) as run:
        exact = record(changed(tables, precision__gradients="fp32"), 1, folder=texts)
        masters = [stepped.parameter for stepped in run.stepper.update.masters.stepped]
        copies = [torch.nn.Parameter(one.detach().clone()) for one in masters]
        adam: Any = torch.optim.AdamW(copies, lr=3e-3, weight_decay=0.0)
        row = run.step()
        assert {gradient.dtype for gradient in gradients(run).values()} == {torch.bfloat16}
        given = [run.store.gradient(one.param) for one in run.stepper.update.masters.stepped]
        kind = float("inf") if "optimizer__clip_kind" in changes else 2.0
        norm = torch.linalg.vector_norm(torch.cat([one.double().flatten() for one in given]), kind)
        limit = 2**-10 if kind == 2 else 2**-8  # each element is rounded, and the factor is not
        assert float(norm) == pytest.approx(run.plan.optimizer.config.clip_norm, rel=limit)
        assert row["grad_norm"] == pytest.approx(exact.rows[0]["grad_norm"], rel=GRADIENTS[BF16_SUMS])
        for one, gradient in zip(copies, given, strict=True):
            one.grad = gradient.float()
        adam.param_groups[0]["lr"] = row["lr"]
        adam.step()
        for one, master in zip(copies, masters, strict=True):
            torch.testing.assert_close(one, master, rtol=1e-6, atol=1e-8)
        assert all(one.parameter.grad is None for one in run.stepper.update.masters.stepped)
        whole, halves = run.memory.bytes["gradients"], exact.gradients[0].values()
        assert whole <= 2 * sum(one.numel() for one in halves) + 256 * len(halves)


def resumed(tables: Tables, folder: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    with World.alone("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        run.save_checkpoint(checkpoint)
    with World.alone("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.load_checkpoint(checkpoint)
        run.step()
        return weights(run)


def test_a_checkpoint_goes_on_with_the_same_bits(texts: Path, tmp_path: Path):
    found = resumed(PLAN, texts, tmp_path / "checkpoint")
    assert_same_bits(record(PLAN, 2, folder=texts).weights, found)


def test_low_rank_sums_are_refused_in_the_plan(texts: Path):
    tables = changed(PLAN, parallel={"dp": 2}, gradient_handlers=[{"use": "powersgd.reducer", "start_step": 2}])
    (problem,) = check_plan(plan_from_dict(tables, texts), 2)
    assert problem.code == "handler-precision"
