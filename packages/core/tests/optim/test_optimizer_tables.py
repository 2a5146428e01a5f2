"""The tables of optimizers and learning rates refuse what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sley_core.optim.config import (
    AdamWConfig,
    ConstantConfig,
    CosineConfig,
    FactoryOptimizerConfig,
    LinearConfig,
    OptimizerConfig,
    SGDConfig,
    WarmupStableDecayConfig,
)
from sley_core.table import Table

TABLES = [
    AdamWConfig,
    SGDConfig,
    FactoryOptimizerConfig,
    OptimizerConfig,
    ConstantConfig,
    LinearConfig,
    CosineConfig,
    WarmupStableDecayConfig,
]


@pytest.mark.parametrize(
    ("table", "values", "key"),
    [
        (AdamWConfig, {}, "lr"),
        (AdamWConfig, {"lr": 0}, "lr"),
        (AdamWConfig, {"lr": True}, "lr"),
        (AdamWConfig, {"lr": "3e-4"}, "lr"),
        (AdamWConfig, {"lr": float("inf")}, "lr"),
        (AdamWConfig, {"lr": 1, "betas": [0.9]}, "betas"),
        (AdamWConfig, {"lr": 1, "betas": [0.9, 1.0]}, "betas"),
        (AdamWConfig, {"lr": 1, "betas": 0.9}, "betas"),
        (AdamWConfig, {"lr": 1, "eps": 0.0}, "eps"),
        (AdamWConfig, {"lr": 1, "weight_decay": -1.0}, "weight_decay"),
        (AdamWConfig, {"lr": 1, "clip_norm": 0.0}, "clip_norm"),
        (AdamWConfig, {"lr": 1, "clip_kind": 0.5}, "clip_kind"),
        (AdamWConfig, {"lr": 1, "clip_kind": "max"}, "clip_kind"),
        (AdamWConfig, {"lr": 1, "momentum": 0.9}, "momentum"),
        (AdamWConfig, {"lr": 1, "groups": [{"lr": 0.1}]}, "groups"),
        (SGDConfig, {"lr": 1, "momentum": 1.0}, "momentum"),
        (SGDConfig, {"lr": 1, "nesterov": True}, "nesterov"),
        (SGDConfig, {"lr": 1, "momentum": 0.9, "dampening": 0.1, "nesterov": True}, "nesterov"),
        (FactoryOptimizerConfig, {"lr": 1, "factory": "torch.optim.Adam"}, "factory"),
        (FactoryOptimizerConfig, {"lr": 1, "factory": "torch.optim:Adam", "options": [1]}, "options"),
        (ConstantConfig, {"min_ratio": 0.1}, "min_ratio"),
        (ConstantConfig, {"warmup_steps": -1}, "warmup_steps"),
        (ConstantConfig, {"warmup_steps": 2.5}, "warmup_steps"),
        (LinearConfig, {"min_ratio": 1.1}, "min_ratio"),
        (CosineConfig, {"decay_steps": 0}, "decay_steps"),
        (WarmupStableDecayConfig, {"shape": "exponential"}, "shape"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_at_its_key(table: type[Table], values: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as error:
        table.model_validate(values)
    assert {fault["loc"][0] for fault in error.value.errors()} == {key}


@pytest.mark.parametrize("kind", [1, 2.0, 3.5, "inf"])
def test_every_norm_from_1_to_infinity_can_clip(kind: Any) -> None:
    assert AdamWConfig(lr=1e-3, clip_norm=1.0, clip_kind=kind).clip_kind == kind


def test_groups_are_read_from_arrays_of_tables() -> None:
    table = SGDConfig.model_validate({"lr": 0.1, "groups": [{"match": "*.bias", "lr": 0.2}, {"match": "embed.*"}]})
    assert [(group.match, group.lr, group.freeze) for group in table.groups] == [
        ("*.bias", 0.2, False),
        ("embed.*", None, False),
    ]


@pytest.mark.parametrize("table", TABLES)
def test_every_field_says_in_one_line_what_it_is(table: type[Table]) -> None:
    for name in table.model_fields:
        meaning = table.model_fields[name].description
        assert meaning, f"{table.__name__}.{name}"
        assert "\n" not in meaning
