"""Tests what every sequence attention must pass; the tests of a plugin inherit them.

    class TestRing(SequenceAttentionContract):
        sequence = {"use": "ring.attention"}

Each of two ranks has half of every sequence. What a rank gets for its half, in the forward and in the backward, is compared
with core's attention over the whole sequence: causal, with fewer key heads than query heads, and with documents that begin in
one half and end in the other. Then a small model in fp64 is trained in this way and compared with one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sley_core.assemble import assemble
from sley_core.comm.group import Group
from sley_core.comm.world import World
from sley_core.errors import PlanError, SleyError
from sley_core.model.attention import Attention
from sley_core.model.layers import Layer
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import SequenceCommunicator
from sley_core.topology import Topology
from sley_testing.collectives import Collective, assert_same_sequence, collectives
from sley_testing.contract_model import model_plan
from sley_testing.parity import assert_same_bits
from sley_testing.ranks import Ranks
from sley_testing.runs import Recorded, assert_parity, gradients, same_on_all, weights

Table = dict[str, Any]
Case = tuple[int, int, bool]  # query heads, key heads, and whether rows hold several documents

NUM_STEPS = 2
BATCH, LENGTH, WIDTH = 2, 8, 3
BOUNDS = torch.tensor([[0, 3, 7, 8], [0, 6, 8, 8]], dtype=torch.int32)
"""Where the documents of each row begin; one of each lies in both halves."""

DIVISIBLE: list[Case] = [(*heads, packed) for heads, packed in itertools.product([(4, 4), (4, 2), (4, 1)], [False, True])]
ODD: list[Case] = [(3, 3, False), (3, 1, True), (1, 1, False)]  # of which two ranks cannot have as many heads each


@dataclass
class Attended:
    """Records what one rank saw of one case.

    errors: of the context and of the gradients of q, k and v, relative to the largest element. refused: the error code, if it
    was refused. kept: whether parameters kept their names, and calls took whole sequences again at the end.
    """

    errors: list[float] = field(default_factory=list)
    calls: list[Collective] = field(default_factory=list)
    refused: str = ""
    kept: bool = False


@contextmanager
def attention_on_ranks(sequence: Table) -> Iterator[tuple[Group, Callable[[], SequenceCommunicator]]]:
    """Yields the group of all ranks, and a function that builds the attention over it."""
    with World.join("cpu") as world:
        group = world.groups(Topology.of(world.size, sp=world.size), 60)["sp"]
        component = plan_from_dict(tables(sequence)).sequence
        assert component is not None, sequence
        yield group, partial(component.build, group)


def attend(sequence: Table, cases: Sequence[Case]) -> list[Attended]:
    """Calls an attention of each case on this rank's slice, twice with different numbers, and once on whole sequences."""
    results = []
    with attention_on_ranks(sequence) as (group, build):
        for case in cases:
            seen, layer = Attended(), Layer("layer", _Attentive())
            before = list(dict(layer.module.named_parameters()))
            attention = build()
            attention.attach([layer])
            names = list(dict(layer.module.named_parameters()))
            with collectives() as seen.calls:
                try:
                    seen.errors = [error for seed in range(2) for error in _errors(layer.module, group, case, seed)]
                except SleyError as error:
                    seen.refused = error.diagnostics[0].code
            attention.detach()
            q, k, v, more = _drawn(case, 9)
            seen.kept = names == before and torch.equal(layer.module(q, k, v, **more), Attention()(q, k, v, **more))
            results.append(seen)
    return results


def refused(sequence: Table) -> str:
    """Returns the error code for a model without attention."""
    with attention_on_ranks(sequence) as (_, build):
        try:
            build().attach([Layer("layer", nn.Linear(2, 2))])
        except PlanError as error:
            return error.diagnostics[0].code
    return ""


def train(plan: Table) -> tuple[Recorded, float, list[list[Collective]]]:
    """Takes NUM_STEPS steps on this rank; returns the record, the held-out loss before, and each step's collectives."""
    recorded, sent = Recorded(), []
    with World.join("cpu") as world, assemble(plan_from_dict(plan), world) as run:
        recorded.first = weights(run)
        before = run.evaluate()
        for _ in range(NUM_STEPS):
            with collectives() as calls:
                recorded.rows.append(run.step())
            sent.append(list(calls))
            recorded.gradients.append(gradients(run))
        recorded.weights = weights(run)
        recorded.held_out = run.evaluate()
    return recorded, before, sent


