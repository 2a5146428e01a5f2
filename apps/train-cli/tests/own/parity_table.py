"""The parity table: layouts, options and precisions, sampled so that every pair of values that can meet meets in some row.

`python apps/train-cli/tests/own/parity_table.py` writes what the table covers into docs/measurements.md.
"""

import random
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path

from league_rows import LIMIT, ROWS

from sley_testing.plans import Tables, changed, small_plan

Row = dict[str, str]
"""The name of a value for each factor; "-" where the row's layout has no use for the factor."""

SEED = 38
NUM_IN_CI = 5
"""How many rows, the first ones, CI runs; a campaign runs all."""

PAGE = Path(__file__).parents[4] / "docs" / "measurements.md"
HEADING = "## Parity\n"
PLAN = small_plan(
    model__hidden=32, model__ffn_hidden=51, model__vocab_size=257, data__sequence=16, optimizer__eps=1e-3,
    evaluation={"every": 9, "steps": 1}, batch={"global_size": 4, "micro_size": 1},
)  # fmt: skip
"""51 channels and 257 tokens divide by no number of ranks, so shards are padded. With a small eps AdamW's first steps are the
signs of gradients, which rounding decides where a gradient is almost zero.
"""

BUCKETS = {"use": "dp.bucketed", "bucket_mb": 0.002}
WEIGHTS = {"use": "isp.communicator"}
SMALL = {"bucket_mb": 0.01}
SOCKETS = {"parallel__cross_memory_attach": False}
FACTORS: dict[str, dict[str, Tables]] = {
    "model": {
        "tied and packed": {"model__tie_embeddings": True, "data__documents": "pack"},
        "untied and cut": {"data__documents": "cut", "optimizer__clip_kind": "inf", "optimizer__clip_norm": 0.01},
        "qk norm and padded": {"model__qk_norm": True, "data__documents": "pad", "optimizer__clip_norm": None},
    },
    "compute": {name: {"precision": {"compute": name}} for name in ("fp64", "fp32", "fp16", "bf16")}
    | {"bf16 sums": {"precision": {"compute": "bf16", "gradients": "bf16"}}},
    "step": {"all taken": {}, "second skipped": {"run__on_nan": "skip"}},
    "dp": {"1": {}, "2": {}},
    "pp": {"1": {}, "2": {}},
    "sp": {"1": {}, "2": {"sequence": {"use": "isp.all_to_all"}}},
    "wp": {"1": {}, "2": {}},
    "schedule": {
        name: {"pipeline": {"use": f"pp.{name}"}}
        for name in ("gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1", "zero_bubble_v")
    },
    "reducer": {
        "core.each": {},
        "dp.bucketed": {"gradient_handlers": [BUCKETS]},
        "dp.bucketed in bf16": {"gradient_handlers": [BUCKETS | {"reduction": "bf16"}]},
        "dp.sharded": {"gradient_handlers": [BUCKETS | {"use": "dp.sharded"}]},
    },
    "weights": {
        "by layer": {"weights": WEIGHTS},
        "by module": {"weights": WEIGHTS | {"unit": "module", "head": "vocabulary"}},
        "once per step": {"weights": WEIGHTS | {"reduce": "step", "ahead": 2, "overlap": False}},
        "by columns": {"weights": WEIGHTS | {"embedding": "hidden", "head": "vocabulary", "launch": "attention"}},
    },
    "activations": {
        "kept": {},
        "recomputed": {"activations": {"use": "core.recompute"}},
        "half recomputed": {"activations": {"use": "core.recompute", "fraction": 0.5}},
        "memory.selective": {"activations": {"use": "memory.selective"}},
        "memory.host": {"activations": {"use": "memory.host", "min_bytes": 256}},
    },
    "offload": {
        "none": {},
        "memory.host_optimizer": {"offload": [SMALL | {"use": "memory.host_optimizer"}]},
        "states between steps": {"offload": [SMALL | {"use": "memory.optimizer_states", "when": "between_steps"}]},
        "memory.everything": {"offload": [SMALL | {"use": "memory.everything"}]},
    },
    "accumulation": {"auto": {}, "direct": {"precision__accumulation": "direct"}},
    "logits": {"whole": {}, "in chunks": {"loss": {"use": "core.cross_entropy", "chunk_tokens": 10}}},
    "transport": {"memory": {}, "sockets": SOCKETS, "late": SOCKETS},
}
REFERENCE = ("model", "compute", "step")
"""The factors that the one-process run has too; no other may change a number."""


def num_ranks(row: Row) -> int:
    return int(row["dp"]) * int(row["pp"]) * int(row["sp"])


