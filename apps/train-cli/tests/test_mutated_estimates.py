"""An estimate that leaves one thing out is not what ranks take: each thing counts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from sley_core.engine.shards import Shard
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes import rank as steps
from sley_estimate.bytes.ledger import Ledger
from sley_estimate.bytes.rank import rank_bytes
from sley_models import llama
from sley_testing.live_bytes import RealBytes, real_bytes
from sley_testing.plans import Tables, changed, small_plan

OFF = 0.01
PLAN = small_plan(
    model={"use": "models.llama", "num_layers": 1, "hidden": 128, "heads": 4, "vocab_size": 259},
    data__sequence=64,
    data__documents="cut",
    precision={"compute": "bf16"},
)
SHARDED = changed(
    PLAN, parallel={"wp": 2, "dp": 2}, model__tie_embeddings=True, weights={"use": "isp.communicator", "unit": "layer"}
)
"""Over a group whose size does not divide the vocabulary, and with a weight that two layers share."""

STAGED = changed(
    PLAN,
    parallel={"pp": 2, "dp": 1},
    pipeline={"use": "pp.one_f_one_b"},
    batch={"global_size": 8, "micro_size": 1},
    model__vocab_size=1031,
)
"""With a last stage that is much larger than the next batch, which may or may not be there at the peak (6 KB)."""

Patch = Callable[[pytest.MonkeyPatch], None]


def without_ties(patch: pytest.MonkeyPatch) -> None:
    """A weight of two layers counts twice."""
    tied = llama.layers
    patch.setattr(llama, "layers", lambda config, info: tied(config.model_copy(update={"tie_embeddings": False}), info))


def without_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shard, "size", property(lambda shard: shard.shape[shard.dim] // shard.count))


def without(owner: str) -> Patch:
    """What a part of the run keeps is not counted."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        own = steps._own

        def left_out(run: Any, ledger: Ledger, on_host: Collection[str]) -> None:
            own(run, ledger, on_host)
            for piece in ledger.pieces:
                piece.num_bytes = 0 if piece.owner == owner else piece.num_bytes

        patch.setattr(steps, "_own", left_out)

    return patched


def without_transients(patch: pytest.MonkeyPatch) -> None:
    """What comes and goes within one entry is not counted."""
    peak = Ledger.peak

    def of_what_stays(ledger: Ledger) -> tuple[int, int]:
        ledger.pieces = [piece for piece in ledger.pieces if steps._kind(piece) != "temporary buffers" or piece.owner]
        return peak(ledger)

    patch.setattr(Ledger, "peak", of_what_stays)


def without_scratch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "pass_by", lambda *_: None)


def without_one_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """One fewer is in flight than the schedule says."""
    patch.setattr(steps, "fewest_micros", lambda *_: 1)


MUTANTS: dict[str, tuple[Tables, Patch]] = {
    "tie": (SHARDED, without_ties),
    "padding": (SHARDED, without_padding),
    "pool": (SHARDED, without("pools")),
    "message": (STAGED, without("pools")),
    "transient": (STAGED, without_transients),
    "held micro-batch": (STAGED, without_one_micro_batch),
    "scratch of an operator": (STAGED, without_scratch),
}


def taken(ranks: Any, tables: Tables, folder: Path) -> list[RealBytes]:
    found: list[RealBytes] = ranks(2, 60).once(real_bytes, tables, folder=folder)
    return found


def is_right(real: list[RealBytes], tables: Tables, folder: Path) -> bool:
    """Whether states are equal on both ranks, and peaks as far apart as is usual at most."""
    for rank, one in enumerate(real):
        found = rank_bytes(plan_from_dict(tables, folder), rank, 2)
        print(found.states, one.states, found.peak - found.batch, one.peak)
        if found.states != one.states or abs(found.peak - found.batch - one.peak) > OFF * one.peak:
            return False
    return True


@pytest.mark.parametrize("tables", [SHARDED, STAGED], ids=["sharded", "staged"])
def test_the_whole_estimate_is_right(ranks: Any, texts: Path, tables: Tables) -> None:
    assert is_right(taken(ranks, tables, texts), tables, texts)


@pytest.mark.parametrize(("tables", "mutate"), MUTANTS.values(), ids=MUTANTS)
def test_an_estimate_without_it_is_wrong(
    ranks: Any, texts: Path, monkeypatch: pytest.MonkeyPatch, tables: Tables, mutate: Patch
) -> None:
    real = taken(ranks, tables, texts)
    mutate(monkeypatch)
    assert not is_right(real, tables, texts)
