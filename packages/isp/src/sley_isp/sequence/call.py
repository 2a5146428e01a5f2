"""One call of an attention on a rank, which can be repeated with other tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sley_core.errors import RunError, SleyError


@dataclass(frozen=True)
class AttentionCall:
    """Describes the call `attention(*tensors, *rest, **more)`, over full sequences of this rank's heads.

    tensors: q, k, v [b, s, h, d], or q and kv, or qkv. kv_heads: the number of key and value heads over all `num_ranks` ranks.
    """

    attention: Callable[..., Tensor]
    tensors: Sequence[Tensor]
    rest: Sequence[Any]
    more: Mapping[str, Any]
    kv_heads: int
    num_ranks: int

    def answer(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the attention's result for `tensors` in place of its own.

        Raises RunError "sequence-attention" if it fails, which most do because of the number of heads.
        """
        try:
            return self.attention(*tensors, *self.rest, **self.more)
        except (SleyError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the user's attention raises
            shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
            message = f"an attention over slices fails when it is asked for {shapes}: {type(error).__name__}: {error}"
            hint = (
                "each rank has some of the heads and whole sequences: take numbers of heads from `q` and `k`, and give masks "
                "of the whole sequence, from fields without a `sequence_dim`"
            )
            raise RunError("sequence-attention", message, hint=hint) from error
