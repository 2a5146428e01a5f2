"""Every family: logits and gradients of the layers equal those of transformers' own forward."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import hf_families
import pytest
import torch
from hf_families import FAMILIES, computes_in_fp32, small_config, transformers_model

from sley_core.api.data import DataInfo, Field
from sley_core.errors import PlanError
from sley_hf.plugin import DecoderConfig
from sley_hf.structure import find_structure
from sley_trainer.row_metrics import model_flops

BOUNDS = [[0, 5, 12, 12], [0, 3, 8, 12]]
LENGTH = 12
DATA = DataInfo({"tokens": Field("int64"), "labels": Field("int64")}, vocab_size=256)


def decoder_config(folder: Any) -> DecoderConfig:
    return DecoderConfig.model_validate({"config": folder, "experts": "eager"})


@pytest.mark.sample(10)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_those_of_transformers(family: str, packed: bool, tmp_path: Any) -> None:
    config = small_config(family)
    config.save_pretrained(tmp_path)
    reference = transformers_model(config)
    model = hf_families.share_parameters(
        hf_families.build_layers(decoder_config(tmp_path), DATA), reference, find_structure(reference)
    )
    for layer in model.layers:
        layer.module.train()
    tokens = torch.randint(0, 255, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if packed:
        positions = torch.stack([torch.cat([torch.arange(e - s) for s, e in pairwise(b)]) for b in BOUNDS])
        actual = hf_families.compute_logits(model, tokens, positions, torch.tensor(BOUNDS))
        rows = [
            torch.cat([reference(input_ids=tokens[[row], s:e]).logits[0] for s, e in pairwise(b) if e > s])
            for row, b in enumerate(BOUNDS)
        ]
        expected = torch.stack(rows)
    else:
        actual, expected = hf_families.compute_logits(model, tokens), reference(input_ids=tokens).logits
    tolerance = 1e-6 if computes_in_fp32(config) else 1e-12
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    weights = torch.linspace(-1, 1, actual.numel(), dtype=actual.dtype).view_as(actual)
    parameters = list(reference.parameters())
    gradients, expected_gradients = (torch.autograd.grad((out * weights).sum(), parameters) for out in (actual, expected))
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients)  # some key biases have only rounding errors
    torch.testing.assert_close(gradients, expected_gradients, rtol=10 * tolerance, atol=tolerance * largest)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [("llama", {"is_causal": False}, "both directions"), ("mamba", {}, "keep state"), ("t5", {}, "no causal language model")],
)
def test_models_that_are_no_plain_decoders_are_refused(family: str, changes: Any, message: str, tmp_path: Any) -> None:
    small_config(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(PlanError) as refused:
        hf_families.build_layers(decoder_config(tmp_path), DATA)
    assert refused.value.diagnostics[0].code == "hf-structure"
    assert message in refused.value.diagnostics[0].message


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "qwen3_moe", "falcon"])
def test_check_compares_with_transformers(family: str, tmp_path: Any) -> None:
    small_config(family, num_hidden_layers=7 if family == "gemma3_text" else 3).save_pretrained(tmp_path)
    note = hf_families.compare_with_transformers(decoder_config(tmp_path))
    assert f"with {6 if family == 'gemma3_text' else 2} layers" in note


@pytest.mark.parametrize(
    ("family", "changes", "num_layers"),
    [
        ("llama", {}, 2),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2], "num_experts": 4}, 4),  # the first three have no experts
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 3}, 3),
    ],
)
def test_the_copy_has_each_kind_of_layer(family: str, changes: Any, num_layers: int) -> None:
    config = small_config(family, num_hidden_layers=6, **changes)
    model = hf_families.build_from_config(config, kernel="sdpa", experts="eager")
    assert hf_families.shrink_config(config, *model).num_hidden_layers == num_layers


def test_a_forward_that_needs_its_layers_is_refused(tmp_path: Any) -> None:
    small_config("bloom").save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="its forward fails when its layers are removed") as refused:
        hf_families.compare_with_transformers(decoder_config(tmp_path))
    assert refused.value.diagnostics[0].code == "hf-structure"


def test_check_refuses_a_family_whose_layers_differ(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small_config("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("sley_hf.decoder.Block.forward", lambda self, hidden, positions=None, cu_seqlens=None: hidden)
    with pytest.raises(PlanError) as refused:
        hf_families.compare_with_transformers(decoder_config(tmp_path))
    assert refused.value.diagnostics[0].code == "hf-differs"


def test_the_readme_lists_the_families() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith(("| dense", "| mixture"))]
    names = {name for row in rows for name in re.findall("`([a-z0-9_]+)`", row.partition("|")[2].partition("|")[2])}
    assert names == FAMILIES.keys()
    in_fp32 = re.findall("`([a-z0-9_]+)`", text.partition("compute norms or attention in fp32")[2].partition(")")[0])
    assert set(in_fp32) == {family for family in FAMILIES if computes_in_fp32(small_config(family))}


@pytest.mark.parametrize(("family", "experts"), [("mixtral", 3 * 64 * 96), ("qwen3_moe", 3 * 64 * 32), ("llama", 0)])
def test_flops_count_the_experts_that_a_token_uses(family: str, experts: int, tmp_path: Any) -> None:
    config = small_config(family)
    config.save_pretrained(tmp_path)
    flops = model_flops(hf_families.build_layers(decoder_config(tmp_path), DATA).build().layers)
    head_dim = getattr(config, "head_dim", None) or 16
    projections = 64 * head_dim * (4 + 2 + 2 + 4)
    router, mlp = (64 * 4, 2 * experts) if experts else (0, 3 * 64 * 96)
    assert flops.matrices == 6 * (2 * (projections + router + mlp) + 64 * 256)
    assert flops.attention == 6 * 2 * 4 * head_dim
