"""The tables of `data.text`, `data.chat`, `data.tokens` and `data.mixture`; options that exclude each other are an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field as Limits
from pydantic import PrivateAttr, model_validator

from sley_core.api.plan import Array, DataConfig, NonNegative, PartTable, PlanPath, PlanPattern, Positive, PositiveFloat, Words

Documents = Literal["pack", "cut", "pad"]
"""How documents become samples of equal length.

pack: documents lie end to end and keep their boundaries: `cu_seqlens`, positions that restart, no label across.
cut: documents lie end to end as one long text, boundaries forgotten.
pad: a document starts a sample of its own, the last of its samples is filled up with ignored labels.
"""

NUM_BYTES = 256
"""Token ids of text without a tokenizer."""

TOKEN_BYTES = {"uint16": 2, "uint32": 4}
"""Bytes of a token in a token file."""


def _share(chosen: dict[str, Any]) -> float:
    return 0.0 if chosen.get("held_out_files") else 0.02


class DocumentsConfig(DataConfig):
    """The table of a data set of documents, some of which are held out."""

    _others: tuple[Any, ...] = PrivateAttr(())

    def beside(self, others: Iterable[DataConfig]) -> Self:
        """Returns this table as that of a source of a mixture: what `others` of its kind hold out is not trained on either."""
        copy = self.model_copy()
        copy._others = tuple(other for other in others if type(other) is type(self))
        return copy

    @property
    def all_sources(self) -> tuple[Self, ...]:
        """This table, and those of a mixture's other sources of its kind."""
        return (self, *self._others)

    @property
    def largest_share(self) -> float:
        """The share of documents that no source trains on."""
        tables: tuple[Any, ...] = self.all_sources
        share: float = max(each.held_out for each in tables)
        return share


class TextConfig(DocumentsConfig):
    """Text files as tokens: bytes, or those of a tokenizer."""

    source: Literal["python-stdlib"] | None = None
    """Text that every machine has: the source files of the running Python's standard library."""

    files: Array[PlanPattern] = ()
    """Text files, as paths or patterns such as `corpus/**/*.txt`; a file matched twice is read once. Files of gzip, bzip2, xz
    and zstd are decompressed. `hf://datasets/OWNER/NAME/PATTERN` names files on a hub, downloaded once (`sley-data[hub]`).
    """

    sequence: Positive
    """Tokens per sample."""

    documents: Documents = "pack"
    """How documents become samples: "pack" keeps their boundaries, "cut" forgets them, "pad" fills each up."""

    separator: Annotated[str, Limits(min_length=1)] | None = None
    """The text at which a file is split into documents; without it each file is one document. `\\n` matches `\\r\\n`, too."""

    field: Annotated[str, Limits(min_length=1)] | None = None
    """Set if files have rows, as JSON lines, a JSON array, Parquet or Arrow: the key, or column, of a document's text."""

    tokenizer: PlanPath | None = None
    """A Hugging Face `tokenizer.json`, or its folder (needs `sley-data[tokenizers]`); without it tokens are bytes."""

    end_of_document: Annotated[str, Limits(min_length=1)] | None = None
    """A token of the tokenizer to put after every document."""

    held_out_files: Array[PlanPattern] = ()
    """Text files to evaluate on, instead of a share of `files`; a document that is in both is not trained on."""

    held_out: Annotated[float, Limits(ge=0, lt=1)] = Limits(default_factory=_share)
    """The share of documents, chosen by their content, that are never trained on, with or without `[evaluation]`; left out,
    0.02, or nothing if there are `held_out_files`. Copies of a document are all on one side.
    """

    cache: Literal["auto", "none"] | PlanPath = "auto"
    """Where the tokens of a tokenizer are kept for the next start: a folder; "auto" is `sley/data` under `$XDG_CACHE_HOME` or
    `~/.cache`. They are made once on each host.
    """

    @model_validator(mode="after")
    def _possible(self) -> TextConfig:
        """Raises ValueError for options that exclude or need each other."""
        if self.source is None and not self.files:
            raise ValueError("one of `source` and `files` is needed")
        if self.source is not None and self.files:
            raise ValueError("`source` and `files` exclude each other")
        if self.held_out and self.held_out_files:
            raise ValueError("`held_out` and `held_out_files` exclude each other")
        if self.field is not None and self.separator is not None:
            raise ValueError("`field` and `separator` exclude each other: with `field` each row is a document")
        if self.field is not None and self.source is not None:
            raise ValueError("`field` is a key of rows, and `source` has none; name `files`")
        if self.end_of_document is not None and self.tokenizer is None:
            raise ValueError("`end_of_document` is a token of a tokenizer, and bytes have none; give `tokenizer` too")
        return self


