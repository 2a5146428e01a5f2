"""Tokenizing text once: its speed beside the tokenizer's own batch call, and what a second start costs.

    python benchmarks/data.py [--mb 200]

The text is random pieces of the standard library as JSON lines, the tokenizer a byte-level BPE of 8,192 tokens trained on a
part of it. Each start is a process of its own: seconds from the opening of the data set to a sample, and peak memory above
imports.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer, Tokenizer

START = """
import resource, sys, time
from pathlib import Path
from sley_core.api.data import DataContext
from sley_data.config import TextConfig
from sley_data.datasets import TextDataset
from sley_data.tokenizer import Tokenizer
folder, cache = map(Path, sys.argv[1:])
before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
files = (folder / "text.jsonl",)
config = TextConfig(files=files, field="text", sequence=1024, tokenizer=folder / "tokenizer.json", cache=cache)
data = TextDataset(config, DataContext())
data[len(data) - 1], data.data_digest
print(time.perf_counter() - begun, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def write_text(file: Path, num_bytes: int) -> None:
    library = "".join(path.read_text("utf-8", "ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    draw, written = random.Random(0), 0
    with file.open("w") as lines:
        while written < num_bytes:
            start = draw.randrange(len(library) - 4000)
            written += lines.write(json.dumps({"text": library[start : start + draw.randint(500, 4000)]}) + "\n")


def batch_call(folder: Path) -> float:
    """Returns the MB of text per second of the tokenizer's own call, 256 documents at a time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with (folder / "text.jsonl").open() as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(12_000), strict=False)]
    begun = time.perf_counter()
    for start in range(0, len(texts), 256):
        tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=200, help="megabytes of JSON lines")
    num_mb = parser.parse_args().mb
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.jsonl", num_mb * 1_000_000)
        tokenizer = ByteLevelBPETokenizer()
        with (folder / "text.jsonl").open() as lines:
            sample = [json.loads(line)["text"] for line, _ in zip(lines, range(2000), strict=False)]
        tokenizer.train_from_iterator(sample, vocab_size=8192, show_progress=False)
        tokenizer.save(str(folder / "tokenizer.json"))
        with (folder / "text.jsonl").open() as lines:
            text_mb = sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6
        own = batch_call(folder)
        print(f"{text_mb:.0f} MB of text; the tokenizer's batch call: {own:.2f} MB/s")
        for start in ("first", "second"):
            command = [sys.executable, "-c", START, str(folder), str(folder / "cache")]
            seconds, mib = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
            speed = text_mb / seconds
            print(f"{start} start: {seconds:.2f} s, {speed:.2f} MB/s, {speed / own:.3f} of the call; +{mib:.0f} MiB")


if __name__ == "__main__":
    main()
