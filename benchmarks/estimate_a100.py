"""Compares estimated steps with a public table of A100 times, of which a few rows calibrate the machine.

    python benchmarks/estimate_a100.py a100_iterations.csv [--seed N] [--rows 16] [--each]

The table has one row per layout: gpus, global_batch, micro_batch, hidden, heads, layers, sequence, dp, pp, iteration_ms; of
GPTs on one node of 8 A100 (fp16 with fp32 Adam, every block recomputed, 1F1B). Some rows, drawn by the seed, fit the eight
constants of a machine file. All others are predicted through the estimator: layers counted on meta, and the lists of
`pp.one_f_one_b`, lowered and simulated with their messages and sums. Nothing is fitted to the rows that count.
"""

import argparse
import csv
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.actions.action import loop
from sley_core.actions.lower import lower
from sley_core.engine.call import Recompute
from sley_core.model.layers import Layer
from sley_core.protocols import Loss
from sley_estimate.layers.operators import LayerWork
from sley_estimate.layers.times import LayerSeconds
from sley_estimate.layers.trace import trace_layer
from sley_estimate.machine import MachineFile, collective_cost, machine_from_dict, message_cost
from sley_estimate.step.simulate import Await, Compute, Exchange
from sley_estimate.testing import simulate_without_plan
from sley_pp.schedules import one_f_one_b

VOCABULARY = 51_200
SEEDS = 5
TARGET = 0.06
UPDATE_BYTES = 2 + 2 + 12 + 12 + 2
"""Bytes of a parameter that norm and Adam move: its fp16 gradient twice, master and two states both ways, its fp16 weight."""


