"""Two hosts on this machine: namespaces of the kernel, each with a network, a name and an /etc/hosts, joined by one cable."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

NAMES = ("host1", "host2")

_HOSTS = "127.0.0.1 localhost\n10.77.0.1 host1\n10.77.0.2 host2\n"
_BEGIN = "mount --bind {hosts} /etc/hosts && hostname {name} && ip link set lo up && echo there && exec sleep 600"
_SPACES = ("--net", "--uts", "--mount")


class TwoHosts(AbstractContextManager["TwoHosts"]):
    """Raises OSError on entering, with a reason, where the kernel or the system does not let us make them."""

    def __init__(self, folder: Path) -> None:
        """folder: whole paths in it are the same on both."""
        self._hosts = folder / "hosts"
        self._hosts.write_text(_HOSTS, "utf-8")
        self._holders: list[subprocess.Popen[str]] = []

    def __enter__(self) -> TwoHosts:
        try:
            self._hold(["unshare", "--user", "--map-root-user", *_SPACES], NAMES[0])
            # Beside the first, so that one of them may hand the other its end of the cable.
            first = ["nsenter", "--target", str(self._holders[0].pid), "--user", "--preserve-credentials"]
            self._hold([*first, "unshare", *_SPACES], NAMES[1])
            cable = ("link", "add", "eth0", "type", "veth", "peer", "name", "eth0")
            self._ip("host1", *cable, "netns", str(self._holders[1].pid))
            for number, name in enumerate(NAMES, start=1):
                self._ip(name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
                self._ip(name, "link", "set", "eth0", "up")
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise OSError(f"no namespaces can be made here: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def command(self, name: str, *command: str) -> list[str]:
        """Returns what runs `command` on the host of this name."""
        holder = str(self._holders[NAMES.index(name)].pid)
        spaces = ["--user", "--preserve-credentials", *_SPACES]
        return ["nsenter", "--target", holder, *spaces, f"--wd={self._hosts.parent}", *command]

    def cut(self) -> None:
        """Pulls the cable out."""
        self._ip("host1", "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Plugs the cable in again."""
        self._ip("host1", "link", "set", "eth0", "up")

    def close(self) -> None:
        """Ends both hosts; their network goes with them."""
        for holder in self._holders:
            holder.kill()
            holder.communicate()

    def _hold(self, within: list[str], name: str) -> None:
        begin = _BEGIN.format(hosts=self._hosts, name=name)
        holder = subprocess.Popen([*within, "sh", "-c", begin], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._holders.append(holder)
        assert holder.stdout is not None
        if (said := holder.stdout.readline()) != "there\n":
            raise OSError(said.strip() or "unshare ended")

    def _ip(self, name: str, *arguments: str) -> None:
        subprocess.run(self.command(name, "ip", *arguments), check=True, timeout=20, capture_output=True)
