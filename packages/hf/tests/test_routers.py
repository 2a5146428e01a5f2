"""The load-balancing loss of routers: its scale, its rows, where it is left out, and models that have none."""

import sys
from pathlib import Path
from typing import Any

import hf_families
import pytest
import torch
from hf_families import small_config, transformers_model

from sley_core.api.data import DataInfo, Field
from sley_core.errors import PlanError
from sley_hf.plugin import DecoderConfig
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import assert_parity_of_parts, record, record_reference, running

DATA = DataInfo({"tokens": Field("int64"), "labels": Field("int64")}, vocab_size=256)
SOURCE = {"use": "data.text", "files": ["text/*.txt"], "sequence": 24, "weight": 1}
MIXTURE = {"use": "data.mixture", "sources": [SOURCE | {"name": name} for name in ("a", "b")]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Mixtral, as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("model")
    transformers_model(small_config("mixtral", vocab_size=257)).float().save_pretrained(folder)
    return folder


def plan(model: Path, router_loss: float | None = None, **changes: Any) -> Tables:
    table: dict[str, Any] = {"use": "hf.decoder", "weights": str(model), "experts": "eager"}
    if router_loss is not None:
        table["router_loss"] = router_loss
    batch = {"global_size": 4, "micro_size": 2}
    return changed(small_plan(model=table, batch=batch, evaluation={"every": 5, "steps": 1}), **changes)


def test_a_row_has_the_loss_and_an_evaluation_leaves_it_out(model: Path, texts: Path) -> None:
    rows, held_out = {}, {}
    for factor in (None, 0.0, 0.5):
        with running(plan(model, factor), texts) as run:
            held_out[factor] = run.evaluate()
            rows[factor] = run.step()
    assert held_out[None] == held_out[0.0] == held_out[0.5]
    assert rows[None].keys() == rows[0.5].keys() - {"experts/loss", "experts/max_load", "experts/min_load"}
    assert rows[0.0]["loss"] == pytest.approx(rows[None]["loss"], rel=1e-14)
    row = rows[0.5]
    assert row["loss"] == pytest.approx(rows[None]["loss"] + 0.5 * row["experts/loss"], rel=1e-14)  # labels all count
    assert 0 < row["experts/min_load"] < 1 < row["experts/max_load"] < 2
    assert row["experts/loss"] == pytest.approx(2, rel=0.1)  # balanced: the number of experts of a token


@pytest.mark.parametrize(("router_loss", "coefficient"), [(None, 0.2), (0.5, 0.5)])
def test_the_plan_or_the_config_has_the_coefficient(router_loss: float | None, coefficient: float, tmp_path: Path) -> None:
    small_config("mixtral", router_aux_loss_coef=0.2, output_router_logits=True).save_pretrained(tmp_path)
    config = DecoderConfig.model_validate({"config": tmp_path, "router_loss": router_loss})
    routers = hf_families.build_routers(
        config, *hf_families.build_from_config(hf_families.read_hf_config(config), kernel="sdpa", experts="eager")
    )
    assert routers is not None
    assert routers.coefficient == coefficient


def test_sources_share_the_loss(model: Path, texts: Path) -> None:
    (row,) = record(plan(model, 0.5, data=MIXTURE, evaluation=None), 1, folder=texts).rows
    assert 0 < row["share/a"] < 1
    assert row["share/a"] * row["loss/a"] + row["share/b"] * row["loss/b"] == pytest.approx(row["loss"], rel=1e-12)


LAYOUTS: list[Tables] = [
    {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator", "head": "vocabulary"}},
    {"parallel": {"dp": 1, "pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "partition": {"use": "pp.measured"}},
]


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS, ids=["vocabulary", "measured"])
def test_parts_that_look_at_the_logits(model: Path, texts: Path, ranks: Any, layout: Tables) -> None:
    tables = plan(model, 0.5, evaluation=None)
    recorded = ranks(2, 200)(record, changed(tables, **layout), 3, folder=texts)
    assert_parity_of_parts(record_reference(tables, 3, folder=texts), recorded, "fp64")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {}, "computes no load-balancing loss for `llama`"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "no layer of this `qwen3_moe` has experts"),
        ("doge", {"is_moe": True, "num_experts": 16}, "of `doge` differs from the loss of Mixtral"),
    ],
)
def test_a_model_without_that_loss_is_refused(family: str, changes: Any, message: str, tmp_path: Path) -> None:
    small_config(family, output_router_logits=True, **changes).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=message):
        hf_families.build_layers(DecoderConfig.model_validate({"config": tmp_path}), DATA)


def test_check_compares_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_config("olmoe").save_pretrained(tmp_path)
    config = DecoderConfig.model_validate({"config": tmp_path, "experts": "eager", "router_loss": 0.1})
    hf_families.compare_with_transformers(config)
    module: Any = sys.modules["transformers.models.olmoe.modeling_olmoe"]
    original = module.OlmoeForCausalLM.forward

    def forward(*args: Any, **options: Any) -> Any:
        output = original(*args, **options)
        output.aux_loss = torch.as_tensor(output.aux_loss or 0.0) * 1.01
        return output

    monkeypatch.setattr(module.OlmoeForCausalLM, "forward", forward)
    with pytest.raises(PlanError, match="the load-balancing loss"):
        hf_families.compare_with_transformers(config)
