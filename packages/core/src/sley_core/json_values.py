"""Python values as JSON and back, unchanged: what a stream, a generator or an optimizer keeps besides tensors.

Plain JSON would silently turn tuples into lists and keys into strings. Values that are not plain data are refused.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import torch
from torch import Tensor

_TAG = "sley:"


def to_json(value: Any) -> Any:
    """Returns `value` as JSON from which `from_json` makes an equal value: None, numbers, strings, bytes, tensors, and lists,
    tuples and dicts of them. Raises TypeError for anything else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_json(one) for one in value]
    if type(value) is tuple:
        return {_TAG + "tuple": [to_json(one) for one in value]}
    if isinstance(value, bytes | bytearray):
        return {_TAG + "bytes": b64encode(value).decode()}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        name, text = (str(value.dtype).removeprefix("torch."), b64encode(flat.view(torch.uint8).numpy().tobytes()).decode())
        return {_TAG + "tensor": [name, list(value.shape), text]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
            return {key: to_json(one) for key, one in value.items()}
        return {_TAG + "dict": [[to_json(key), to_json(one)] for key, one in value.items()]}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy's
        return to_json(value.item())
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is no plain data")


def from_json(value: Any) -> Any:
    """Returns the value that was given to `to_json`."""
    if isinstance(value, list):
        return [from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (tag := next(iter(value))).startswith(_TAG):
        return {key: from_json(one) for key, one in value.items()}
    inner = value[tag]
    match tag.removeprefix(_TAG):
        case "tuple":
            return tuple(from_json(one) for one in inner)
        case "bytes":
            return b64decode(inner)
        case "dict":
            return {from_json(key): from_json(one) for key, one in inner}
        case "tensor":
            name, shape, text = inner
            flat = torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8) if text else torch.empty(0)
            dtype: torch.dtype = getattr(torch, name)
            return flat.view(dtype).reshape(shape) if text else torch.empty(shape, dtype=dtype)
    raise ValueError(f"a value is marked {tag!r}, which this version does not know")
