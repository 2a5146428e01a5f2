"""JSON text, and an encoding of Python values that plain JSON would change. Imports torch only to decode tensors."""

import json
import math
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sley_core.files import write_atomically


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Returns `value` as JSON text, with null for infinities and NaN. Raises TypeError for a type that JSON lacks."""
    return json.dumps(_replace_nonfinite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path`, indented and atomically. Raises OSError with the file name."""
    write_atomically(path, to_json(value, indent=2) + "\n")


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return value


_TAG = "sley:"  # begins the only key of a dict that represents another type


def encode_value(value: Any) -> Any:
    """Returns `value` as JSON types. `decode_value` converts the result back to an equal value, with tensors on the CPU.

    Supports None, numbers, numpy scalars (which become plain numbers), strings, bytes, tensors, and lists, tuples and dicts of
    these. Raises TypeError for other types.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode_value(item) for item in value]
    if type(value) is tuple:
        return {_TAG + "tuple": [encode_value(item) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {_TAG + "bytes": b64encode(value).decode()}
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        from sley_core.model.tensors import flat_bytes  # torch is loaded already

        name, text = str(value.dtype).removeprefix("torch."), b64encode(flat_bytes(value.cpu()).numpy().data).decode()
        return {_TAG + "tensor": [name, list(value.shape), text]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
            return {key: encode_value(item) for key, item in value.items()}
        return {_TAG + "dict": [[encode_value(key), encode_value(item)] for key, item in value.items()]}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
        return encode_value(value.item())
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not plain data")


def decode_value(value: Any) -> Any:
    """Returns the object that `encode_value` converted to `value`. Raises ValueError for an unknown tag."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (tag := next(iter(value))).startswith(_TAG):
        return {key: decode_value(item) for key, item in value.items()}
    content = value[tag]
    match tag.removeprefix(_TAG):
        case "tuple":
            return tuple(decode_value(item) for item in content)
        case "bytes":
            return b64decode(content)
        case "dict":
            return {decode_value(key): decode_value(item) for key, item in content}
        case "tensor":
            name, shape, text = content
            import torch

            flat = torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8) if text else torch.empty(0)
            dtype: torch.dtype = getattr(torch, name)
            return flat.view(dtype).reshape(shape) if text else torch.empty(shape, dtype=dtype)
    raise ValueError(f"unknown type {tag!r} of an encoded value")
