"""What a restart takes, from the command to the row of the next step: of a new run, and of one that goes on from a checkpoint.

    python restart.py        1 GiB of state, one process; beside them, reading the checkpoint's bytes once

Target: at most 5 s beside loading, which is by how much a continued run takes longer than a new one.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w

from checkpoint import tables
from protocol import parser

MORE_S = 5.0
FIRST = 2
"""The steps of the run that is continued."""


def seconds_to_step(folder: Path, step: int, *arguments: str) -> float:
    """Seconds from starting `train-cli run` to the row of `step`; waits for its end."""
    command = [sys.executable, "-m", "train_cli", "run", str(folder / "plan.toml"), *arguments]
    rows = folder / "runs" / "restart" / "metrics.jsonl"
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        while not has_row(rows, step):
            if run.poll() not in (None, 0):
                raise SystemExit(f"the run ended with {run.returncode}")
            time.sleep(0.005)
        return time.perf_counter() - began


def has_row(rows: Path, step: int) -> bool:
    lines = rows.read_text("utf-8").splitlines() if rows.exists() else []
    return any(json.loads(line).get("step") == step for line in lines if line.endswith("}"))


def read_once(folder: Path) -> tuple[float, int]:
    """Seconds to read all bytes of the checkpoint into memory that is there, and how many they are."""
    memory, num_bytes = bytearray(16 << 20), 0
    began = time.perf_counter()
    for path in (folder / "runs" / "restart" / "checkpoints").rglob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(memory):
                num_bytes += got
    return time.perf_counter() - began, num_bytes


def main() -> None:
    options = parser(__doc__.splitlines()[0], 5).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan: dict[str, Any] = {"source_folder": str(Path(__file__).parent)} | tables(
            checkpoint={"every_steps": FIRST, "keep": 1}
        )
        plan["run"] |= {"name": "restart", "steps": FIRST, "folder": str(folder / "runs"), "final_weights": "none"}
        (folder / "plan.toml").write_text(tomli_w.dumps(plan), "utf-8")
        new, again, read = [], [], []
        for _ in range(options.rounds):
            shutil.rmtree(folder / "runs", ignore_errors=True)
            new.append(seconds_to_step(folder, 1))
            seconds, num_bytes = read_once(folder)
            read.append(seconds)
            more = f"run.steps={FIRST + 1}"
            again.append(
                seconds_to_step(folder, FIRST + 1, "--resume", "auto", "--set", more, "--set", "checkpoint.every_steps=99")
            )
    begins, resumes, reads = (statistics.median(one) for one in (new, again, read))
    print(f"\n{num_bytes / 2**30:.2f} GiB of state, {os.cpu_count()} cores, {options.rounds} rounds, medians")
    print(f"   a new run, to its first step          {begins:6.2f} s   [{min(new):.2f}, {max(new):.2f}]")
    print(f"   a continued run, to its next step     {resumes:6.2f} s   [{min(again):.2f}, {max(again):.2f}]")
    print(f"   reading the checkpoint's bytes once   {reads:6.2f} s")
    print(f"   so loading takes {resumes - begins:.2f} s; target: at most {MORE_S:g} s beside it: {begins <= MORE_S}")


if __name__ == "__main__":
    main()
