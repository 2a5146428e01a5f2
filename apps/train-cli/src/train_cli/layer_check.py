"""Calls the layers and the loss on meta (`check --model`), to find mismatched shapes and types, and missing classes.

A run would find these in its first step. Layers that cannot run on meta (a forward that reads values, a kernel of one device)
are reported as not checked, which is no error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.config import CrossEntropyConfig
from sley_core.errors import PlanError, SleyError
from sley_core.model.buffers import is_per_rank, normalisers_written, refuse_written
from sley_core.model.layers import MODEL
from sley_core.model.tensors import formats_hint
from train_cli.on_meta import meta_micro_batch, meta_output, meta_state

if TYPE_CHECKING:
    from sley_core.data.dataset import AnyDataset, DataInfo
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan

_OF_A_DEVICE = re.compile(
    r"meta|device|cuda|\bgpu|\bcpu|triton|pointer|storage|numpy|data.dependent|not (been )?implemented"
    r"|mat_a|grouped|stateless api|jit",
    re.IGNORECASE,
)
"""Words of errors that the same call on tensors with values might not raise."""

_CERTAIN = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""Kinds of errors that shapes, types and arguments raise. An `assert` may have asked for a value, and says nothing."""

_CERTAIN_OF_LOSS = (RuntimeError, ValueError, IndexError)
"""A custom loss may lack an attribute that its `weight` or `attach` sets, and neither is called here."""


def check_layers(plan: Plan, model: Model, dataset: AnyDataset, dtype: torch.dtype) -> str | None:
    """Calls every layer, and the loss with the last one's output, on a micro-batch without values.

    model: on meta, not to be used again; its layers are called with parameters of `dtype`. Returns a note on what was
    not checked and why, or None. Raises PlanError "layer-fails" with the layer's name and its inputs,
    "model-buffer-written" for running statistics, "model-vocabulary" for a last layer with fewer classes than the data
    has labels, "loss-fails", and the loss's own errors.
    """
    try:
        fields = meta_micro_batch(plan, dataset)
    except Exception as error:  # a user's data, which may not even be here
        return f"no layer was called, for want of a sample: {_first_line(error)}"
    args: tuple[Any, ...] = ()
    written: list[tuple[str, nn.Module]] = []
    for layer in model.layers:
        lacking = [name for name in layer.fields if name not in fields]
        if lacking:
            return f"layers were called up to {_words(layer)}: the shape of `{lacking[0]}` is known to the data alone"
        try:
            state = meta_state(layer, dtype, plan.precision.keep)
            args = (meta_output(layer, args, fields, state),)
            written += [
                (name, module)
                for name, module in normalisers_written(layer, state)
                if not is_per_rank(name, model.per_rank_buffers)
            ]
        except SleyError:
            raise
        except Exception as error:
            given = ", ".join([*map(_shape, args), *(f"{name} {_shape(fields[name])}" for name in layer.fields)])
            if not _is_certain(error, _CERTAIN):
                refuse_written(written)
                return f"layers were called up to {_words(layer)}, which needs values or a device: {_first_line(error)}"
            message = f"{_words(layer)} fails, given {given or 'nothing'}: {_first_line(error)}"
            hint = "its first argument is what the layer before returns; `train-cli run --traceback` shows the way there"
            raise PlanError("layer-fails", message, path=MODEL, hint=formats_hint(error) or hint) from error
    refuse_written(written)
    _check_classes(plan, dataset.info, model.layers[-1], args[0])
    return _check_loss(plan, args[0], fields)


def _check_classes(plan: Plan, info: DataInfo, last: Layer, output: Any) -> None:
    """Raises PlanError "model-vocabulary" if the last layer has fewer classes than the data has labels."""
    config = plan.loss.config
    if not isinstance(config, CrossEntropyConfig) or not isinstance(output, Tensor) or not output.ndim:
        return
    field, count = info.fields.get(config.labels), info.vocab_size
    if field is None or field.ids != "label" or count is None or output.shape[-1] >= count:
        return
    raise PlanError(
        "model-vocabulary",
        f"{_words(last)}, the last one, gives {output.shape[-1]} classes, but the data's labels have {count}",
        path=MODEL,
        hint="a factory is told how many: `def layers(data)`, and `data.vocab_size`",
    )


def _check_loss(plan: Plan, output: Any, fields: Mapping[str, Tensor]) -> str | None:
    """Calls the loss on meta; returns a note if that was not possible. Raises PlanError "loss-fails"."""
    loss = plan.loss.build()
    try:
        with torch.device("meta"):
            loss.loss(output, fields)
    except SleyError as error:
        found = error.diagnostics[0]
        raise PlanError(found.code, found.message, path=found.path or ("loss",), hint=found.hint) from None
    except Exception as error:
        if hasattr(loss, "attach") or not _is_certain(error, _CERTAIN_OF_LOSS):
            return f"the loss was not looked at: {_first_line(error)}"
        message = f"the loss fails, given {_shape(output)}: {_first_line(error)}"
        raise PlanError("loss-fails", message, path=("loss",), hint="it is given what the last layer returns") from error
    return None


def _is_certain(error: Exception, kinds: tuple[type[Exception], ...]) -> bool:
    known = isinstance(error, kinds) and not isinstance(error, NotImplementedError)
    return known and not _OF_A_DEVICE.search(str(error))


def _words(layer: Layer) -> str:
    return f"layer `{layer.name}` ({type(layer.module).__name__})"


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(".: ")
