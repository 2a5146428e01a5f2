"""Downloads data set files from the Hugging Face hub into the hub's cache, once on each host; torch-free.

The names have the form `hf://datasets/OWNER/NAME@REVISION/PATTERN`; `@REVISION` is optional. The folder of a complete download
is recorded, so that later starts and other ranks use the same files without a server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import escape
from hashlib import blake2b
from pathlib import Path

from sley_core.api.files import replace_atomically
from sley_core.errors import PlanError, PluginError
from sley_data.cache import home, say

INSTALL = """install sley-data[hub], in a clone of Sley's repository: `pip install -e "packages/data[hub]"`"""

_NAME = re.compile(r"hf:/+datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<path>.+)")


def downloaded(name: str) -> str:
    """Downloads the files with the hub name `name`, unless they are cached, and returns a pattern of the local files.

    Raises PlanError `data-hub` if the download fails, and PluginError `hub-missing` if `huggingface_hub` is not installed.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        hint = "write `hf://datasets/OWNER/NAME/PATTERN`"
        raise PlanError("data-hub", f"`{name}` names no file of a data set", hint=hint)
    folder = home()
    record = folder and folder / "hub" / f"{blake2b(name.encode(), digest_size=16).hexdigest()}.json"
    try:
        snapshot = Path(json.loads(record.read_text("utf-8"))["folder"]) if record else None
    except (OSError, ValueError, KeyError, TypeError):
        snapshot = None
    if snapshot is None or not snapshot.is_dir():
        snapshot = _download_snapshot(match["repo"], match["revision"], match["path"])
        if record:
            record.parent.mkdir(parents=True, exist_ok=True)
            with replace_atomically(record) as file:
                file.write(json.dumps({"folder": str(snapshot)}).encode())
    return f"{escape(str(snapshot))}/{match['path']}"


def _download_snapshot(repo: str, revision: str | None, pattern: str) -> Path:
    """Downloads the files of a revision that match `pattern`, and returns the revision's folder in the hub's cache."""
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError:
        message = "`hf://` needs the package `huggingface_hub`, which is not installed"
        raise PluginError("hub-missing", message, hint=INSTALL) from None
    try:
        info = HfApi().dataset_info(repo, revision=revision)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        matches = [name for name in names if _matches(name.split("/"), pattern.split("/"))]
        say(f"downloads {len(matches)} files of `{repo}`, revision {info.sha}")
        paths = [hf_hub_download(repo, name, repo_type="dataset", revision=info.sha) for name in matches]
    except Exception as error:  # huggingface_hub also raises the errors of its HTTP library
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        hint = "use `hf auth login` for a private data set; without a network, copy the files to this host and name their paths"
        raise PlanError("data-hub", f"the data set `{repo}` cannot be downloaded: {reason}", hint=hint) from None
    if not paths:
        hint = f"it has {', '.join(names[:5])}"
        raise PlanError("data-hub", f"no file of the data set `{repo}` matches `{pattern}`", hint=hint)
    return Path(paths[0]).parents[matches[0].count("/")]


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Returns whether a path matches a pattern, both split at "/". The pattern `**` matches any number of folders."""
    if not patterns or not parts:
        return not patterns and not parts
    if patterns[0] == "**":
        return any(_matches(parts[start:], patterns[1:] or ["*"]) for start in range(len(parts)))
    return fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])
