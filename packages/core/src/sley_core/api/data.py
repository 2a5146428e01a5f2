"""The types of samples, of their fields, and of text as token ids. Imports no torch."""

from sley_core.data.dataset import (
    BOUNDARY_FIELDS,
    IGNORE_INDEX,
    SOURCE,
    TOKEN_FIELDS,
    DataContext,
    DataInfo,
    Dataset,
    Field,
    Order,
    Sample,
    Split,
    TextIds,
    is_stream,
)

__all__ = ["BOUNDARY_FIELDS", "IGNORE_INDEX", "SOURCE", "TOKEN_FIELDS", "DataContext", "DataInfo", "Dataset", "Field"]
__all__ += ["Order", "Sample", "Split", "TextIds", "is_stream"]
