"""Tokenizing text once: its speed beside the tokenizer's own batch call, second starts, memory, and several processes at once.

    python benchmarks/data.py [--mb 1000]

The text is random pieces of the standard library as JSON lines, the tokenizer a byte-level BPE of 8,192 tokens trained on a
part of it. Each start is a process of its own: seconds from the opening of the dataset to a sample, and peak memory above
imports; of several, those of the slowest and of the largest.
"""

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer, Tokenizer

START = """
import resource, sys, time
import torch  # the data imports it; imports are not counted
from pathlib import Path
from sley_core.api.data import DataContext
from sley_data import streams
from sley_data.plugin import TextConfig
from sley_data.datasets import TokenDataset
import sley_data.tokenizer
folder, kept, streams.MIN_PART_BYTES, streams.MIN_CACHED_BYTES = *map(Path, sys.argv[1:3]), int(sys.argv[3]), 0
before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
options = {"files": (folder / "text.jsonl",), "field": "text", "tokenizer": folder / "tokenizer.json", "cache": kept}
config = TextConfig(**options, sequence=1024, held_out=1e-12)  # of which there is no document
data = TokenDataset(config, DataContext())
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


def texts(folder: Path) -> Iterator[str]:
    with (folder / "text.jsonl").open() as lines:
        for line in lines:
            yield json.loads(line)["text"]


def batch_call(folder: Path) -> float:
    """Returns the MB of text per second of the tokenizer's own call, 256 documents at a time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    batch = list(islice(texts(folder), 12_000))
    begun = time.perf_counter()
    for start in range(0, len(batch), 256):
        tokenizer.encode_batch_fast(batch[start : start + 256], add_special_tokens=False)
    return sum(len(text.encode()) for text in batch) / 1e6 / (time.perf_counter() - begun)


class Starts:
    """Starts processes that open the data, and prints a row of each group of them."""

    def __init__(self, folder: Path, text_mb: float, call: float) -> None:
        self._folder, self._text_mb, self._call = folder, text_mb, call
        self._part_bytes = min(1 << 25, int(text_mb * 1e6 / 8))

    def start(self, cache: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", START, str(self._folder), str(self._folder / cache), str(self._part_bytes)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def row(self, name: str, cache: str, count: int = 1, share: float = 1.0) -> None:
        """Starts `count` processes at once and prints their row. share: of the text that is to be tokenized; 0 for none."""
        outputs = [process.communicate() for process in [self.start(cache) for _ in range(count)]]
        seconds, mib = (max(float(out.split()[at]) for out, _ in outputs) for at in (0, 1))
        num_waiting = sum("waiting for another process" in error for _, error in outputs)
        speed = share * self._text_mb / seconds
        of_call = f"{speed:>8.2f} {speed / self._call:>8.3f}" if share else " " * 17
        print(f"{name:<34}{seconds:>9.2f} {of_call} {mib:>8.0f}   {num_waiting or ''}", flush=True)

    def kill_in_the_middle(self, cache: str) -> float:
        """Kills a process when it has kept half of the text; returns the share of the text that is left."""
        process = self.start(cache)
        num_parts = -(-self._text_mb * 1e6 // self._part_bytes)
        while (num_kept := len(list((self._folder / cache).glob("*/*.lengths")))) < num_parts // 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.kill()
        process.communicate()
        return 1 - num_kept / num_parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=200, help="megabytes of JSON lines")
    num_mb = parser.parse_args().mb
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.jsonl", num_mb * 1_000_000)
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(islice(texts(folder), 2000), vocab_size=8192, show_progress=False)
        tokenizer.save(str(folder / "tokenizer.json"))
        text_mb = sum(len(text.encode()) for text in texts(folder)) / 1e6
        call = batch_call(folder)
        print(f"{text_mb:.0f} MB of text; the tokenizer's batch call: {call:.2f} MB/s")
        print(f"{'':<34}{'seconds':>9} {'MB/s':>8} {'of call':>8} {'+MiB':>8}   waited")
        starts = Starts(folder, text_mb, call)
        starts.row("first start", "one")
        starts.row("second start", "one", share=0)
        starts.row("four ranks, first start", "four", 4)
        starts.row("four ranks, second start", "four", 4, share=0)
        starts.row("after a kill in the middle", "killed", share=starts.kill_in_the_middle("killed"))
        starts.row("two runs at once", "two", 2)


if __name__ == "__main__":
    main()
