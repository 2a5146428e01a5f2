"""`reduction = "canonical"`: one hash of weights, masters, optimizer states, losses and norms, whatever the layout."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import Bits, differing, digest, trained
from sley_testing.plans import Tables, changed, small_plan

PLAN = small_plan(
    model__num_layers=2,
    model__heads=2,
    model__kv_heads=None,
    model__ffn_hidden=27,
    model__vocab_size=257,
    model__tie_embeddings=True,
    data__sequence=16,
    batch__micro_size=1,
    optimizer__weight_decay=0.1,
    precision__compute="fp32",
    parallel={"reduction": "canonical"},
    evaluation={"every": 2, "steps": 1},
)

DP = {"gradient_handlers": [{"use": "dp.bucketed", "bucket_mb": 0.01}]}
DP_PP = {"gradient_handlers": [*DP["gradient_handlers"], {"use": "pp.shared_modules"}]}
SHARDED = {"gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.01}]}
WP = {"parallel__wp": 2, "weights": {"use": "isp.communicator"}}
LAYOUTS: dict[str, tuple[int, Tables]] = {
    "dp2 each": (2, {"parallel__dp": 2}),
    "dp2 bucketed": (2, {"parallel__dp": 2, **DP}),
    "dp4 sharded": (4, {"parallel__dp": 4, **SHARDED}),
    "wp2": (2, {"parallel__dp": 2, **WP}),
    "wp2 wdp2 sharded": (4, {"parallel__dp": 4, **WP, **SHARDED}),
    "wp2 pp2": (4, {"parallel__dp": 2, "parallel__pp": 2, "pipeline": {"use": "pp.zero_bubble_h1"}, **WP}),
    "pp2": (2, {"parallel__pp": 2, "pipeline": {"use": "pp.one_f_one_b"}}),
    "zero bubble": (2, {"parallel__pp": 2, "pipeline": {"use": "pp.zero_bubble_h1"}}),
    "zero bubble v dp2": (4, {"parallel__pp": 2, "parallel__dp": 2, "pipeline": {"use": "pp.zero_bubble_v"}, **DP_PP}),
}


PRECISIONS: dict[str, Tables] = {
    "fp32": {},
    "bf16": {"precision__compute": "bf16"},
    "bf16 sums": {"precision": {"compute": "bf16", "gradients": "bf16"}},
}


@cache
def alone(folder: Path, precision: str) -> Bits:
    return trained(changed(PLAN, **PRECISIONS[precision]), 2, folder=folder)


@pytest.mark.sample(4)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_hash_of_one_process(ranks: Any, texts: Path, layout: str, precision: str):
    size, changes = LAYOUTS[layout]
    found = ranks(size, 180)(trained, changed(PLAN, **PRECISIONS[precision], **changes), 2, folder=texts)
    assert differing([alone(texts, precision)], found) == []
    assert digest([alone(texts, precision)]) == digest(found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["dp3 sharded", "pp2", "wp2", "dp2 each"])
def test_numbers_that_are_no_powers_of_two_have_one_hash_too(ranks: Any, texts: Path, layout: str):
    """Six micro-batches: a rank of two has three, which are two sums of the tree, and hands over both."""
    size, changes = {"dp3 sharded": (3, {"parallel__dp": 3, **SHARDED}), **LAYOUTS}[layout]
    six = changed(PLAN, batch__global_size=6)
    found = ranks(size, 180)(trained, changed(six, **changes), 2, folder=texts)
    assert differing([trained(six, 2, folder=texts)], found) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["core.sgd", "core.adamw"])
@pytest.mark.parametrize("layout", ["dp2 bucketed", "wp2", "wp2 wdp2 sharded", "zero bubble", "wp2 pp2", "recomputed"])
def test_weights_that_a_layer_uses_more_than_once(ranks: Any, layout: str, optimizer: str):
    """Biases, an embedding with padding, dropout, and weights that autograd alone knows, in bf16 with masters."""
    tables = changed(
        PLAN,
        model={"factory": "canonical_parts:layers"},
        data={"factory": "canonical_parts:Rows"},
        optimizer={"use": optimizer, "lr": 1e-2, "clip_norm": 0.1} | ({"momentum": 0.9} if optimizer == "core.sgd" else {}),
        precision__compute="bf16",
        evaluation=None,
    )
    size, changes = {"recomputed": (1, {"activations": {"use": "core.recompute"}}), **LAYOUTS}[layout]
    found = ranks(size, 180)(trained, changed(tables, **changes), 2)
    assert differing([trained(tables, 2)], found) == []


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"gradient_handlers": [{"use": "dp.bucketed", "reduction": "bf16"}]}, "gradient_handlers.0.use"),
        ({"gradient_handlers": [{"use": "powersgd.reducer"}]}, "gradient_handlers.0.use"),
        ({"gradient_handlers": [{"use": "dp.sharded", "shards": 2}]}, "gradient_handlers.0.shards"),
        ({"weights": {"use": "isp.communicator", "head": "vocabulary"}}, "weights.head"),
        ({"weights": {"use": "isp.communicator", "embedding": "hidden"}}, "weights.embedding"),
        ({"weights": {"use": "isp.communicator", "reduce": "step"}}, "weights.reduce"),
        ({}, None),
    ],
)
def test_options_that_add_in_another_order_are_refused(texts: Path, changes: Tables, path: str | None):
    wp = 2 if "weights" in changes else 1
    plan = plan_from_dict(changed(PLAN, parallel__dp=4, parallel__wp=wp, **changes), texts)
    found = [(problem.code, ".".join(map(str, problem.path))) for problem in check_plan(plan, 4)]
    assert found == ([("canonical-unsupported", path)] if path else [])


SAMPLE = ["dp2 bucketed", "wp2", "zero bubble v dp2"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "layout", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.campaign) for name in LAYOUTS]
)
def test_fast_sums_have_another_hash(ranks: Any, texts: Path, layout: str):
    """Their numbers are as good: so the tests above see the tree, and nothing else."""
    size, changes = LAYOUTS[layout]
    fast = changed(PLAN, parallel__reduction="fast", **changes)
    found = ranks(size, 180)(trained, fast, 2, folder=texts)
    canonical = alone(texts, "fp32")
    assert [name for name in differing([canonical], found) if name.endswith("weight")]
    for name in ("step 2: loss", "step 2: grad_norm"):
        wanted, other = (float.fromhex(bits[name].decode()) for bits in (canonical, found[0]))
        assert math.isclose(wanted, other, rel_tol=1e-4), (name, wanted, other)
