"""What a valid plan cannot do in a world of a given size is refused with the equation, the place, and what would do."""

from collections.abc import Callable
from typing import Any

import pytest

from sley_core.errors import PluginError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_text
from sley_core.plan.plan import Plan

Make = Callable[..., Plan]


def problems(plan: Plan, world: int | None = None) -> list[tuple[str, str, str | None]]:
    return [(one.code, one.message, one.hint) for one in check_plan(plan, world or plan.world_size())]


def codes(plan: Plan, world: int | None = None) -> list[str]:
    return [code for code, _, _ in problems(plan, world)]


def test_a_world_that_the_plan_does_not_have(make: Make) -> None:
    assert problems(make(parallel={}), 4) == []
    ((code, message, hint),) = problems(make(), 3)
    assert (code, hint) == ("layout", 'use 2 ranks, or set `dp = "auto"` to use all ranks')
    assert message == "the world size must be pp x dp x sp = 1 x 2 x 1, but is 3"
    found = problems(make(parallel={"pp": 2, "sp": 2}), 6)
    assert ("layout", "the world size must be a multiple of pp x sp = 2 x 2, but is 6", "use 4 or 8 ranks") in found
    found = problems(make(parallel={"wp": 4}), 2)
    assert ("layout", "the world size must be a multiple of pp x wp = 1 x 4, but is 2", "use 4 ranks") in found
    found = problems(make(parallel={"dp": 3, "wp": 4, "sp": 2}))
    assert found[0][2] == "use `dp = 4`; `wp` shards weights over the dp x sp ranks of a stage"


@pytest.mark.parametrize(
    ("lines", "world", "line"),
    [("pp = 2\nsp = 3", 4, 27), ("sp = 3\npp = 1", 4, 27), ("dp = 2\nwp = 4", 2, 28), ("pp = 2\ndp = 1", 4, 28)],
)
def test_a_layout_is_placed_at_the_axis_that_does_not_fit(text: str, lines: str, world: int, line: int) -> None:
    plan = plan_from_text(text.replace("dp = 2", lines))
    (found,) = [one for one in check_plan(plan, world) if one.code == "layout"]
    assert found.place
    assert found.place.line == line


@pytest.mark.parametrize(
    ("size", "micro", "dp", "hint"),
    [
        (16, 3, 2, "use global_size = 12 or 18, or micro_size = 2"),
        (16, 2, 3, "use global_size = 12 or 18"),
        (1, 2, 2, "use global_size = 4"),
        (4, 8, 2, "use global_size = 16, or micro_size = 2"),
    ],
)
def test_a_batch_that_does_not_divide(make: Make, size: int, micro: int, dp: int, hint: str) -> None:
    plan = make(batch={"global_size": size, "micro_size": micro}, parallel={"dp": dp})
    unit = dp * micro
    message = f"global_size must be a multiple of dp x micro_size = {dp} x {micro} = {unit}, but is {size}"
    assert problems(plan) == [("batch-does-not-divide", message, hint)]


@pytest.mark.parametrize(
    ("precision", "supported"),
    [
        ({}, True),
        ({"compute": "fp64"}, True),
        ({"compute": "bf16"}, True),
        ({"compute": "fp32", "gradients": "fp64"}, False),
        ({"compute": "fp64", "gradients": "fp32"}, False),
        ({"compute": "fp16"}, True),
        ({"compute": "fp16", "gradients": "fp64"}, False),
        ({"compute": "fp32", "gradients": "bf16"}, False),
        ({"compute": "fp16", "gradients": "bf16"}, False),
        ({"compute": "bf16", "gradients": "bf16"}, True),
    ],
)
def test_precision(make: Make, precision: Any, supported: bool) -> None:
    assert set(codes(make(precision=precision))) == (set() if supported else {"precision-unsupported"})


def test_a_loss_scale_is_for_fp16_alone(make: Make) -> None:
    for scale in ({"init_scale": 8.0, "min_scale": 16.0}, {"min_scale": 65537.0}):
        assert codes(make(precision={"compute": "fp16", "loss_scale": scale})) == ["loss-scale-range"]
    plan = make(precision={"compute": "fp16", "loss_scale": {"growth_interval": 100}})
    assert codes(plan) == []
    assert plan.tables["precision"]["loss_scale"]["init_scale"] == 65536.0, "the resolved plan says how it moves"
    assert plan_from_text(plan.to_toml()).precision == plan.precision
    assert "loss_scale" not in make().to_toml()


def test_ranges_beyond_the_run(make: Make) -> None:
    assert codes(make(profile={"steps": [10, 20]}, evaluation={"every": 30})) == []
    assert codes(make(profile={"steps": [5, 4]})) == ["beyond-the-run"]


