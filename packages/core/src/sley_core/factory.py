"""Imports and calls the code that a plan names by `factory`: the only code that a plan can name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

from sley_core.errors import KeyPath, PlanError, SleyError, cause
from sley_core.words import suggestion


def call_factory(
    name: str, path: KeyPath, folder: Path | None, options: Mapping[str, Any], run_arguments: Mapping[str, Any]
) -> Any:
    """Imports and calls the code `name`, and returns its result.

    path: the path of the table, for errors. folder: added to `sys.path` for good. run_arguments: passed beside `options` if the
    signature names them. Raises PlanError "factory-import", "factory-options" for options that the code does not accept, and
    "factory-failed" if the code raises.
    """
    function = import_factory(name, path, folder)
    arguments = deepcopy(dict(options))  # a factory runs again, and may change a list of its options
    try:
        signature = inspect.signature(function)
    except ValueError:
        pass  # some C callables have no readable signature: the call itself checks
    else:
        for key in run_arguments.keys() & signature.parameters.keys():
            if key in options:
                raise _options_error(name, path, f"`{key}` is what a run passes itself")
            arguments[key] = run_arguments[key]
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise _options_error(name, path, str(error)) from error
    try:
        return function(**arguments)
    except SleyError:
        raise
    except (Exception, SystemExit) as error:
        hint = f"install what has `{error.name}`" if isinstance(error, ModuleNotFoundError) and error.name else None
        message = f"`{name}` failed: {cause(error)}"
        raise PlanError("factory-failed", message, path=(*path, "factory"), hint=hint) from error


def import_factory(name: str, path: KeyPath, folder: Path | None) -> Callable[..., Any]:
    """Imports the callable `"package.module:attribute"`; `folder` stays on `sys.path`. Raises PlanError "factory-import"."""
    if folder and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module_name, _, attribute = name.partition(":")
    key = (*path, "factory")
    try:
        target: Any = import_module(module_name)
    except (Exception, SystemExit) as error:
        where = f", and neither has `{folder}`" if folder else ""
        hint = f"nothing installed has it{where}" if isinstance(error, ModuleNotFoundError) else None
        raise PlanError("factory-import", f"cannot import `{name}`: {cause(error)}", path=key, hint=hint) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            source = getattr(target, "__file__", None) or f"`{module_name}`"
            hint = suggestion(part, (known for known in vars(target) if not known.startswith("_")))
            raise PlanError("factory-import", f"cannot import `{name}`: {source} has no `{part}`", path=key, hint=hint)
        target = getattr(target, part)
    if not callable(target):
        message = f"`{name}` is a {type(target).__name__}, which cannot be called"
        raise PlanError("factory-import", message, path=key)
    function: Callable[..., Any] = target
    return function


def _options_error(name: str, path: KeyPath, why: str) -> PlanError:
    message = f"`{name}` cannot be called with these options: {why}"
    return PlanError("factory-options", message, path=(*path, "options"))
