"""A program that a test starts and waits for."""

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sley_testing.processes import MARK, ForkedProgram, Process, assert_none_left, descendants, processes_with

LIMIT_S = 60.0
"""The time limit of a program on a machine that is busy with other tests."""

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
    *("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
)


@dataclass(frozen=True)
class Result:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    def expect(self, code: int, *texts: str) -> "Result":
        """Checks the exit code, and that stderr has all `texts`. Returns the result itself."""
        missing_texts = [text for text in texts if text not in self.err]
        assert (self.code, missing_texts) == (code, []), self.err
        return self


class Program:
    """`python -m module ...`, forked from a process that has imported torch. It runs at the same time as the test. Its
    output is read at once, and its processes end with the test.
    """

    def __init__(self, command: list[str], folder: Path, environ: dict[str, str]) -> None:
        """Starts `command`, which begins with the interpreter and `-m`."""
        assert command[:2] == [sys.executable, "-m"], command
        self._mark = uuid.uuid4().hex
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environ, MARK: self._mark}
        self.process = ForkedProgram(command[2], command[3:], cwd=folder, env=env)
        self._arrived = threading.Condition()
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._readers = [self._read("out", self.process.stdout), self._read("err", self.process.stderr)]

    @property
    def out(self) -> str:
        return "".join(self._lines["out"])

    @property
    def err(self) -> str:
        return "".join(self._lines["err"])

    def wait_for(self, text: str) -> None:
        """Waits until `text` is on stderr. Fails if the program ends before, or after the time limit."""
        with self._arrived:
            is_there = self._arrived.wait_for(lambda: text in self.err or self.process.poll() is not None, LIMIT_S)
        assert is_there, f"no {text!r} within {LIMIT_S} s\n{self.err}"
        assert text in self.err, f"ended with {self.process.returncode} before {text!r}\n{self.out}\n{self.err}"

    def finish(self, limit_s: float = LIMIT_S) -> Result:
        """Waits until the program ends. Fails after `limit_s`, or if a process is left."""
        code = self.process.wait(limit_s)
        for reader in self._readers:
            reader.join(limit_s)
        assert_none_left(lambda: processes_with(MARK, self._mark), within_s=5)
        return Result(code, self.out, self.err)

    def ranks(self) -> list[Process]:
        """Returns the ranks that the program started, in order of rank."""
        return sorted(descendants(self.process.pid), key=lambda process: process.pid)

    def close(self) -> None:
        pids = [process.pid for process in processes_with(MARK, self._mark)]
        for pid in pids if self.process.poll() is not None else (self.process.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()

    def _read(self, name: str, stream: IO[str]) -> threading.Thread:
        def read() -> None:
            for line in stream:
                with self._arrived:
                    self._lines[name].append(line)
                    self._arrived.notify_all()
            # The stream ends a moment before the process does.
            for _ in range(100):
                if self.process.poll() is not None:
                    break
                time.sleep(0.05)
            with self._arrived:
                self._arrived.notify_all()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread


Cli = Callable[..., Result]
"""The type of the fixture `cli`."""
Start = Callable[..., Program]
"""The type of the fixture `start`."""