def handlers(*names: str) -> dict[str, Any]:
    return {"gradient_handlers": [{"use": name if "." in name else f"handlers.{name}"} for name in names]}


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["noise"], "handler-missing"),
        (["buckets"], None),
        (["core.each", "core.each"], "handler-twice"),
        (["noise", "core.each", "noise"], "handler-twice"),
        (["core.each", "buckets"], "handler-conflict"),
        (["core.each", "ties", "more_ties"], "handler-conflict"),
        (["core.each", "ties", "noise"], None),
        (["noise", "core.each"], "handler-order"),
        (["squeeze", "core.each", "noise"], None),
        (["core.each", "squeeze"], "handler-order"),
        (["squeeze", "shards", "core.gradient_norms"], None),
        (["shards", "noise"], "handler-shards"),
        (["shards", "ties"], "handler-shards"),
    ],
)
def test_gradient_handlers(make: Make, names: list[str], code: str | None) -> None:
    found = problems(make(**handlers(*names)))
    if code is None:
        assert found == []
    else:
        assert code in [one for one, _, _ in found]


WP = {"parallel": {"dp": 2, "wp": 2}}
PP = {"parallel": {"dp": 1, "pp": 2}}
STAGES = PP | {"pipeline": {"use": "policies.empty"}}
COMPILED = {"use": "models.llama", "num_layers": 2, "hidden": 16, "heads": 2, "compile": {}}
CANONICAL = {"parallel": {"dp": 2, "reduction": "canonical"}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel": {"sp": 3}}, "the sequence length must be a multiple of sp = 3, but is 8: use sequence = 6 or 9"),
        (
            {"precision": {"loss_scale": {}}},
            "loss-scale-unused: only fp16 uses a loss scale, but this plan computes in fp32: remove",
        ),
        ({"profile": {"steps": [10, 21]}}, "the run has 20 steps, so steps 10 to 21 cannot be recorded: use steps up to 20"),
        (
            {"model": COMPILED, "precision": {"accumulation": "direct"}},
            "accumulation-compiled: compiled layers do not support dir",
        ),
        (
            CANONICAL | handlers("buckets"),
            "canonical-unsupported: `handlers.buckets` does not compute exact sums in a fixed order",
        ),
        (CANONICAL | {"weights": {"use": "policies.gathered"}}, "`policies.gathered` does not sum weight gradients in a fixed"),
        (STAGES, "schedule-wrong: the schedule must have 2 action lists, one per stage, but has 0: "),
        (STAGES, "timer-missing: `policies.timed` times layers with `nowhere`, which is not installed: install `nowhere`; or"),
    ],
)
def test_what_does_not_fit_is_refused(make: Make, changes: dict[str, Any], says: str) -> None:
    assert says in "\n".join(f"{code}: {message}: {hint}" for code, message, hint in problems(make(**changes)))


@pytest.mark.parametrize(
    ("factory", "scope", "whole_model", "shards"),
    [
        ("torch.optim:NAdam", None, True, True),
        ("torch.optim.adamw:AdamW", None, True, True),
        ("torch.optim:Muon", None, True, True),
        ("torch.optim:NextYears", None, False, False),
        ("mine:Adam", "elementwise", True, True),
        ("mine:Lamb", "matrix", True, True),
        ("mine:Prodigy", "global", False, False),
        ("torch.optim:AdamW", "global", False, False),
    ],
)
def test_an_optimizer_by_factory_is_refused_where_a_rank_lacks_what_it_may_look_at(
    make: Make, factory: str, scope: str | None, whole_model: bool, shards: bool
) -> None:
    """Unless it is known, or declared, to look at single elements. With replicas of a whole model all are welcome."""
    optimizer = {"factory": factory, "lr": 0.1} | ({"scope": scope} if scope else {})
    assert codes(make(optimizer=optimizer)) == []
    for tables, accepted in ((WP, shards), (handlers("shards"), shards), (PP, whole_model)):
        found = [one for one in problems(make(optimizer=optimizer, **tables)) if one[0] == "optimizer-layout"]
        assert len(found) == (not accepted), tables
    hints = [hint for code, _, hint in problems(make(optimizer=optimizer, **WP)) if code == "optimizer-layout"]
    is_unknown = scope is None and factory == "torch.optim:NextYears"
    assert all(('set `scope` to "elementwise"' in hint) == is_unknown for hint in hints)


def test_a_check_that_fails_names_its_plugin(make: Make) -> None:
    plan = make(batch={"global_size": 8, "micro_size": 4}, metrics=[{"use": "policies.csv"}])
    with pytest.raises(PluginError, match=r"plugin `policies` .*ValueError: four is unlucky"):
        check_plan(plan, 2)
    with pytest.raises(PluginError, match="cannot import `nowhere:Nothing` of `handlers"):
        make(**handlers("buckets")).gradient_handlers[0].build("parts")
