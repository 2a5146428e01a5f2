"""A disk that is full in the middle of a save: the run goes on and says so, and what it had stays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_checkpoint.reader import newest, verify

pytestmark = pytest.mark.timeout(180)

MODEL = """
    import json, os, time
    from pathlib import Path
    from torch import nn

    FILL = Path("disk/filler")
    FIRST = Path("disk/saved/step-00000001")

    def step_of(calls):
        return (calls + 1) // 2  # two micro-batches on each rank

    def fill():
        deadline = time.monotonic() + 60
        while not FIRST.is_dir():  # written beside this step: without room it would fail too, and leave its own to the second
            assert time.monotonic() < deadline, "the first step's checkpoint is not there"
            time.sleep(0.01)
        with FILL.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                file.truncate(file.tell() - (300 << 10))  # a save of 770 KiB has room to begin

    class Embed(nn.Embedding):
        calls = 0

        def forward(self, tokens):
            if self.training and os.environ["RANK"] == "0":
                Embed.calls += 1
                if Embed.calls == 3:
                    fill()
                if Embed.calls == 7:
                    from sley_checkpoint.reader import newest
                    found = newest("disk/saved")
                    Path("seen.json").write_text(json.dumps([found.path, found.passed_over]))
                    FILL.unlink()
            return super().forward(tokens)

    def layers():
        return [Embed(256, 256)]
"""


IN_A_DISK = 'mount -t tmpfs -o size=6m tmpfs disk && "$0" "$@"; code=$?; cp -r disk kept; exit $code'


@pytest.fixture
def disk(folder: Path) -> tuple[str, ...]:
    """Launches a program with a disk of its own at `disk`, whose files are then in `kept`. Skips if the system permits none."""
    (folder / "disk").mkdir()
    command = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
    try:
        tried = subprocess.run([*command, "mount -t tmpfs tmpfs disk"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if tried.returncode:
        pytest.skip(f"no disk may be mounted: {tried.stderr.decode().strip()}")
    return (*command, IN_A_DISK, sys.executable)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_run_goes_on_when_the_disk_is_full_in_a_save(
    start: Callable[..., Any], own_model: Callable[[str], Path], disk: Any, folder: Path, mode: str
) -> None:
    """It is full from the second step to the fourth, on both ranks."""
    saves = f'checkpoint={{every_steps=1, keep=9, mode="{mode}", folder="{folder}/disk/saved"}}'
    changes = ["run.steps=5", saves]
    result = start("run", own_model(MODEL), launcher=disk, changes=changes).finish(90)
    assert result.code == 0, result.err
    assert "step-00000002 could not be written" in result.err
    assert "No space left on device" in result.err
    assert "; the run goes on without it" in result.err
    found = json.loads((folder / "runs/small/summary.json").read_text("utf-8"))
    assert (found["outcome"], found["steps"]) == ("finished", 5)
    assert any("No space left on device" in note for note in found["notes"])
    assert found["counts"]["checkpoint"]["failed"] == len(found["notes"])
    assert json.loads((folder / "seen.json").read_text("utf-8")) == [str(folder / "disk/saved/step-00000001"), []]
    kept = folder / "kept" / "saved"
    names = sorted(path.name for path in kept.iterdir())
    assert names[0] == "step-00000001", names
    assert names[-1] == "step-00000005", names
    assert "step-00000002" not in names
    assert not any(verify(kept / name) for name in names), "whole, and nothing temporary beside them"
    assert newest(kept).path == str(kept / "step-00000005")
