"""Reads and writes a machine file, with a place and a hint for whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from sley_core.errors import Diagnostic, PlanError
from sley_core.plan.document import Document, by_place, plain
from sley_core.plan.faults import faults
from sley_core.plan.read import read_file, read_tables
from sley_core.words import shown
from sley_estimate.machine.tables import MACHINE_FORMAT, MachineFile

MAKE = "`train-cli calibrate --out machine.toml` writes one"


def load_machine(path: str | Path) -> MachineFile:
    """Returns the machine that the file at `path` describes. Imports no torch.

    Raises PlanError, with the line of the fault: "machine-missing" and the like for a file that cannot be read as TOML,
    "machine-format" for another format, and what is wrong with each key ("missing-key", "unknown-key", "out-of-range",
    "wrong-type", "wrong-value").
    """
    try:
        document = read_file(path)
    except PlanError as error:
        raise PlanError.many([_of_machine(one) for one in error.diagnostics]) from None
    return _checked(document)


def machine_from_dict(tables: Mapping[str, Any]) -> MachineFile:
    """Returns the machine that plain data describes, as TOML would give it. Raises PlanError for a wrong format or key, as
    `load_machine`.
    """
    return _checked(read_tables(tables))


def machine_text(machine: MachineFile) -> str:
    """Returns the file's text; reading it gives an equal machine."""
    return tomli_w.dumps(plain(machine))


def _checked(document: Document) -> MachineFile:
    """Returns the machine of a document. Raises PlanError "machine-format" for another format or none, and for each wrong key,
    with its line.
    """
    given = document.tables
    found = given.get("format")
    if found != MACHINE_FORMAT or isinstance(found, bool):
        message = "this is no machine file: it has no `format`"
        if "format" in given:
            message = f"`format` is {shown(found)}, but this version reads machine files of format {MACHINE_FORMAT}"
        raise PlanError.many([document.diagnostic("machine-format", message, ("format",), MAKE)])
    try:
        return MachineFile.model_validate(given)
    except ValidationError as error:
        told = faults(error, MachineFile, given, (), document, "the machine file")
        raise PlanError.many(by_place(told)) from None


def _of_machine(diagnostic: Diagnostic) -> Diagnostic:
    """Returns a diagnostic of a file that could not be read, in words of machine files."""
    code = diagnostic.code.replace("plan-", "machine-", 1)
    message = diagnostic.message.replace("not a plan", "not a machine file")
    return replace(diagnostic, code=code, message=message, hint=MAKE if code == "machine-missing" else diagnostic.hint)
