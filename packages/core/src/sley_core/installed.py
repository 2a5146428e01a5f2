"""Whether a file is a library's, or the user's own."""

from __future__ import annotations

import sysconfig
from pathlib import Path

LIBRARIES = frozenset({"site-packages", "dist-packages"})
"""Names of folders into which packages are installed, in whatever environment."""

_STDLIB = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")]


def is_installed(file: str) -> bool:
    """Returns whether `file` belongs to Python or to an installed package; not to one that is installed as editable.

    By whole folders: a project may lie beside its environment, under a name that begins with the environment's, or in it.
    """
    path = Path(file)
    return not LIBRARIES.isdisjoint(path.parts) or any(path.is_relative_to(folder) for folder in _STDLIB)
