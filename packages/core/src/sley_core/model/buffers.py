"""Checks that training does not write buffers: they would differ from rank to rank, and be written twice in recomputation.

A running mean, for example, is the mean of this rank's samples, and nothing reduces it. A model with such buffers declares them
(`Model(per_rank_buffers=("*.running_mean", ...))`), or does without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from sley_core.errors import Diagnostic, PlanError
from sley_core.model.layers import MODEL, Layer


class BufferWatch:
    """Remembers the values of layers' buffers; `written` names the buffers that have changed since.

    Keeps a copy of every buffer, so use it in the first steps and drop it. Tensor versions would be cheaper, but torch's own
    batch norm writes its running statistics without incrementing them.
    """

    def __init__(self, layers: Iterable[Layer], per_rank: Sequence[str] = ()) -> None:
        """per_rank: patterns of names (`Model.per_rank_buffers`) of buffers that may be written."""
        self._layers = list(layers)
        self._per_rank = tuple(per_rank)
        self.look()

    def look(self) -> None:
        """Takes the current values as the ones to compare with, for instance after loading buffers."""
        self._before = {name: buffer.clone() for name, _, buffer in self._buffers()}

    def written(self) -> list[str]:
        """Returns the qualified names of the changed buffers, in the order of the model; synchronises with the device."""
        return [name for name, _, buffer in self._buffers() if self._is_written(name, buffer)]

    def check(self) -> None:
        """Raises PlanError "model-buffer-written" with one diagnostic per buffer that was written."""
        found = [
            Diagnostic(
                "model-buffer-written",
                f"training writes the buffer {name!r} of a {type(module).__name__}, which no rank shares with another",
                path=MODEL,
                hint="use a module without running statistics (GroupNorm, LayerNorm), or declare the buffer: "
                f"Model(layers, per_rank_buffers=({name!r},))",
            )
            for name, module, buffer in self._buffers()
            if self._is_written(name, buffer)
        ]
        if found:
            raise PlanError.many(found)

    def _is_written(self, name: str, buffer: Tensor) -> bool:
        """Returns whether the buffer differs from its remembered value; False for one that may differ per rank."""
        if any(fnmatchcase(name, pattern) for pattern in self._per_rank):
            return False
        before = self._before.get(name)
        if before is None or before.shape != buffer.shape:
            return True
        same = (before == buffer) | (before != before)  # NaN stays NaN
        return not bool(same.all())

    def _buffers(self) -> Iterator[tuple[str, nn.Module, Tensor]]:
        """Yields qualified name, module and value of each buffer."""
        for layer in self._layers:
            for name, module in layer.module.named_modules(prefix=layer.name):
                for attribute, buffer in module.named_buffers(recurse=False):
                    yield f"{name}.{attribute}", module, buffer
