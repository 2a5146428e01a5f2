"""Of a test with many cases, those that run always: what `@pytest.mark.sample(n)` of the root conftest.py keeps."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import pytest

CONFTEST = runpy.run_path(str(Path(__file__).parents[3] / "conftest.py"))
parameters, sample = CONFTEST["parameters"], CONFTEST["sample"]


@pytest.mark.parametrize("sizes", [(4, 3), (2, 16), (5, 5), (2, 3, 4)])
def test_as_many_cases_as_the_longest_axis_has_values_have_every_value(sizes):
    cases = [set(enumerate(values)) for values in itertools.product(*map(range, sizes))]
    kept = sample(cases, max(sizes))
    assert 0 in kept
    assert len(kept) == max(sizes)
    assert set().union(*(cases[at] for at in kept)) == set().union(*cases)


PAIRS = [("keep", 1), ("keep", 2), ("keep", 3), ("recompute", 1)]


@pytest.mark.parametrize(("policy", "micro"), PAIRS)
def test_cases_that_are_written_as_lists_share_the_values_that_they_have_alike(request, policy, micro):
    assert parameters(request.node) == {("policy", repr(policy)), ("micro", repr(micro))}
    assert sample([{("policy", one), ("micro", other)} for one, other in PAIRS], 2) == {0, 3}, "another policy comes first"
