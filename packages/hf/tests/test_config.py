"""The plan table, without torch and transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sley_core.plan.load import plan_from_dict
from sley_hf.plugin import DecoderConfig, check_positions, check_router_loss
from sley_testing.plans import small_plan


def config_with(folder: Path, **content: Any) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **content}), "utf-8")
    return DecoderConfig.model_validate({"config": folder})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "set either"),
        ({"weights": ".", "config": "."}, "set either"),
        ({"weights": "."}, "cannot read"),
        ({"config": "list.json"}, "names no `model_type`"),
    ],
)
def test_a_table_without_one_readable_config_is_refused(tables: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]", "utf-8")
    tables = {key: str(tmp_path / path) for key, path in tables.items()}
    with pytest.raises(ValidationError, match=message):
        DecoderConfig.model_validate(tables)


DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}
LONG = {"original_max_position_embeddings": 32, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("content", "sequence", "is_refused"),
    [
        ({}, 4096, False),
        (DYNAMIC, 64, False),
        (DYNAMIC, 65, True),
        (DYNAMIC, None, False),
        ({"rope_parameters": {"rope_type": "longrope"}, **LONG}, 33, True),
        ({"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 8}}, 64, False),
    ],
)
def test_rotary_frequencies_that_depend_on_a_microbatch_are_refused(
    content: Any, sequence: int | None, is_refused: bool, tmp_path: Path
) -> None:
    assert bool(list(check_positions(config_with(tmp_path, **content), sequence))) == is_refused


@pytest.mark.parametrize(
    ("router_loss", "in_config", "is_active"), [(None, False, False), (0.0, False, True), (None, True, True)]
)
@pytest.mark.parametrize("loss", [{"use": "core.cross_entropy"}, {"factory": "torch.nn:MSELoss"}])
def test_a_router_loss_needs_a_loss_that_adds_it(
    router_loss: float | None, in_config: bool, is_active: bool, loss: Any, tmp_path: Path
) -> None:
    config = config_with(tmp_path, output_router_logits=in_config).model_copy(update={"router_loss": router_loss})
    problems = list(check_router_loss(config, plan_from_dict(small_plan(loss=loss)).loss))
    assert bool(problems) == (is_active and "factory" in loss)
