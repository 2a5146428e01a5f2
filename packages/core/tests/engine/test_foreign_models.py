"""Models that are not ours train through `factory` as by a loop of their own, in every layout."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan

MODELS = Path(__file__).parents[4] / "examples" / "models"
HF_LLAMA = small_plan(
    model={"factory": "hf_llama:layers", "options": {"num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "tie": False}},
    data={"use": "data.text", "source": "python-stdlib", "sequence": 16, "documents": "cut"},
    batch={"global_size": 4, "micro_size": 1},
    optimizer={"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1},
)
CONV_TIE = HF_LLAMA | {
    "model": {"factory": "conv_tie:layers", "options": {"hidden": 8, "num_blocks": 2}},
    "data": {"factory": "own_bits:Rows"},
    "loss": {"factory": "own_bits:Bits"},
}


def tables(base, precision, **options):
    changed = deepcopy(base)
    changed["model"]["options"] |= options
    return changed | {"precision": {"compute": precision}}


@pytest.fixture
def folder(own, monkeypatch):
    """The plans' own modules, and those of the examples."""
    monkeypatch.syspath_prepend(MODELS)
    return own


@pytest.mark.sample(2)
@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-6), ("fp64", 1e-9)])
@pytest.mark.parametrize("tie", [False, True])
def test_hf_llama_has_the_losses_of_transformers_own_loop(folder, precision, near, tie):
    plan = plan_from_dict(tables(HF_LLAMA, precision, tie=tie), folder)
    with assemble(plan, World.alone("cpu")) as run, assemble(plan, World.alone("cpu")) as own:
        theirs = causal_lm(own, tie).to(torch.float64 if precision == "fp64" else torch.float32)
        matrices = [parameter for parameter in theirs.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in theirs.parameters() if parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        for _ in range(3):
            batch = own.feed.next()
            optimizer.zero_grad()
            loss = their_loss(theirs, batch, precision)
            loss.backward()
            optimizer.step()
            assert run.step()["loss"] == pytest.approx(loss.item(), rel=near)


def their_loss(model, batch, precision):
    """transformers' own loss; it rounds logits to fp32, so that fp64 needs the same by hand."""
    if precision == "fp64":
        return F.cross_entropy(model(input_ids=batch["tokens"]).logits.flatten(0, 1), batch["labels"].flatten())
    return model(input_ids=batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"]).loss


def causal_lm(run, tie):
    """A LlamaForCausalLM with the weights of `run`, copied by name."""
    from transformers import LlamaConfig, LlamaForCausalLM  # not in ranks that run a function of this module

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tie,
    )
    model = LlamaForCausalLM(config)
    names = {"embed.": "model.", "layers.": "model.layers.", "head.norm.": "model.norm.", "head.lm_head.": "lm_head."}
    state = {}
    for param in run.registry:
        for name in (param.name, *param.aliases):
            ours = name.replace(".block.", ".")
            prefix = next(prefix for prefix in names if ours.startswith(prefix))
            state[ours.replace(prefix, names[prefix], 1)] = param.parameter.detach()
    assert model.load_state_dict(state) == ([], [])
    return model


def test_a_loss_of_ones_own_is_a_mean_over_all_samples(folder):
    """The loss in a row is the sum over the global batch by its weight, which here counts bits and not labels."""
    with assemble(plan_from_dict(tables(CONV_TIE, "fp64"), folder), World.alone("cpu")) as run:
        first = run.step()
    assert first["loss"] == pytest.approx(math.log(2), rel=0.1), "two values per bit, all alike at first"