class ChatConfig(DocumentsConfig):
    """Conversations as tokens, by the chat template of a tokenizer; the loss is that of what the assistant says."""

    files: Array[PlanPattern]
    """Files of conversations, as paths or patterns: JSON lines, JSON, Parquet or Arrow, or a folder that `save_to_disk` of
    `datasets` has written. A row has `messages`, or ShareGPT's `conversations`, or `prompt` and `completion`.
    """

    tokenizer: PlanPath
    """The folder of a Hugging Face tokenizer, with its chat template (needs `sley-data[chat]`)."""

    template: PlanPath | None = None
    """A file with a chat template in Jinja, in place of the tokenizer's."""

    field: Annotated[str, Limits(min_length=1)] | None = None
    """The key of a row's messages, if it is neither `messages` nor `conversations`."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What has labels: "assistant" all turns of the assistant, each with its end-of-turn token, "last" its last turn, "all"
    every token. Of `prompt` and `completion` only turns of the completion are trained on.
    """

    sequence: Positive
    """Tokens per sample; conversations are packed into samples, and none crosses from one into the next."""

    too_long: Literal["drop", "cut", "refuse"] = "drop"
    """What becomes of a conversation of more than `sequence` tokens; how many there are is said."""

    held_out_files: Array[PlanPattern] = ()
    """Files of conversations to evaluate on; a conversation that is in both is not trained on."""

    held_out: Annotated[float, Limits(ge=0, lt=1)] = Limits(default_factory=_share)
    """The share of conversations, chosen by their content, that are never trained on; left out, 0.02, or nothing if there
    are `held_out_files`.
    """

    cache: Literal["auto", "none"] | PlanPath = "auto"
    """Where the tokens are kept for the next start, as in `data.text`."""

    @model_validator(mode="after")
    def _possible(self) -> ChatConfig:
        """Raises ValueError for options that exclude each other."""
        if not self.files:
            raise ValueError("`files` names no file")
        if self.held_out and self.held_out_files:
            raise ValueError("`held_out` and `held_out_files` exclude each other")
        return self


class TokensConfig(DataConfig):
    """Token files, mapped and never copied: raw little-endian integers, as nanoGPT writes them, or Megatron's with an index."""

    files: Array[PlanPattern]
    """Token files, as paths or patterns such as `train-*.bin`; together they are one stream, in this order. A file beside which
    there is one of the same name with `.idx` is Megatron's, and its index counts for types and documents.
    """

    held_out_files: Array[PlanPattern] = ()
    """Token files to evaluate on; tokens that are in `files` too are refused."""

    dtype: Literal["uint16", "uint32"] = "uint16"
    """The type of the tokens in files without an index."""

    vocab_size: Positive
    """Token ids in the files are below this."""

    sequence: Positive
    """Tokens per sample."""

    documents: Documents = "cut"
    """How documents become samples: "cut" forgets their boundaries; "pack" and "pad" need `end_of_document`, or an index."""

    end_of_document: NonNegative | None = None
    """The token id that ends every document in files without an index."""

    @model_validator(mode="after")
    def _possible(self) -> TokensConfig:
        """Raises ValueError for options that exclude or need each other, or a vocabulary that `dtype` cannot hold."""
        if not self.files:
            raise ValueError("`files` names no file")
        if self.end_of_document is not None and self.end_of_document >= self.vocab_size:
            raise ValueError(f"`end_of_document` {self.end_of_document} is not below `vocab_size` {self.vocab_size}")
        if self.vocab_size > 1 << 8 * TOKEN_BYTES[self.dtype]:
            raise ValueError(f"{self.dtype} cannot hold every token of a vocabulary of {self.vocab_size}")
        return self


class SourceTable(PartTable):
    """One source of a mixture: a data set of any kind, with its own keys."""

    kind: ClassVar = "datasets"
    shared: ClassVar = ("sequence",)

    name: Annotated[str, Limits(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"), Words("letters, digits, `.`, `_` and `-`")]
    """Its name, in `metrics.jsonl` too: `loss/NAME`, `share/NAME`."""

    weight: PositiveFloat | None = None
    """Its share of the samples, relative to the weights of the others; they need not add up to 1."""

    epochs: PositiveFloat | None = None
    """How often it is seen in one epoch of the mixture, in place of `weight`; 0.5 is half of it."""


class MixtureConfig(DataConfig):
    """Several sources as one data set, each sample from one of them; any 1,000 samples have the shares of the plan, within 1 %.
    Which sample comes when depends on the seed alone: not on the layout, on `global_size`, or on where a run was resumed.
    """

    sequence: Positive | None = None
    """Tokens per sample, for all sources."""

    exhausted: Literal["repeat", "end", "refuse"] = "repeat"
    """What happens when a source with a `weight` has been seen once: "repeat" begins it again in another order, "end" ends the
    epoch, and all sources begin again, "refuse" is an error, if possible before the first step.
    """

    sources: Annotated[Array[SourceTable], Limits(min_length=1)]
    """The sources, `[[data.sources]]`; their samples must have the same fields and the same token ids. A document that one of
    them holds out is trained on in none, and the largest `held_out` share is that of all sources of the same kind.
    """

    @model_validator(mode="after")
    def _possible(self) -> MixtureConfig:
        """Raises ValueError for two sources of one name, and unless all have a weight, or all have epochs."""
        twice = [name for name, count in Counter(source.name for source in self.sources).items() if count > 1]
        if twice:
            raise ValueError(f"two sources have the name `{twice[0]}`")
        for source in self.sources:
            if (source.weight is None) == (source.epochs is None):
                has = "neither `weight` nor `epochs`" if source.weight is None else "both `weight` and `epochs`"
                raise ValueError(f"the source `{source.name}` has {has}; one is needed")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError("some sources have a `weight`, and some have `epochs`; write the same for all")
        if self.by_epochs and self.exhausted != "repeat":
            raise ValueError("with `epochs` every source is repeated as often as they say, so `exhausted` means nothing")
        return self

    def whole(self) -> MixtureConfig:
        """Raises ValueError: sources hold out together, and none of them alone can be taken whole."""
        raise ValueError("a mixture has no table of all samples; make each source a set of its own")

    @property
    def by_epochs(self) -> bool:
        return self.sources[0].epochs is not None

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer of the sources, which have the same token ids; None if no table names it."""
        known = (getattr(source.component.config, "tokenizer", None) for source in self.sources)
        return next((path for path in known if path is not None), None)
