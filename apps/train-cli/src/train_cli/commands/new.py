"""`train-cli new KIND NAME`: a plugin package that is complete and passes its tests, to be changed from there."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from sley_core.discovery import CORE, installed
from sley_core.errors import UsageError
from sley_core.plan.loader import FIRST_PARTY
from train_cli.console import say

OURS = frozenset({CORE, *FIRST_PARTY})
"""Plugins of Sley's own, installed or not: a plan that names them means these."""

_SUFFIX = ".in"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def rendered(kind: str, name: str) -> dict[str, str]:
    """Returns the files of a package by their path in its folder. Raises UsageError "plugin-name" as `check_name` does.

    docs/write-a-plugin.md explains the one of a gradient handler, which is examples/plugins/sley-narrow too.
    """
    files = dict(_files(resources.files("train_cli.templates") / kind))
    check_name(name, files)
    return {path.replace("NAME", name): _filled(text, name) for path, text in files.items()}


def write(files: Mapping[str, str], out: Path) -> None:
    """Writes the files into the folder `out`, all of them or none. Raises UsageError "new-folder" if it has something in it,
    or cannot be written.
    """
    hint = "choose another `--out`"
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UsageError("new-folder", f"`{out}` exists and is not an empty folder", hint=hint)
    made = None
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
        for path, text in files.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_text(text, "utf-8")
        made.chmod(0o755)  # as folders are made elsewhere; that of a temporary one is its owner's alone
        made.rename(out)  # over an empty folder too
    except OSError as error:
        raise UsageError("new-folder", f"cannot write `{out}`: {error.strerror or error}", hint=hint) from None
    finally:
        if made is not None:
            with suppress(OSError):
                shutil.rmtree(made)


def check_name(name: str, files: Mapping[str, str] | None = None) -> None:
    """Raises UsageError "plugin-name" for a name that is not valid in plans and in Python, is taken, or is a word of
    `files`.
    """
    if not _NAME.fullmatch(name) or iskeyword(name):
        message = f"`{name}` is not a name: small letters, digits and `_`, a letter first, and no word of Python"
        raise UsageError("plugin-name", message, hint="take one such as `topk`")
    if name in OURS:
        raise UsageError("plugin-name", f"`{name}` is a plugin of Sley's own", hint=f"take another, such as `my_{name}`")
    known = installed().get(name)
    if known or find_spec(f"sley_{name}") is not None:
        who = known[0].label if known else f"the module `sley_{name}`"
        raise UsageError("plugin-name", f"`{name}` is taken: {who} is installed", hint="take another, or uninstall that")
    code = "\n".join(text for path, text in (files or {}).items() if path.endswith(".py"))
    words = set(re.findall(r"(?<!@)\b[A-Za-z_]\w*\b(?!@)", code))
    if taken := words & {name, _class(name)}:
        message = f"the package would have `{min(taken)}` in two meanings"
        raise UsageError("plugin-name", message, hint=f"take a name that says more, such as `my_{name}`")


def _files(folder: Traversable, below: str = "") -> list[tuple[str, str]]:
    """Returns path and text of each file of a template."""
    found = []
    for one in sorted(folder.iterdir(), key=lambda one: one.name):
        if one.is_dir():
            found += _files(one, f"{below}{one.name}/")
        elif one.name.endswith(_SUFFIX):
            found.append((below + one.name.removesuffix(_SUFFIX), one.read_text("utf-8")))
    return found


def _filled(text: str, name: str) -> str:
    text = text.replace("@name@", name).replace("@Name@", _class(name))
    # Where the module's name stands among imports depends on the name.
    return re.sub(r"(?:^from sley_.*\n)+", lambda found: "".join(sorted(found[0].splitlines(keepends=True))), text, flags=re.M)


def _class(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


class PluginKind(StrEnum):
    """What the plugin offers to plans."""

    handler = "handler"
    hook = "hook"
    schedule = "schedule"
    writer = "writer"
    model = "model"


def new(
    kind: Annotated[
        PluginKind,
        typer.Argument(
            help="handler: of gradients. hook: called around every action. schedule: of the learning rate. writer: of metrics. "
            "model: a list of layers.",
            show_default=False,
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The plugin's name, which plans will say.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="A folder that does not exist yet, or is empty; sley-NAME if left out."),
    ] = None,
) -> None:
    """Write a plugin package with a record, a table, a class and passing tests."""
    folder = out or Path(f"sley-{name.replace('_', '-')}")
    files = rendered(kind, name)
    write(files, folder)
    for path in files:
        say(f"{folder / path}")
    say(f"next: cd {folder} && pip install -e . pytest && pytest")
