"""Finds the versions of every installed package of Sley, and of plugins and commands by others."""

from __future__ import annotations

from importlib.metadata import distributions

_GROUPS = ("[sley.plugins]", "[sley.commands]")


def sley_versions() -> dict[str, str]:
    """Returns versions by distribution, sorted by name; reads metadata only."""
    found: dict[str, str] = {}
    for dist in distributions():
        name = dist.metadata["Name"] or ""
        text = "" if name.startswith("sley-") else dist.read_text("entry_points.txt") or ""
        if name.startswith("sley-") or any(group in text for group in _GROUPS):
            # What is met first on sys.path is what an import finds.
            found.setdefault(name, dist.version)
    return dict(sorted(found.items()))
