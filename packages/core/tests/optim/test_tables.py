"""Parameter groups and learning rates: the first match wins, curves are exact at their ends, senseless values are refused."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from sley_core.errors import PlanError
from sley_core.optim.config import (
    AdamWConfig,
    ConstantConfig,
    CosineConfig,
    FactoryOptimizerConfig,
    GroupConfig,
    LinearConfig,
    OptimizerConfig,
    SGDConfig,
    WarmupStableDecayConfig,
)
from sley_core.optim.learning_rate import check_learning_rate, constant_factor, decay_factor, warmup_stable_decay_factor
from sley_core.optim.optimizers import frozen_names, parameter_groups
from sley_core.plan.load import plan_from_dict
from sley_core.table import Table
from sley_testing.plans import small_plan

ROOT = math.sqrt(0.5)
NAMES = ["embed.weight", "blocks.0.norm.weight", "blocks.0.linear.weight", "blocks.0.linear.bias", "head.weight"]


@dataclass
class Param:
    name: str
    parameter: torch.Tensor
    decays: bool


ENTRIES = [Param(name, nn.Parameter(torch.ones(2, 2)), not name.endswith(("norm.weight", "bias"))) for name in NAMES]


def config(*groups: dict[str, Any], lr: float = 0.5, weight_decay: float = 0.1) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, weight_decay=weight_decay, groups=tuple(GroupConfig(**group) for group in groups))


def found(of: OptimizerConfig) -> dict[str, tuple[float, float]]:
    """(learning rate, weight decay) by name."""
    by_parameter = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in parameter_groups(ENTRIES, of)
        for parameter in group["params"]
    }
    return {param.name: by_parameter[id(param.parameter)] for param in ENTRIES}


def test_norms_and_biases_do_not_decay_the_first_match_wins_and_options_left_out_are_the_optimizers() -> None:
    table = config({"match": "*.bias", "weight_decay": 0.3}, {"match": "blocks.*", "lr": 0.25}, {"match": "blocks.0.n*"})
    assert list(found(config()).values()) == [(0.5, 0.1), (0.5, 0.0), (0.5, 0.1), (0.5, 0.0), (0.5, 0.1)]
    assert list(found(table).values()) == [(0.5, 0.1), (0.25, 0.0), (0.25, 0.1), (0.5, 0.3), (0.5, 0.1)]


def test_equal_options_share_a_group_in_the_order_of_the_entries() -> None:
    groups = parameter_groups(ENTRIES, config({"match": "head.*", "lr": 0.5}))
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(ENTRIES[index].parameter) for index in (0, 2, 4)],
        [id(ENTRIES[index].parameter) for index in (1, 3)],
    ]


def test_a_rank_without_parameters_still_gets_an_optimizer() -> None:
    groups = parameter_groups([], config())
    torch.optim.AdamW(groups).step()
    assert [group["params"] for group in groups] == [[]]


def test_frozen_names_follow_the_first_match() -> None:
    table = config({"match": "blocks.0.norm.*"}, {"match": "blocks.*", "freeze": True}, {"match": "e*", "freeze": True})
    assert frozen_names(NAMES, table) == {"embed.weight", "blocks.0.linear.weight", "blocks.0.linear.bias"}


def test_every_pattern_without_a_match_is_reported_with_close_names() -> None:
    table = config({"match": "hed.weight"}, {"match": "blocks.*"}, {"match": "Blocks.0.linear.bias"})
    with pytest.raises(PlanError) as error:
        frozen_names(NAMES, table)
    first, second = error.value.diagnostics
    assert (first.code, first.path) == ("group-unmatched", ("optimizer", "groups", 0, "match"))
    assert "`hed.weight`" in first.message
    assert "`head.weight`" in (first.hint or "")
    assert second.path == ("optimizer", "groups", 2, "match")
    assert "`blocks.0.linear.bias`" in (second.hint or "")


def test_a_pattern_whose_names_are_all_taken_and_a_model_with_nothing_to_train_are_refused() -> None:
    table = config({"match": "blocks.*", "lr": 0.1}, {"match": "*.bias", "lr": 0.2})
    with pytest.raises(
        PlanError, match=r"all parameters that `\*\.bias` matches are already in earlier groups, such as the group `blocks\.\*`"
    ) as error:
        frozen_names(NAMES, table)
    assert error.value.diagnostics[0].path == ("optimizer", "groups", 1, "match")
    with pytest.raises(PlanError, match="all 5 parameters are frozen") as error:
        frozen_names(NAMES, config({"match": "*", "freeze": True}))
    assert error.value.diagnostics[0].code == "all-frozen"


@pytest.mark.parametrize(
    ("build", "table", "values"),
    [
        (constant_factor, ConstantConfig(warmup_steps=4), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (decay_factor, LinearConfig(min_ratio=0.0), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (decay_factor, LinearConfig(warmup_steps=2, min_ratio=0.5), [0.5, 1.0, 0.875, 0.75, 0.625, 0.5]),
        (decay_factor, CosineConfig(min_ratio=0.1), [1.0, 0.55 + 0.45 * ROOT, 0.55, 0.55 - 0.45 * ROOT, 0.1]),
        (
            warmup_stable_decay_factor,
            WarmupStableDecayConfig(warmup_steps=2, decay_steps=4, min_ratio=0.0),
            [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0],
        ),
        (
            warmup_stable_decay_factor,
            WarmupStableDecayConfig(decay_steps=4, shape="sqrt", min_ratio=0.0),
            [1.0, 1.0, 1.0, 1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0],
        ),
        (
            warmup_stable_decay_factor,
            WarmupStableDecayConfig(decay_steps=4, shape="cosine", min_ratio=0.0),
            [1.0, 1.0, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0],
        ),
        (decay_factor, LinearConfig(decay_steps=3, min_ratio=0.25), [1.0, 0.75, 0.5, 0.25, 0.25, 0.25]),
        (decay_factor, CosineConfig(decay_steps=2, min_ratio=0.25), [1.0, 0.625, 0.25, 0.25, 0.25]),
    ],
)
def test_curves_are_exact_at_their_ends(build: Any, table: Any, values: list[float]) -> None:
    made = list(map(build(table, len(values)), range(len(values))))
    assert (made[0], made[-1]) == (values[0], values[-1])
    assert made == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize(
    ("values", "key"), [({"warmup_steps": 6, "decay_steps": 5}, "decay_steps"), ({"warmup_steps": 10}, "warmup_steps")]
)
def test_parts_that_do_not_fit_into_the_run_are_refused(values: dict[str, Any], key: str) -> None:
    schedule = {"use": "core.warmup_stable_decay", **values}
    (problem,) = check_learning_rate(plan_from_dict(small_plan(run__steps=10, learning_rate=schedule)))
    assert (problem.code, problem.path) == ("learning-rate-steps", ("learning_rate", key))
    assert "> 10 steps" in problem.message


@pytest.mark.parametrize(
    ("table", "values", "key"),
    [
        (GroupConfig, {"match": "*", "freeze": True, "lr": 0.1}, "freeze"),
        (GroupConfig, {"match": "*", "freeze": True, "weight_decay": 0.0}, "freeze"),
        (AdamWConfig, {"lr": float("inf")}, "lr"),
        (AdamWConfig, {"lr": 1, "betas": [0.9, 1.0]}, "betas"),
        (AdamWConfig, {"lr": 1, "clip_kind": "max"}, "clip_kind"),
        (SGDConfig, {"lr": 1, "nesterov": True}, "nesterov"),
        (SGDConfig, {"lr": 1, "momentum": 0.9, "dampening": 0.1, "nesterov": True}, "nesterov"),
        (FactoryOptimizerConfig, {"lr": 1, "factory": "torch.optim.Adam"}, "factory"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_at_its_key(table: type[Table], values: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as error:
        table.model_validate(values)
    assert {fault["loc"][0] for fault in error.value.errors()} == {key}
