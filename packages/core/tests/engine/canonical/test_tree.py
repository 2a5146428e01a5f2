"""One tree over all micro-batches: any cut of them into ranks, and any order of arrival, gives the same additions."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from math import log2

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sley_core.engine.canonical.tree import Node, PartialSums, Spares, cover, leaf, parent, run_of, sibling


def additions(node: Node) -> set[tuple[Node, Node]]:
    """All additions below `node`, as the definition has it."""
    if node.last - node.first == 1:
        return set()
    left, right = node.children
    return {(left, right)} | additions(left) | additions(right)


def joined(nodes: list[Node], num_leaves: int) -> tuple[list[Node], set[tuple[Node, Node]]]:
    """What is left when siblings among `nodes` are added until there are none, and these additions."""
    held: set[Node] = set()
    made: set[tuple[Node, Node]] = set()
    for node in nodes:
        while (other := sibling(node, num_leaves)) in held and other is not None:
            held.remove(other)
            made.add((min(node, other), max(node, other)))
            node = parent(node, other)
        held.add(node)
    return sorted(held), made


@given(st.integers(1, 96), st.data())
def test_any_cut_and_any_order_take_the_additions_of_the_one_tree(num_leaves, data):
    borders = sorted(data.draw(st.sets(st.integers(1, num_leaves), max_size=6)) | {0, num_leaves})
    everything: list[Node] = []
    done: set[tuple[Node, Node]] = set()
    for first, last in pairwise(borders):
        leaves = data.draw(st.permutations([leaf(at) for at in range(first, last)]))
        left, made = joined(leaves, num_leaves)
        assert left == cover(first, last, num_leaves)
        assert len(left) <= 2 * log2(num_leaves) + 1
        everything += left
        done |= made
    rest, made = joined(data.draw(st.permutations(everything)), num_leaves)
    assert rest == [Node(0, num_leaves)]
    assert done | made == additions(Node(0, num_leaves))


@given(st.integers(1, 12), st.integers(1, 12))
def test_each_rank_of_a_group_has_a_run_of_its_own(size, each):
    runs = [run_of(coord, size, size * each) for coord in range(size)]
    assert [at for first, last in runs for at in range(first, last)] == list(range(size * each))


def canonical(gradients: list[Tensor], dp: int) -> Tensor:
    """The sum over `dp` ranks, each of which joins what it can and hands over the rest."""
    num_leaves = len(gradients)
    total = PartialSums(num_leaves)
    for coord in range(dp):
        own = PartialSums(num_leaves)
        first, last = run_of(coord, dp, num_leaves)
        for at in range(first, last):
            own.put(0, leaf(at), gradients[at].clone())
        for node in cover(first, last, num_leaves):
            total.put(0, node, own.take(0, node, gradients[0]))
    return total.take(0, Node(0, num_leaves), gradients[0])


def left_to_right(gradients: list[Tensor], dp: int) -> Tensor:
    """The sum as it is without a tree: micro-batches in a rank, then ranks."""
    each = len(gradients) // dp
    ranks = [sum(gradients[at * each : (at + 1) * each], torch.zeros_like(gradients[0])) for at in range(dp)]
    return sum(ranks, torch.zeros_like(gradients[0]))


def hashes(way, gradients: list[Tensor], sizes: tuple[int, ...]) -> set[str]:
    return {sha256(way(gradients, dp).numpy().tobytes()).hexdigest() for dp in sizes}


def test_all_numbers_of_ranks_give_one_hash_where_sums_from_left_to_right_give_three():
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(1000, generator=generator) for _ in range(8)]
    assert len(hashes(canonical, gradients, (1, 2, 4, 8))) == 1
    assert len(hashes(left_to_right, gradients, (1, 2, 4, 8))) == 3  # 8 ranks of one add as 1 rank of eight


@given(st.integers(1, 8), st.sampled_from([(1, 2), (1, 3), (1, 2, 3, 6), (1, 5), (1, 2, 4)]))
def test_numbers_that_are_no_powers_of_two_give_one_hash_too(each, sizes):
    generator = torch.Generator().manual_seed(each)
    gradients = [torch.randn(50, generator=generator) for _ in range(each * max(sizes))]
    assert len(hashes(canonical, gradients, sizes)) == 1


def test_eight_micro_batches_need_three_sums_besides_the_one_that_comes():
    spares, most = Spares(), 0
    sums = PartialSums(8, spares)
    for at in range(8):
        incoming = spares.lend(torch.empty(4))
        incoming.fill_(at)
        most = max(most, len(sums))
        sums.put(0, leaf(at), incoming)
    assert most == 3
    assert len(spares.made) == 3 + 1
    assert sums.take(0, Node(0, 8), torch.empty(4)).tolist() == [28.0] * 4


def test_a_micro_batch_of_which_nothing_comes_is_a_zero_in_every_layout():
    """So a gradient of -0.0 becomes 0.0, as it does where another rank adds its zeros."""
    sums = PartialSums(4)
    sums.put(0, leaf(1), torch.tensor([-0.0, 2.0]))
    found = sums.take(0, Node(0, 4), torch.empty(2))
    assert found.tolist() == [0.0, 2.0]
    assert not torch.signbit(found).any()
