"""Gives datasets the types of samples, of their fields, and of text as token ids; imports no torch."""

from sley_core.data.dataset import (
    BOUNDARY_FIELDS,
    IGNORED,
    TOKEN_FIELDS,
    DataContext,
    DataInfo,
    DataRows,
    Field,
    Sample,
    Split,
    TextIds,
)

__all__ = [
    "BOUNDARY_FIELDS",
    "IGNORED",
    "TOKEN_FIELDS",
    "DataContext",
    "DataInfo",
    "DataRows",
    "Field",
    "Sample",
    "Split",
    "TextIds",
]
