"""`python -m in_a_disk SIZE -m MODULE ...` runs the module with a disk of its own at the folder `disk`, as `unshare` would.

Nobody else sees the disk; what is left in it is then in `kept`. The process has one thread, or the system refuses.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER of <sched.h>


def mount(size: str) -> None:
    """Mounts a disk of this size at `disk`, as root among users that are this process's own. Raises OSError."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_USERS):
        raise OSError(ctypes.get_errno(), "no mounts of its own")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text, "utf-8")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "disk"], check=True)


mount(sys.argv[1])
del sys.argv[:3]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    shutil.copytree("disk", "kept")
