"""Imports and calls the user's code that a plan names by `factory`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

from sley_core.errors import KeyPath, PlanError, SleyError, format_cause
from sley_core.words import suggestion


def call_factory(
    name: str, path: KeyPath, folder: Path | None, options: Mapping[str, Any], run_arguments: Mapping[str, Any]
) -> Any:
    """Imports the callable `name`, calls it and returns the result.

    path: the path of the table, for errors. folder: a folder that is added to `sys.path`. run_arguments: arguments of the run,
    which are passed in addition to `options` if the signature has them. Raises PlanError "factory-import", "factory-options" if
    the options do not fit the signature, and "factory-failed" if the call raises.
    """
    function = import_factory(name, path, folder)
    arguments = deepcopy(dict(options))  # a factory may run again, and may change a list in its options
    try:
        signature = inspect.signature(function)
    except ValueError:
        pass  # some C callables have no readable signature; their call checks the options
    else:
        for key in run_arguments.keys() & signature.parameters.keys():
            if key in options:
                raise _options_error(name, path, f"the run itself passes `{key}`")
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
        hint = f"install the package with `{error.name}`" if isinstance(error, ModuleNotFoundError) and error.name else None
        message = f"`{name}` failed: {format_cause(error)}"
        raise PlanError("factory-failed", message, path=(*path, "factory"), hint=hint) from error


def import_factory(name: str, path: KeyPath, folder: Path | None) -> Callable[..., Any]:
    """Imports and returns the callable `"package.module:attribute"`. Adds `folder` to `sys.path`.

    Raises PlanError "factory-import".
    """
    if folder and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module_name, _, attribute = name.partition(":")
    key = (*path, "factory")
    try:
        target: Any = import_module(module_name)
    except (Exception, SystemExit) as error:
        searched = f" or put the module into `{folder}`" if folder else ""
        hint = f"install the package{searched}" if isinstance(error, ModuleNotFoundError) else None
        raise PlanError("factory-import", f"cannot import `{name}`: {format_cause(error)}", path=key, hint=hint) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            source = getattr(target, "__file__", None) or f"`{module_name}`"
            hint = suggestion(part, (name for name in vars(target) if not name.startswith("_")))
            raise PlanError("factory-import", f"cannot import `{name}`: {source} has no `{part}`", path=key, hint=hint)
        target = getattr(target, part)
    if not callable(target):
        message = f"`{name}` is a {type(target).__name__}, which cannot be called"
        raise PlanError("factory-import", message, path=key)
    function: Callable[..., Any] = target
    return function


def _options_error(name: str, path: KeyPath, reason: str) -> PlanError:
    message = f"`{name}` cannot be called with these options: {reason}"
    return PlanError("factory-options", message, path=(*path, "options"))