class SequenceAttentionContract:
    """Tests a sequence attention: inherit and set `sequence` to its table. timeout_s: of each run on ranks."""

    sequence: ClassVar[Table]
    timeout_s: ClassVar[float] = 120.0

    def test_slice_results_equal_full_attention(self, ranks: Callable[..., Ranks]) -> None:
        """Context and gradients; exchanges are in one order on all ranks, and `detach` leaves what `attach` found."""
        found: list[list[Attended]] = ranks(2, self.timeout_s)(attend, self.sequence, DIVISIBLE)
        for case, seen in zip(DIVISIBLE, zip(*found, strict=True), strict=True):
            for one in seen:
                what = f"(heads, kv_heads, packed) = {case}"
                assert not one.refused, f"{what} is refused by `{one.refused}`"
                worst = max(one.errors)
                assert worst <= 1e-10, f"{what}: a slice's context or gradients are off by {worst:.3g} of the largest element"
                assert one.kept, f"{what}: after `detach` it is no attention of whole sequences"
            assert_same_sequence([one.calls for one in seen])

    def test_indivisible_heads_are_correct_or_refused(self, ranks: Callable[..., Ranks]) -> None:
        """On all ranks alike: none may wait for another that has refused."""
        found: list[list[Attended]] = ranks(2, self.timeout_s)(attend, self.sequence, ODD)
        for case, seen in zip(ODD, zip(*found, strict=True), strict=True):
            what, codes = f"(heads, kv_heads, packed) = {case}", [one.refused for one in seen]
            assert len(set(codes)) == 1, f"{what}: ranks do not refuse it alike, {codes}: one would wait for the other"
            worst = max((error for one in seen for error in one.errors), default=0.0)
            assert codes[0] or worst <= 1e-10, f"{what} is neither right nor refused: off by {worst:.3g}"
            assert all(one.kept for one in seen), f"{what}: after `detach` it is no attention of whole sequences"

    def test_model_without_attention_is_refused(self, ranks: Callable[..., Ranks]) -> None:
        """With a PlanError: otherwise no position would see another slice, without any error."""
        codes = ranks(2, self.timeout_s)(refused, self.sequence)
        assert all(codes), "a model without attention is not refused: no slice would see another"

    @pytest.mark.parametrize("fraction", [0.0, 1.0])
    def test_runs_match_one_process(self, ranks: Callable[..., Ranks], fraction: float) -> None:
        """Loss, norm, gradients, weights and the held-out loss, recomputed or not; ranks stay equal bit for bit."""
        activations: Table = {"activations": {"use": "core.recompute", "fraction": fraction}}
        wanted, before, _ = train(tables(None, **activations))
        layouts = ranks(2, self.timeout_s)(train, tables(self.sequence, **activations))
        recorded, first, sent = zip(*layouts, strict=True)
        assert_parity(wanted, recorded, "fp64")
        same_on_all(recorded)
        assert list(first) == pytest.approx([before] * len(first), rel=1e-10)
        assert [one.held_out for one in recorded] == pytest.approx([wanted.held_out] * len(recorded), rel=1e-9)
        for calls in zip(*sent, strict=True):
            assert_same_sequence(list(calls))

    def test_dropout_is_repeatable_and_equal_on_all_ranks(self, ranks: Callable[..., Ranks]) -> None:
        """Slices draw different numbers, so steps differ from those of one process; evaluations, which drop nothing, do not."""
        _, wanted, _ = train(tables(None, dropout=0.3))
        plan = tables(self.sequence, dropout=0.3)
        one, other = (ranks(2, self.timeout_s)(train, plan) for _ in range(2))
        for (first, before, _), (second, _, _) in zip(one, other, strict=True):
            assert before == pytest.approx(wanted, rel=1e-10)
            assert [row["loss"] for row in first.rows] == [row["loss"] for row in second.rows]
            assert_same_bits(first.weights, second.weights)
        same_on_all([recorded for recorded, _, _ in one])


class _Attentive(nn.Module):
    """Holds an attention, and a parameter whose name must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.scale = nn.Linear(1, 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **more: Tensor) -> Any:
        return self.attention(q, k, v, **more)


def _drawn(case: Case, seed: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Returns q [b, s, h, d], k and v [b, s, h_kv, d] in float64, the same on all ranks; and where documents begin."""
    heads, kv_heads, packed = case
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(BATCH, LENGTH, number, WIDTH, generator=generator, dtype=torch.float64)
        for number in (heads, kv_heads, kv_heads)
    )
    return q, k, v, {"cu_seqlens": BOUNDS} if packed else {}


def _errors(attention: nn.Module, group: Group, case: Case, seed: int) -> list[float]:
    """Returns how far this rank's context, with and without gradients, and its gradients are from the whole's."""
    *whole, more = _drawn(case, seed)
    factor = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(seed + 100), dtype=torch.float64)

    def own(value: Tensor | None) -> Tensor:
        assert value is not None, "no gradient"
        return value.chunk(group.size, dim=1)[group.coord]

    sliced = [own(one).clone().requires_grad_() for one in whole]
    with torch.no_grad():
        plain = attention(*sliced, **more)
    context = attention(*sliced, **more)
    context.backward(own(factor))
    whole = [one.requires_grad_() for one in whole]
    wanted = Attention()(*whole, **more)
    wanted.backward(factor)
    pairs = [(plain, own(wanted)), (context, own(wanted))]
    pairs += [(one.grad, own(every.grad)) for one, every in zip(sliced, whole, strict=True)]
    return [float((found - due).detach().abs().max() / due.detach().abs().max()) for found, due in pairs]


def tables(sequence: dict[str, Any] | None, dropout: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Returns the contract's plan: two ranks share sequences by the attention `sequence`; None has them whole."""
    plan = model_plan(dropout, batch={"global_size": 4, "micro_size": 2}, optimizer={"use": "core.sgd", "lr": 0.01})
    return plan | ({"parallel": {"sp": 2, "dp": 1}, "sequence": sequence} if sequence else {}) | changes
