"""Finds token ids beyond the vocabulary on the host, batch by batch, before a device kernel reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from sley_core.data.dataset import DataInfo, Field
from sley_core.errors import RunError


def check_tokens(batch: Mapping[str, Tensor], info: DataInfo, samples: Sequence[int] | None = None) -> None:
    """Raises RunError "token-out-of-range" for a value that is not a token id; costs one pass over those fields.

    Tokens must lie in [0, vocab_size); negative labels are ignored by the loss and allowed. Fields whose `ids` is None,
    missing fields, and data without a vocabulary are not checked.
    samples: names of the rows for the error (`Feed.samples`); by default their numbers in the batch.
    """
    if info.vocab_size is None:
        return
    for name, field in info.fields.items():
        if field.ids is None or name not in batch or not batch[name].numel():
            continue
        value = batch[name]
        low, high = value.aminmax()
        if high >= info.vocab_size or (low < 0 and field.ids == "token"):
            raise _error(name, value, field, info.vocab_size, samples)


def _error(name: str, value: Tensor, field: Field, vocab_size: int, samples: Sequence[int] | None) -> RunError:
    """Returns the error for the first bad id in `value`, with its sample and position."""
    wrong = value >= vocab_size
    if field.ids == "token":
        wrong |= value < 0
    place = wrong.nonzero()[0].tolist()
    found = int(value[tuple(place)])
    row = place.pop(field.batch_dim)
    where = f"row {row} of the batch" if samples is None else f"sample {samples[row]}"
    position = f" at position {place[0] if len(place) == 1 else tuple(place)}" if place else ""
    return RunError(
        "token-out-of-range",
        f"field `{name}` has the token id {found} in {where}{position}; the vocabulary has {vocab_size}",
        hint="the data was made with another tokenizer, or `vocab_size` or `dtype` of `[data]` is wrong",
    )
