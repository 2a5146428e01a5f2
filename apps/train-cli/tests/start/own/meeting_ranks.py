"""Ranks that meet, each in a thread or a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sley_core.errors import RunError
from train_cli.start.meeting import Meeting

FACTS = {"the plan": "abc", "torch": "2.13.0", "plugin dp": "sley-dp 0.1.0"}
PARTS = {"the plan": {"run.steps": "5", "optimizer.lr": "0.1"}}

SECOND = {"MASTER_ADDR": "localhost"}
"""For what stands for a second process of one rank: a process counts its meetings by rank and by the name of the place."""

held: list[Meeting] = []
"""Rank 0's store is there as long as its run, which other ranks read to the end."""


def has_loopback_6() -> bool:
    """Whether this system has `::1`."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def environ(port: int, rank: int, size: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}


def told(calls: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """What each of the calls raised, "" for nothing, all of them at once in threads of their own."""
    found: dict[str, str] = {}

    def call(name: str) -> None:
        try:
            calls[name]()
            found[name] = ""
        except RunError as error:
            found[name] = str(error)

    threads = [threading.Thread(target=call, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    held.clear()
    assert found.keys() == calls.keys(), "a rank hangs"
    return found


def comes(port: int, rank: int, size: int, facts: dict[str, str] = FACTS, timeout_s: float = 5, **more: str) -> Any:
    """A rank that comes to the meeting with `facts`, from a host of its own."""

    def come() -> None:
        at = Meeting.at(environ(port, rank, size, **more), timeout_s=timeout_s)
        at.host = f"host{rank}"
        lr = {"the plan": PARTS["the plan"] | {"optimizer.lr": "0.5"}} if facts["the plan"] != "abc" else PARTS
        held.append(at)
        at.agree(facts, lr)

    return come


def builds(
    port: int,
    rank: int,
    size: int,
    seconds: float = 0.0,
    fails: bool = False,
    until: threading.Event | None = None,
    **more: str,
) -> Callable[[], None]:
    """A rank that meets, and then builds for some `seconds`, or until something has come to pass."""

    def build() -> None:
        at = Meeting.at(environ(port, rank, size, **more), timeout_s=5)
        held.append(at)
        at.host = f"host{rank}"
        at.agree(FACTS, PARTS)
        with at.all_or_none(600):
            time.sleep(seconds)
            assert until is None or until.wait(20), "it did not come to pass while this rank built"
            if fails:
                raise RunError("no-tokenizer", "there is no `tokenizer.json`", hint="copy it there")

    return build


@contextmanager
def dies(port: int, rank: int, size: int, **more: str) -> Iterator[None]:
    """A process that comes to the meeting as `rank`, and is killed while it builds."""
    child = os.fork()
    if child == 0:
        try:
            at = Meeting.at(environ(port, rank, size, **more), timeout_s=5)
            at.host = f"host{rank}"
            at.agree(FACTS, PARTS)
            with at.all_or_none(600):
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.waitpid(child, 0)


def timed(call: Callable[[], None], seconds: dict[int, float], rank: int) -> Callable[[], None]:
    """`call`, with the time that it took noted."""

    def run() -> None:
        begun = time.monotonic()
        try:
            call()
        finally:
            seconds[rank] = time.monotonic() - begun

    return run
