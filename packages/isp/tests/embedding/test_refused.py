"""Tables that cannot be cut by columns are refused on meta; a shard that is read as a table, in the first backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError, RunError
from sley_core.plan.load import plan_from_dict

HIDDEN = {"embedding": "hidden"}
FOREIGN = {"data": {"factory": "isp_parts:Points"}, "loss": {"factory": "isp_parts:Squares"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model__tie_embeddings": True}, "`head.output` holds the table of `embed.tokens` too, and needs whole rows of it"),
        ({"model": {"factory": "isp_parts:tied_to_no_linear"}} | FOREIGN, "`head` holds the table of `embed.table` too"),
        ({"model": {"factory": "looked_up:limited"}} | FOREIGN, "no layer has a plain nn.Embedding"),
    ],
)
def test_another_model(own, texts, sharded, change, message):
    """Found on meta, on every rank of any stage: what `check --model` says."""
    plan = plan_from_dict(sharded(2, weights=HIDDEN, **change), texts)
    with World.fake(0, 2) as world, pytest.raises(PlanError) as caught, assemble(plan, world):
        pass
    assert caught.value.diagnostics[0].code == "embedding-hidden"
    assert message in str(caught.value)
    assert 'or `embedding = "gather"`' in str(caught.value)


def test_what_each_rank_holds_on_meta(own, texts, sharded):
    """Five columns over two ranks are three each; the rest is cut by rows, as without."""
    tables = sharded(2, weights=HIDDEN, model={"factory": "looked_up:layers"}, **FOREIGN)
    with World.fake(1, 2) as world, assemble(plan_from_dict(tables, texts), world) as run:
        param = run.registry["embed.tokens.weight"]
        assert param.shape == (11, 5)
        assert param.parameter.shape == (11, 3)
        assert param.shard.padding == 11
        assert run.registry["head.weight"].parameter.shape == (3, 5)


def run_of(tables: dict[str, Any], folder: Any) -> tuple[str, str]:
    """What a step says, and what a call after the run does."""
    said = ["nothing", "nothing"]
    with World.join("cpu") as world:
        with assemble(plan_from_dict(tables, folder), world) as run:
            try:
                run.step()
            except RunError as error:
                said[0] = str(error)
        try:
            run.layers[0].module(torch.arange(4)[None])
        except RunError as error:
            said[1] = str(error)
    return said[0], said[1]


def test_a_shard_is_no_table(ranks, own, texts, sharded):
    """Read without its embedding, and called after its run."""
    tables = sharded(2, weights=HIDDEN, model={"factory": "looked_up:read"}, **FOREIGN)
    for in_run, after in ranks(2)(run_of, tables, texts):
        assert "'embed.table.weight', of which this rank holds 3 of 6 columns" in in_run
        assert "the parameter 'embed.table.weight' after its run was closed" in after
