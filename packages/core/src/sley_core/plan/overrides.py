"""`--set key.path=VALUE`: one value of the plan, changed from outside. VALUE is TOML; a bare word is a string."""

from __future__ import annotations

import re
from typing import Any

import tomli

from sley_core.errors import KeyPath, PlanError, dotted
from sley_core.words import is_utf8, printable, shown

_BARE_WORD = re.compile(r"[^\s\"'\[\]{}=,#](?:[^\"'\[\]{}=,#\n]*[^\s\"'\[\]{}=,#])?")
_QUOTE = "VALUE is TOML; a string needs quotes, which the shell takes away: --set 'run.name=\"first try\"'"


def apply(tables: dict[str, Any], text: str) -> KeyPath:
    """Sets in `tables` the value that `text` gives, creating tables on the path; returns the path that was set.

    A number is an index into an array; the number after its last item appends one. Raises PlanError "set-invalid",
    without a place.
    """
    if not is_utf8(text):
        raise PlanError("set-invalid", f"`{printable(text)}` is not UTF-8")
    name, equals, value_text = _split(text)
    if not equals:
        raise PlanError("set-invalid", f"`{text}` is not of the form key.path=VALUE", hint=_QUOTE)
    parts = _key(name)
    value = _value(value_text)
    here: Any = tables
    path: KeyPath = ()
    for part, following in zip(parts, (*parts[1:], None), strict=True):
        key = _step(here, part, path)
        path = (*path, key)
        if following is None:
            here[key] = value
            break
        if isinstance(here, dict):
            here.setdefault(key, [] if following == "0" else {})
        here = here[key]
        if not isinstance(here, dict | list):
            raise PlanError("set-invalid", f"`{dotted(path)}` is {shown(here)}, which has no keys")
    return path


def _step(here: Any, part: str, path: KeyPath) -> str | int:
    """Returns the key or index that `part` means in the table or array `here`; appends an empty item if it is the next."""
    if isinstance(here, dict):
        return part
    if not part.isdecimal() or int(part) > len(here):
        count = f"0 to {len(here)}" if here else "0"
        raise PlanError("set-invalid", f"`{dotted(path)}` is an array: `{part}` must be a number, {count}")
    if int(part) == len(here):
        here.append({})
    return int(part)


def _split(text: str) -> tuple[str, str, str]:
    """Returns the text before the first equals sign outside quotes, the sign or "", and the text after it."""
    match = re.match(r"((?:[^=\"']|\"(?:[^\"\\]|\\.)*\"|'[^']*')*)(=?)", text)
    assert match, text
    return match[1].strip(), match[2], text[match.end() :].strip()


def _key(name: str) -> list[str]:
    """Returns the parts of a dotted key, quoted as in TOML; raises PlanError "set-invalid"."""
    try:
        nested: Any = tomli.loads(f"{name} = 0") if "\n" not in name else {}
    except (tomli.TOMLDecodeError, RecursionError):
        nested = {}
    parts = []
    while isinstance(nested, dict) and len(nested) == 1:
        ((part, nested),) = nested.items()
        parts.append(part)
    if nested != 0 or not parts:
        raise PlanError("set-invalid", f"`{name}` is not a key path such as `gradient_handlers.0.bucket_mb`")
    return parts


def _value(text: str) -> Any:
    """Returns the TOML value of `text`, or `text` itself if it is a bare word; raises PlanError "set-invalid"."""
    try:
        found = tomli.loads(f"value = {text}")
        if found.keys() == {"value"}:
            return found["value"]
    except (tomli.TOMLDecodeError, ValueError, RecursionError):
        if _BARE_WORD.fullmatch(text):
            return text
    raise PlanError("set-invalid", f"{shown(text)} is neither a TOML value nor a bare word", hint=_QUOTE)