def complete(draw: random.Random, start: Row, max_ranks: int = 4) -> Row | None:
    """A row with the values of `start`, the others drawn, whose plan is allowed; None if there seems to be none."""
    for _ in range(100):
        row = {factor: start.get(factor) or draw.choice(list(values)) for factor, values in FACTORS.items()}
        has_replicas = row["dp"] == "2" or row["sp"] == "2"
        uses = {"schedule": row["pp"] == "2", "weights": row["wp"] == "2", "reducer": has_replicas}
        row |= {factor: "-" for factor, is_used in uses.items() if not is_used}
        fits = num_ranks(row) <= max_ranks and (row["wp"] == "1" or has_replicas)
        is_cut = row["weights"] == "by columns" and row["model"].startswith("tied")
        if fits and not is_cut and start.items() <= row.items():
            return row
    return None


def pairs(row: Row) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(combinations([(factor, value) for factor, value in row.items() if value != "-"], 2))


def rows() -> Iterator[Row]:
    """The rows of the table: one of eight ranks; then, of 30 drawn ones, the row with the most pairs that none before has."""
    draw = random.Random(SEED)
    values = [(factor, value) for factor, names in FACTORS.items() for value in names]
    missing = [pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0]]
    drawn = [complete(draw, dict.fromkeys(("dp", "pp", "sp", "wp"), "2"), 8)]
    while missing:
        if best := max(filter(None, drawn), key=lambda row: len(pairs(row).intersection(missing)), default=None):
            covered = pairs(best)
            missing = [pair for pair in missing if pair not in covered]
            yield best
        starts = draw.sample(missing, min(30, len(missing)))
        drawn = [complete(draw, dict(pair)) for pair in starts]
        impossible = {pair for pair, row in zip(starts, drawn, strict=True) if row is None}
        missing = [pair for pair in missing if pair not in impossible]


def reference(row: Row) -> Tables:
    """The plan of one process."""
    return _with(PLAN, row, REFERENCE)


def layout(row: Row) -> Tables:
    """The plan of the row's ranks."""
    tables = changed(PLAN, parallel={axis: int(row[axis]) for axis in ("dp", "pp", "sp", "wp")})
    tables = _with(tables, row, FACTORS)
    if row["reducer"].startswith("dp") and row["pp"] == "2":
        tables["gradient_handlers"].append({"use": "pp.shared_modules"})
    return tables


def _with(tables: Tables, row: Row, factors: Iterable[str]) -> Tables:
    for factor in factors:
        if row[factor] != "-":
            tables = changed(tables, **FACTORS[factor][row[factor]])
    return tables


def page() -> str:
    """Returns the page with an up-to-date section `Parity`, its last one."""
    text = PAGE.read_text("utf-8")
    return text[: text.index(HEADING)] + section()


def section() -> str:
    table = list(rows())
    covered, in_ci = (len(set().union(*map(pairs, some))) for some in (table, table[:NUM_IN_CI]))
    league_lines = "\n".join(f"| {row.layout} | {row.silent_error} | {', '.join(row.issues)} |" for row in ROWS)
    table_lines = "\n".join(f"| {factor} | {', '.join(values)} |" for factor, values in FACTORS.items())
    return f"""\
{HEADING}
<!-- The rest of this page is written by `python apps/train-cli/tests/own/parity_table.py`; do not edit. -->

Tests compare {len(table)} layouts of a small Llama, on 2 to 8 ranks, with one process and with a plain PyTorch loop without
the engine. They compare the loss, the gradient norm, the held-out loss, every gradient of the first step, and every weight
after two steps, within the [tolerances](internals.md#parity). Replicas must be bit-identical. Each layout has one value of
each factor below. Any two compatible values ({covered} pairs) occur together in some layout. CI runs {NUM_IN_CI} layouts
with {100 * in_ci // covered} % of the pairs. `nox -s campaign` runs all layouts, 100 random ones, and 2,000 random models.

| Factor | Values |
|---|---|
{table_lines}

### Known silent errors

Each row is a test that trains a small plan in a layout in which other programs silently produce wrong results. Every
loss, norm, gradient and final weight must agree with one process within {LIMIT:g}, or {ROWS[-1].limit:g} in bf16. Except
for dropout and bf16, they must also agree with a plain PyTorch loop. To show that the comparison finds the error, another
test injects this error into the ranks, and the comparison must fail. An arrow means that a run resumes in another layout.

| Layout | Silent error in other programs | Seen in |
|---|---|---|
{league_lines}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
