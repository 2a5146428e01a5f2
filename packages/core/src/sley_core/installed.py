"""Tells whether a file belongs to a library or to the user."""

from __future__ import annotations

import sysconfig
from pathlib import Path

LIBRARIES = frozenset({"site-packages", "dist-packages"})
"""Names of folders into which packages are installed, in whatever environment."""

_STDLIB = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")]


def is_installed(file: str) -> bool:
    """Returns whether `file` belongs to Python or to an installed package; not to an editable one.

    Compares whole folder names: a project may lie beside its environment, under a name that begins with the environment's, or
    in it.
    """
    path = Path(file)
    return not LIBRARIES.isdisjoint(path.parts) or any(path.is_relative_to(folder) for folder in _STDLIB)
