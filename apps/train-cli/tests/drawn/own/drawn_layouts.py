"""Layouts: sizes of the axes, schedules (files of any valid order too), and every option that may change no number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

SCHEDULES = ("pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v", "pp.csv")

Tables = dict[str, Any]


@dataclass
class Layout:
    """tables: of the plan. parts: of the model, at least one layer each. micros: per rank and step. csv: a schedule's text."""

    tables: Tables
    parts: int
    micros: int
    csv: str = ""


def draw_layout(r: random.Random, world: int) -> Layout:
    pp = r.choice([size for size in (1, 2, 3, 4) if world % size == 0])
    sp, wp = (r.choice([1, 1, *(size for size in (2, 4) if world // pp % size == 0 and size <= 2)]) for _ in range(2))
    dp = world // pp // sp
    micros, micro_size = r.randint(1, 6), r.choice([1, 2])
    tables: Tables = {
        "batch": {"global_size": dp * micros * micro_size, "micro_size": micro_size},
        "parallel": {"dp": dp, "pp": pp, "sp": sp, "wp": wp, "cross_memory_attach": r.random() < 0.7},
        "precision": {"compute": "fp64", "accumulation": r.choice(["auto", "autograd", "direct", "direct"])},
    }
    parts, csv = pp, ""
    if pp > 1:
        tables["pipeline"], parts, csv = draw_schedule(r, pp, micros)
        if r.random() < 0.4:
            tables["partition"] = {"use": "pp.uniform"}
    if wp > 1:
        tables["weights"] = draw_weights(r)
    if sp > 1:
        tables["sequence"] = {"use": "isp.all_to_all"}
    if r.random() < 0.3:
        tables["activations"] = {"use": "core.recompute", "fraction": r.choice([0.5, 1.0])}
    if dp * sp > 1 and r.random() < 0.6:
        reducer: Tables = {"use": "dp.bucketed", "bucket_mb": r.choice([1e-4, 5e-4, 25.0])}
        tables["gradient_handlers"] = [reducer, *([{"use": "pp.shared_modules"}] if pp > 1 else [])]
    return Layout(tables, parts, micros, csv)


def draw_schedule(r: random.Random, pp: int, micros: int) -> tuple[Tables, int, str]:
    name = r.choice(SCHEDULES)
    if name == "pp.interleaved":
        chunks = r.choice([2, 3]) if pp == 2 else 2
        return {"use": name, "chunks": chunks}, pp * chunks, ""
    if name == "pp.zero_bubble_v":
        return {"use": name}, 2 * pp, ""
    if name != "pp.csv":
        return {"use": name}, pp, ""
    shape = r.choice(["loop", "loop", "v", "two"])
    chunks = 1 if shape == "loop" else 2
    return {"use": name}, pp * chunks, any_order(r, pp, chunks, shape == "v", micros)


def any_order(r: random.Random, pp: int, chunks: int, is_v: bool, micros: int) -> str:
    """A schedule's text: any order in which actions can run one after another, whole backwards and split ones mixed."""
    parts = pp * chunks

    def stage(part: int) -> int:
        return parts - 1 - part if is_v and part >= pp else part % pp

    rows: list[list[str]] = [[] for _ in range(pp)]
    forward = dict.fromkeys(range(micros), 0)
    backward = dict.fromkeys(range(micros), parts - 1)
    put_off: list[tuple[int, int]] = []
    while True:
        ready = [("F", part, micro) for micro, part in forward.items() if part < parts]
        ready += [("B", part, micro) for micro, part in backward.items() if part >= 0 and forward[micro] == parts]
        ready += [("W", part, micro) for part, micro in put_off]
        if not ready:
            return "".join(",".join(row) + "\n" for row in rows)
        kind, part, micro = r.choice(ready)
        if kind == "F":
            forward[micro] += 1
        elif kind == "W":
            put_off.remove((part, micro))
        else:
            backward[micro] -= 1
            if r.random() < 0.5:
                kind = "I"
                put_off.append((part, micro))
        rows[stage(part)].append(f"{part}{kind}{micro}")


def draw_weights(r: random.Random) -> Tables:
    tables: Tables = {
        "use": "isp.communicator",
        "unit": r.choice(["layer", "module"]),
        "overlap": r.random() < 0.8,
        "ahead": r.choice([0, 1, 2]),
        "reduce": r.choice(["micro_batch", "step"]),
        "head": r.choice(["gather", "vocabulary"]),
        "embedding": r.choice(["gather", "hidden"]),
    }
    if tables["unit"] == "layer":
        tables["launch"] = r.choice(["*", "body"])
    return tables