class GPTEmbedding(nn.Module):
    """Tokens and learned positions."""

    def __init__(self, hidden: int, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(sequence, hidden)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return F.dropout(self.tokens(tokens) + self.positions(positions), 0.1)


class GPTBlock(nn.Module):
    """12 h^2 weights; attention that writes its scores, as these runs did."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.feed_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        scores = F.dropout(torch.softmax(query @ key.transpose(-1, -2), -1), 0.1)
        context = (scores @ value).transpose(1, 2).flatten(-2)
        x = x + F.dropout(self.output(context), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.feed_norm(x)))), 0.1)


class GPTHead(nn.Module):
    """Scores of every token, multiplied in fp32: per FLOP the table's head takes more than twice the time of its blocks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x).float(), self.output.weight.float())


class TokenLoss(Loss):
    """The sum of the cross-entropies."""

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        return float(batch["labels"].numel())

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


@dataclass(frozen=True)
class GPTRow:
    """A layout and, in seconds, what it took."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    dp: int
    pp: int
    seconds: float

    @property
    def micros(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)


def read_rows(path: Path) -> list[GPTRow]:
    """Returns the rows of a table with the columns of a `GPTRow`, times in milliseconds as `iteration_ms`."""
    with path.open(newline="") as file:
        rows = []
        for line in csv.DictReader(file):
            seconds = float(line.pop("iteration_ms")) / 1e3
            rows.append(GPTRow(**{name: int(float(value)) for name, value in line.items()}, seconds=seconds))
    for row in rows:
        assert row.gpus == row.dp * row.pp, row
        assert row.micros * row.dp * row.micro_batch == row.global_batch, row
        assert row.layers % row.pp == 0, row
    return rows


@cache
def trace_gpt_layers(hidden: int, heads: int, sequence: int, micro_batch: int) -> list[tuple[LayerWork, int]]:
    """Returns the work of embedding, block and head at this shape, each traced once on meta, with their parameters."""
    shape = micro_batch, sequence
    fields = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("tokens", "positions", "labels")}
    with torch.device("meta"):
        modules = [GPTEmbedding(hidden, sequence), GPTBlock(hidden, heads), GPTHead(hidden)]
    policy = Recompute(frozenset({"block"}))
    layers, value = [], None
    for name, module in zip(("embedding", "block", "head"), modules, strict=True):
        layer = Layer(name, module, ("tokens", "positions") if name == "embedding" else ())
        loss = TokenLoss() if name == "head" else None
        work, value = trace_layer(layer, value, fields, policy, loss, torch.float16, torch.float16)
        layers.append((work, sum(parameter.numel() for parameter in module.parameters())))
    return layers


@dataclass(frozen=True)
class Constant:
    """One constant of the machine that is fitted: where it starts, and by what factor e^spread it may well be off."""

    name: str
    prior: float
    spread: float


CONSTANTS = (
    Constant("fp16 flops_per_s", 0.7 * 312e12, 0.3),
    Constant("fp16 half_flops", 1e9, 1.0),
    Constant("fp32 flops_per_s", 0.6 * 156e12, 0.3),
    Constant("memory_bandwidth", 1.5e12, 0.25),
    Constant("launch_s", 20e-6, 0.5),
    Constant("link bandwidth", 2e11, 0.5),
    Constant("link latency_s", 2e-5, 1.0),
    Constant("step_s", 2e-3, 1.0),
)
"""Priors: datasheet peaks times what dense kernels usually reach, two thirds of a node's links, a busy host."""

NOISE = 0.04
"""Relative error that the estimator has anyway: weighs rows against priors."""


def build_machine(logs: np.ndarray) -> MachineFile:
    """Returns the machine file with the constants e^logs, of which the last, the seconds outside operators, is not part."""
    half, small, wide, memory, launch, link, latency, _ = (float(value) for value in np.exp(logs))
    return machine_from_dict(
        {
            "format": 1,
            "device": {
                "name": "A100, fitted",
                "kind": "cuda",
                "memory_bandwidth": memory,
                "launch_s": launch,
                "matmul": {"fp16": {"flops_per_s": half, "half_flops": small}, "fp32": {"flops_per_s": wide}},
            },
            "links": {"ranks_per_host": 8, "same_host": {"latency_s": latency, "bandwidth": link}},
        }
    )


def predictor(logs: np.ndarray) -> Callable[[GPTRow], float]:
    """Returns the estimator of a row's seconds on the machine with the constants e^logs."""
    machine, step_s = build_machine(logs), float(np.exp(logs[-1]))

    @cache
    def seconds(hidden: int, heads: int, sequence: int, micro_batch: int) -> tuple[LayerSeconds, ...]:
        layers = trace_gpt_layers(hidden, heads, sequence, micro_batch)
        return tuple(LayerSeconds.from_operators(work, machine.device) for work, _ in layers)

    def predict(row: GPTRow) -> float:
        shape = row.hidden, row.heads, row.sequence, row.micro_batch
        embedding, block, head = seconds(*shape)
        (_, first), (middle, size), (_, last) = trace_gpt_layers(*shape)
        layers = [[block] * (row.layers // row.pp) for _ in range(row.pp)]
        numbers = [size * len(part) for part in layers]
        layers[0], layers[-1] = [embedding, *layers[0]], [*layers[-1], head]
        numbers[0] += first
        numbers[-1] += last if row.pp > 1 else 0  # head and embedding are one weight
        ranks = [range(stage * row.dp, (stage + 1) * row.dp) for stage in range(row.pp)]
        sums = [collective_cost("sum", 2 * number, group, machine.links) for number, group in zip(numbers, ranks, strict=True)]
        between = [
            message_cost(middle.output_bytes, stage * row.dp, (stage + 1) * row.dp, machine.links)
            for stage in range(row.pp - 1)
        ]
        final_instructions: dict[int, list[Exchange | Await | Compute]] = {}
        for stage, (cost, number) in enumerate(zip(sums, numbers, strict=True)):
            summed = Exchange(stage, "sum", (stage,), *cost)
            update_s = number * UPDATE_BYTES / machine.device.memory_bandwidth + step_s
            final_instructions[stage] = [summed, Await(summed.key), Compute(update_s)]
        lists = lower_one_f_one_b(row.pp, row.micros)
        return simulate_without_plan(lists, loop(row.pp), layers, between, final_instructions).seconds

    return predict


@cache
def lower_one_f_one_b(stages: int, micros: int):  # type: ignore[no-untyped-def]
    """Returns the lowered lists of 1F1B."""
    return lower(one_f_one_b(stages, 1, micros), loop(stages), micros)


def fit(rows: Sequence[GPTRow]) -> np.ndarray:
    """Returns the logs of the constants: least squares of log ratios, with the priors as further rows (Gauss-Newton with
    Levenberg's damping).
    """
    start = np.log([constant.prior for constant in CONSTANTS])
    spreads = np.array([constant.spread for constant in CONSTANTS])
    logs_of_seconds = np.log([row.seconds for row in rows])

    def residuals(logs: np.ndarray) -> np.ndarray:
        predict = predictor(logs)
        return np.concatenate([(np.log([predict(row) for row in rows]) - logs_of_seconds) / NOISE, (logs - start) / spreads])

    logs, damping = start, 1e-2
    current = residuals(logs)
    for _ in range(12):
        steps = 1e-3 * np.eye(len(logs))
        slopes = np.stack([(residuals(logs + step) - current) / 1e-3 for step in steps], axis=1)
        normal = slopes.T @ slopes
        while damping < 1e6:
            trial = logs - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slopes.T @ current)
            after = residuals(trial)
            if after @ after < current @ current:
                break
            damping *= 10
        gained = 1 - (after @ after) / (current @ current)
        if gained <= 0:
            break
        logs, current, damping = trial, after, damping / 10
        if gained < 1e-4:
            break
    return logs


def relative_errors(rows: Sequence[GPTRow], logs: np.ndarray) -> np.ndarray:
    """Returns the relative error of each row's prediction."""
    predict = predictor(logs)
    return np.array([predict(row) / row.seconds - 1 for row in rows])


def print_errors(rows: Sequence[GPTRow], row_errors: np.ndarray, logs: np.ndarray) -> None:
    """Prints the fitted constants, and errors by gpus, dp and pp."""
    for constant, log in zip(CONSTANTS, logs, strict=True):
        print(f"    {constant.name:18} {np.exp(log):.4g}   (prior {constant.prior:.4g})")
    for name in ("gpus", "dp", "pp"):
        by = defaultdict(list)
        for row, error in zip(rows, row_errors, strict=True):
            by[getattr(row, name)].append(error)
        texts = [f"{key}: {np.mean(np.abs(of)):.1%} ({np.mean(of):+.1%}, {len(of)} rows)" for key, of in sorted(by.items())]
        print(f"    {name:5}", "  ".join(texts))


def main() -> None:
    """Prints for each seed the mean and the largest absolute error of all rows that were not fitted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("file", type=Path, nargs="?", help="the table, CSV; none is part of this repository")
    parser.add_argument("--seed", type=int, default=0, help=f"the first of the {SEEDS} seeds that draw the rows to fit")
    parser.add_argument("--rows", type=int, default=16, help="how many rows are fitted")
    parser.add_argument("--each", action="store_true", help="print each row that the first seed predicts")
    options = parser.parse_args()
    if options.file is None:
        print("no table is given, so there is nothing to compare with")
        return
    rows = read_rows(options.file)
    means = []
    for seed in range(options.seed, options.seed + SEEDS):
        start_s = time.perf_counter()
        order = random.Random(seed).sample(rows, len(rows))
        fitted, others = order[: options.rows], order[options.rows :]
        logs = fit(fitted)
        row_errors = relative_errors(others, logs)
        means.append(float(np.mean(np.abs(row_errors))))
        worst = float(np.max(np.abs(row_errors)))
        print(
            f"seed {seed}: fitted on {len(fitted)} rows, mean absolute error of the other {len(others)}: {means[-1]:.2%}, "
            f"largest {worst:.2%} ({time.perf_counter() - start_s:.0f} s)"
        )
        if seed == options.seed:
            print_errors(others, row_errors, logs)
        if seed == options.seed and options.each:
            for row, error in zip(others, row_errors, strict=True):
                print(f"    {row}: predicted {row.seconds * (1 + error):.3f} s, {error:+.1%}")
    met = "met" if max(means) <= TARGET else "not met"
    print(f"means {min(means):.2%} to {max(means):.2%}; target {TARGET:.0%}: {met}")


if __name__ == "__main__":
    main()
