"""Draws text from a model over tokens, one token at a time, and computes the whole window again for each."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from sley_core.data.config import NUM_BYTES, TextConfig
from sley_core.data.tokenizer import Tokenizer
from sley_core.errors import RunError, UsageError

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.run import Run


class TextIds(Protocol):
    """Converts text to token ids and back. size: ids are below it. end: the id after which a document ends. num_before: how
    many of the ids that `encode` returns come before the text.
    """

    size: int
    end: int | None
    num_before: int

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, as a document that begins with it has them."""
        ...

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields text as ids come; each character as soon as all of its ids are there."""
        ...


class Utf8(TextIds):
    """Takes the bytes of UTF-8 as token ids."""

    size = NUM_BYTES
    end = None
    num_before = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the text of token ids that are bytes of UTF-8, as far as each completes characters."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for one in ids:
            yield decoder.decode(bytes([one]))
        yield decoder.decode(b"", final=True)


class Tokenized(TextIds):
    """Takes the ids of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, end: int | None = None) -> None:
        """end: the id after which a document ends, if the tokenizer does not say it."""
        self._tokenizer = tokenizer
        self.size, self.end = tokenizer.vocab_size, tokenizer.end_of_document if end is None else end
        self.num_before = 0

    def encode(self, text: str) -> list[int]:
        ids, self.num_before = self._tokenizer.encode_prompt(text)
        return ids

    def decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the text that each token id adds, once its characters are complete."""
        so_far: list[int] = []
        told = ""
        for one in ids:
            so_far.append(one)
            text = self._tokenizer.decode(so_far)
            # Later tokens may complete a character; what was told before does not change.
            if text.startswith(told) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(told) :]
                told = text
        yield self._tokenizer.decode(so_far).removeprefix(told)


def text_ids(plan: Plan, tokenizer: Path | None) -> TextIds:
    """Returns the ids of the plan's text, or of `tokenizer`, if given. Raises UsageError "no-vocabulary" if it is not known.

    A document ends with the plan's `end_of_document`, or else with the `eos_token` of the `tokenizer_config.json` beside a
    given tokenizer.
    """
    config = plan.data.config
    if tokenizer is not None:
        end = getattr(config, "end_of_document", None) or _end_token(tokenizer)
        return Tokenized(
            Tokenizer(tokenizer, end if isinstance(end, str) else None), end if isinstance(end, int) else None
        )
    if not isinstance(config, TextConfig):
        hint = "give the one that made its token ids: `--tokenizer PATH`"
        raise UsageError("no-vocabulary", f"the data of this run, `{plan.data.name}`, has no tokenizer", hint=hint)
    return Utf8() if config.tokenizer is None else Tokenized(Tokenizer(config.tokenizer, config.end_of_document))


def _end_token(tokenizer: Path) -> str | None:
    """Returns the `eos_token` that transformers knows of a tokenizer, from the file beside it; None if there is none."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = found.get("content") if isinstance(found, dict) else found
    return token if isinstance(token, str) else None


def generate(
    run: Run, ids: Sequence[int], size: int, *, temperature: float, top_k: int | None, generator: torch.Generator
) -> Iterator[int]:
    """Yields ids that follow `ids`, without end; the model is given as many of the last ones as a sample of its data has.

    size: ids are below it. temperature: 0 takes the likeliest. top_k: draws from so many of the likeliest. Raises UsageError
    "sample-fields" and "no-logits" for a model that is not one over tokens, RunError "not-finite".
    """
    reads = _fields(run)
    window = run.dataset.info.sequence
    known = list(ids)
    for layer in run.layers:
        layer.module.eval()
    while True:
        logits = _logits(run, reads, known[-window:] if window else known, size)
        if not bool(logits.isfinite().all()):
            raise RunError(
                "not-finite", "the model gives logits that are not finite", hint="its weights may be damaged"
            )
        known.append(_drawn(logits, temperature, top_k, generator))
        yield known[-1]


def _drawn(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draws the next token id from `logits`: the largest if `temperature` is 0; with `top_k`, from the k largest only."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.where(logits >= logits.topk(top_k).values[-1], -torch.inf)
    # The largest first, so that no temperature overflows.
    weights = ((logits - logits.max()) / temperature).exp()
    return int(torch.multinomial(weights, 1, generator=generator))


def _fields(run: Run) -> dict[str, str]:
    """Returns for each batch field that the model reads what it holds: "tokens", or a name that follows from their number."""
    info = run.dataset.info
    ids = [name for name, field in info.fields.items() if field.ids == "token"]
    roles = dict.fromkeys(ids[:1], "tokens") | {name: name for name in ("positions", "cu_seqlens")}
    for layer in run.layers:
        for name in layer.fields:
            if name not in roles and not ids:
                message = f"layer `{layer.name}` reads `{name}`, and no field of the data is said to hold token ids"
                table = f'`{name} = {{dtype = "int64", sequence_dim = 1, ids = "token"}}`'
                hint = f"add them to [data.fields] of `plan.toml` in the run's folder, for example {table}"
                raise UsageError("sample-fields", message, hint=hint)
            if name not in roles:
                message = f"layer `{layer.name}` reads the field `{name}`, which does not follow from a prompt"
                hint = "`run.predict(batch)` in a program of your own takes such a batch: docs/python-api.md"
                raise UsageError("sample-fields", message, hint=hint)
    return {name: roles[name] for layer in run.layers for name in layer.fields}


@torch.no_grad()
def _logits(run: Run, reads: Mapping[str, str], ids: Sequence[int], size: int) -> Tensor:
    """Returns the logits of the next token for the ids below `size`: float64 [v], on the host."""
    values = {"tokens": [list(ids)], "positions": [list(range(len(ids)))], "cu_seqlens": [[0, len(ids)]]}
    declared = run.dataset.info.fields
    device = run.world.device.torch_device
    fields = {
        name: torch.tensor(values[role], dtype=getattr(torch, declared[name].dtype), device=device)
        for name, role in reads.items()
    }
    output: Any = None
    for at, layer in enumerate(run.layers):
        given = {name: fields[name] for name in layer.fields}
        output = layer.module(output, **given) if at else layer.module(**given)
    shape = (1, len(ids))
    if not isinstance(output, Tensor) or output.ndim != 3 or output.shape[:2] != shape or output.shape[2] < size:
        what = f"a tensor of {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        message = f"the model returns {what}, not logits [1, {len(ids)}, {size} or more]"
        raise UsageError("no-logits", message, hint="only a model that gives each next token a logit can be sampled")
    return output[0, -1, :size].double().cpu()
