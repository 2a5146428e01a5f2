"""Sharded weights give the numbers of the one-process run (DESIGN 13.1; statements A01, A03, A04)."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("wp", [2])
def test_every_rank_holds_a_shard(parity, wp):
    """A01: fp64 loss, norm, every gathered gradient of the first step, and weights after three AdamW steps."""
    parity(wp, wp=wp)
