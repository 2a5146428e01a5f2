"""Lets the ranks of a local run find each other through a file in a private folder, a new one for every attempt.

Elastic's own rendezvous keep a TCPStore, which listens on all interfaces whatever address it is given; and a store that is used
twice gives gloo the addresses of ranks that have ended.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not where type checkers look
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from sley_core.comm.occasions import STORE


class FileRendezvous(RendezvousHandler):
    """Serves one agent without peers. `next_rendezvous` also puts the store of the new attempt into this process's environment,
    of which the agent gives its ranks a copy.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id
        self._num_attempts = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Makes the folder and store of a new attempt, and puts the store's URI into this process's environment."""
        attempt = self._folder / f"attempt-{self._num_attempts}"
        attempt.mkdir()
        self._num_attempts += 1
        os.environ[STORE] = (attempt / "ranks").as_uri()
        # Ranks read no address: World.join uses the store. Elastic wants one to put into their environment.
        address = RendezvousStoreInfo("127.0.0.1", 0)
        # The agent's own store, for agents of other machines, stays in memory: it cannot be lost and waits for no file.
        return RendezvousInfo(HashStore(), 0, 1, address)

    def get_backend(self) -> str:
        return "sley-file"

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True
