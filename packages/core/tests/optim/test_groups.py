"""Parameter groups: the first match wins, norms and biases do not decay, nothing is matched in vain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from sley_core.errors import PlanError
from sley_core.optim.build import frozen, parameter_groups, scale_learning_rate
from sley_core.optim.config import GroupConfig, OptimizerConfig

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


def test_norms_and_biases_do_not_decay() -> None:
    assert found(config()) == {
        "embed.weight": (0.5, 0.1),
        "blocks.0.norm.weight": (0.5, 0.0),
        "blocks.0.linear.weight": (0.5, 0.1),
        "blocks.0.linear.bias": (0.5, 0.0),
        "head.weight": (0.5, 0.1),
    }


def test_the_first_match_wins_and_options_left_out_are_the_optimizers() -> None:
    table = config({"match": "*.bias", "weight_decay": 0.3}, {"match": "blocks.*", "lr": 0.25}, {"match": "blocks.0.n*"})
    assert found(table) == {
        "embed.weight": (0.5, 0.1),
        "blocks.0.norm.weight": (0.25, 0.0),
        "blocks.0.linear.weight": (0.25, 0.1),
        "blocks.0.linear.bias": (0.5, 0.3),
        "head.weight": (0.5, 0.1),
    }


def test_a_groups_own_decay_is_taken_as_written() -> None:
    table = config({"match": "blocks.*", "weight_decay": 0.2})
    assert {name: decay for name, (_, decay) in found(table).items() if name.startswith("blocks")} == {
        "blocks.0.norm.weight": 0.2,
        "blocks.0.linear.weight": 0.2,
        "blocks.0.linear.bias": 0.2,
    }


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
    assert frozen(NAMES, table) == {"embed.weight", "blocks.0.linear.weight", "blocks.0.linear.bias"}


def test_nothing_is_frozen_without_groups() -> None:
    assert frozen(NAMES, config()) == set()


def test_every_pattern_without_a_match_is_reported_with_close_names() -> None:
    table = config({"match": "hed.weight"}, {"match": "blocks.*"}, {"match": "Blocks.0.linear.bias"})
    with pytest.raises(PlanError) as error:
        frozen(NAMES, table)
    first, second = error.value.diagnostics
    assert (first.code, first.path) == ("group-unmatched", ("optimizer", "groups", 0, "match"))
    assert "`hed.weight`" in first.message
    assert "`head.weight`" in (first.hint or "")
    assert second.path == ("optimizer", "groups", 2, "match")
    assert "`blocks.0.linear.bias`" in (second.hint or "")


def test_a_pattern_whose_names_are_all_taken_is_reported() -> None:
    table = config({"match": "blocks.*", "lr": 0.1}, {"match": "*.bias", "lr": 0.2})
    with pytest.raises(PlanError, match=r"`\*\.bias` matches nothing that an earlier group, as `blocks\.\*`") as error:
        frozen(NAMES, table)
    assert error.value.diagnostics[0].path == ("optimizer", "groups", 1, "match")


def test_a_model_with_nothing_left_to_train_is_refused() -> None:
    with pytest.raises(PlanError, match="every one of the 5 parameters is frozen") as error:
        frozen(NAMES, config({"match": "*", "freeze": True}))
    assert error.value.diagnostics[0].code == "all-frozen"


def test_what_a_program_unfreezes_has_the_optimizers_options() -> None:
    assert found(config({"match": "embed.*", "freeze": True})) == found(config())


def test_the_factor_scales_every_groups_full_rate() -> None:
    optimizer = torch.optim.SGD(parameter_groups(ENTRIES, config({"match": "head.*", "lr": 0.25})))
    for factor in (0.5, 0.1, 1.0):
        scale_learning_rate(optimizer, factor)
        assert {group["lr"] for group in optimizer.param_groups} == {0.5 * factor, 0.25 * factor}


@pytest.mark.parametrize(
    "group",
    [
        {"match": ""},
        {"match": "*", "lr": 0.0},
        {"match": "*", "weight_decay": -0.1},
        {"match": "*", "freeze": True, "lr": 0.1},
        {"match": "*", "freeze": True, "weight_decay": 0.0},
        {"match": "*", "freeze": 1},
        {"match": "*", "momentum": 0.1},
    ],
)
def test_a_group_that_makes_no_sense_is_refused(group: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GroupConfig(**group)
