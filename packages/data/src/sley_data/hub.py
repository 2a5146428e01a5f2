"""Downloads files of a data set on Hugging Face's hub, once on each host, into that hub's own cache; torch-free.

`hf://datasets/OWNER/NAME@REVISION/PATTERN` names them; `@REVISION` may be left out. What a revision was when all of its files
were there is kept, so that later starts and other ranks ask no server, and see the same files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import escape
from hashlib import blake2b
from pathlib import Path

from sley_core.api.files import appearing
from sley_core.errors import PlanError, PluginError
from sley_data.cache import home, say

INSTALL = """install sley-data[hub], in a clone of Sley's repository: `pip install -e "packages/data[hub]"`"""

_NAME = re.compile(r"hf:/+datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<path>.+)")


def downloaded(name: str) -> str:
    """Returns a pattern of the local files that `name` stands for; downloads them if they are not there.

    Raises PlanError "data-hub" if they cannot be had, PluginError "hub-missing".
    """
    match = _NAME.fullmatch(name)
    if match is None:
        hint = "write `hf://datasets/OWNER/NAME/PATTERN`"
        raise PlanError("data-hub", f"`{name}` names no file of a data set", hint=hint)
    folder = home()
    kept = folder and folder / "hub" / f"{blake2b(name.encode(), digest_size=16).hexdigest()}.json"
    try:
        snapshot = Path(json.loads(kept.read_text("utf-8"))["folder"]) if kept else None
    except (OSError, ValueError, KeyError, TypeError):
        snapshot = None
    if snapshot is None or not snapshot.is_dir():
        snapshot = _snapshot(match["repo"], match["revision"], match["path"])
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with appearing(kept) as file:
                file.write(json.dumps({"folder": str(snapshot)}).encode())
    return f"{escape(str(snapshot))}/{match['path']}"


def _snapshot(repo: str, revision: str | None, pattern: str) -> Path:
    """Returns the folder of a revision in the hub's cache, with all files that match."""
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError:
        message = "`hf://` needs the package `huggingface_hub`, which is not installed"
        raise PluginError("hub-missing", message, hint=INSTALL) from None
    try:
        info = HfApi().dataset_info(repo, revision=revision)
        names = [each.rfilename for each in info.siblings or ()]
        chosen = [name for name in names if _matches(name.split("/"), pattern.split("/"))]
        say(f"downloads {len(chosen)} files of `{repo}`, revision {info.sha}")
        paths = [hf_hub_download(repo, name, repo_type="dataset", revision=info.sha) for name in chosen]
    except Exception as error:  # it raises those of its HTTP library, too
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        hint = "`hf auth login` for a private one; without a network, bring the files to this host and name their paths"
        raise PlanError("data-hub", f"the data set `{repo}` cannot be downloaded: {why}", hint=hint) from None
    if not paths:
        hint = f"it has {', '.join(names[:5])}"
        raise PlanError("data-hub", f"no file of the data set `{repo}` matches `{pattern}`", hint=hint)
    return Path(paths[0]).parents[chosen[0].count("/")]


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Returns whether a file's path matches, both by folders: `**` stands for folders of any depth."""
    if not patterns or not parts:
        return not patterns and not parts
    if patterns[0] == "**":
        return any(_matches(parts[start:], patterns[1:] or ["*"]) for start in range(len(parts)))
    return fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])
