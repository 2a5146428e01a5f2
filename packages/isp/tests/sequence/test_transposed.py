"""Heads and positions are told apart in every form, and in what a plan names: [b, h, s, d] is refused, never computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.model.attention import Attention
from sley_core.plan.load import plan_from_dict
from sley_core.topology import Topology
from sley_isp.sequence.attention import over_slices
from sley_testing.plans import small_plan

OWN = Path(__file__).parent / "own"


def plain(q, k, v):
    return Attention()(q, k, v)


def transposed(q, k, v):
    """[b, h, s, d], as most models have it by then."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def over_all_heads(q, k, v):
    return plain(q, k, v) + v.mean(-2, keepdim=True)


def called(attention, form, q, k, v):
    """What `over_slices` is given of a form: an attention, and its arguments."""
    if form == "qkv":
        return lambda qkv: attention(*qkv.unbind(2)), (torch.stack([q, k, v], dim=2),)
    if form == "q and kv":
        return lambda q, kv: attention(q, *kv.unbind(2)), (q, torch.stack([k, v], dim=2))
    return attention, (q, k, v)


def attended(form, calls):
    """For each of (attention, positions of a slice, heads, key heads): the context's error, or what is refused."""
    found = []
    with World.join("cpu") as world:
        group = world.groups(Topology.of(world.size, sp=world.size), 60)["sp"]
        for attention, own, heads, kv_heads in calls:
            torch.manual_seed(own)
            shapes = [(2, own * group.size, number, 3) for number in (heads, kv_heads, kv_heads)]
            whole = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
            sliced = [tensor.chunk(group.size, dim=1)[group.coord] for tensor in whole]
            given = [tensor.transpose(1, 2) for tensor in sliced] if attention is transposed else sliced
            split, args = called(attention, form, *given)
            wanted = plain(*whole).chunk(group.size, dim=1)[group.coord]
            try:
                found.append(float((over_slices(split, group)(*args) - wanted).abs().max()))
            except RunError as error:
                found.append(error.diagnostics[0].code)
    return found


@pytest.mark.parametrize("form", ["qkv", "q and kv"])
def test_packed_keys_and_values(ranks, form):
    """Also where shapes do not tell, as 4 heads of 4 positions."""
    sizes = [(4, 8), (4, 4), (8, 4), (2, 2), (2, 8)]
    cases = [(attention, own, heads, heads) for attention in (plain, transposed) for own, heads in sizes]
    for found in ranks(2, 60)(attended, form, cases):
        assert all(isinstance(one, float) and one < 1e-14 for one in found[: len(sizes)]), found
        assert found[len(sizes) :] == ["sequence-layout"] * len(sizes)


def test_heads_and_positions_are_not_taken_for_each_other(ranks):
    """Where shapes tell them apart and where not, as 4 heads of 4 positions; heads that see one another are told too."""
    right = [(plain, 4, 8, 8), (plain, 4, 4, 4), (plain, 4, 4, 2), (plain, 2, 2, 2), (plain, 1, 2, 1)]
    wrong = [(transposed, own, heads, heads) for own, heads in ((4, 8), (4, 4), (8, 4), (2, 2), (2, 8))]
    for found in ranks(2, 30)(attended, "q, k, v", [*right, *wrong, (over_all_heads, 4, 4, 4)]):
        assert all(isinstance(one, float) and one < 1e-14 for one in found[: len(right)]), found
        assert found[len(right) :] == ["sequence-layout"] * (len(wrong) + 1)


def first_step(heads):
    """What the first step of a plan says that names the attention of `transposed`."""
    plan = small_plan(
        model={"factory": "transposed:layers", "options": {"heads": heads}},
        data={"use": "data.text", "source": "python-stdlib", "sequence": 16, "documents": "cut"},
        parallel={"sp": 2, "dp": 1},
        sequence={"use": "isp.all_to_all", "modules": ["*.attend"]},
    )
    with World.join("cpu") as world, assemble(plan_from_dict(plan, OWN), world) as run:
        with pytest.raises(RunError) as caught:
            run.step()
        return caught.value.diagnostics[0].code


@pytest.mark.parametrize("heads", [4, 8])
def test_modules_that_a_plan_names(ranks, monkeypatch, heads):
    """With 8 heads a slice has as many positions as heads."""
    monkeypatch.syspath_prepend(OWN)
    assert ranks(2, 60)(first_step, heads) == ["sequence-layout"] * 2
