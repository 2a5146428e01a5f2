"""The records and plan tables of `data.text`, `data.chat`, `data.tokens` and `data.mixture`. Imports no torch."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field as Limits
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from sley_core.api.plan import Array, DataConfig, PartTable, PlanPath, PlanPattern, ValueDescription
from sley_core.hookspecs import hookimpl
from sley_core.records import DatasetRecord

DocumentMode = Literal["pack", "cut", "pad"]
"""The values of `documents`: ways to make samples of equal length from documents.

pack: concatenates documents, and marks boundaries with `cu_seqlens`, with positions that restart at 0, and with ignored labels.
cut: concatenates documents into one long text without boundaries.
pad: starts a new sample with each document, and pads the document's last sample with ignored labels.
"""

BYTE_VOCAB_SIZE = 256
"""The vocabulary size of text without a tokenizer, whose tokens are bytes."""

TOKEN_BYTES = {"uint16": 2, "uint32": 4}
"""The size of a token in bytes, by the dtype of the token file."""


class DocumentsConfig(DataConfig):
    """The keys that `data.text` and `data.chat` share. The documents of these tables are texts or conversations."""

    sequence: PositiveInt
    """The number of tokens per sample."""

    field: Annotated[str, Limits(min_length=1)] | None = None
    """The key or column with the text or the messages of a row. `data.text` needs this key for files with rows: JSON lines, a
    JSON array, Parquet or Arrow. `data.chat` needs it if rows have neither `messages`, nor `conversations`, nor `prompt` and
    `completion`.
    """

    held_out_files: Array[PlanPattern] = ()
    """Files for evaluation, instead of a share of `files`. A document that is also in `files` is excluded from training."""

    held_out: Annotated[float, Limits(ge=0, lt=1)] = Limits(
        default_factory=lambda values: 0.0 if values.get("held_out_files") else 0.02
    )
    """The share of documents that are never used for training, with or without `[evaluation]`. A document's content decides
    whether it is held out, so all copies of a document are in the same split. Default: 0.02, or 0 with `held_out_files`.
    """

    cache: Literal["auto", "none"] | PlanPath = "auto"
    """The folder in which tokens are cached, so that each host tokenizes the files only once. "auto" is `sley/data` in
    `$XDG_CACHE_HOME` or `~/.cache`; "none" disables the cache. The cache is not used if the files have less than 8 MiB in
    total, or less than 128 MiB without a tokenizer.
    """

    _sibling_tables: tuple[Any, ...] = PrivateAttr(())

    def with_siblings(self, tables: Iterable[DataConfig]) -> Self:
        """Returns a copy whose training split also excludes the held-out documents of all `tables` of the same type."""
        copy = self.model_copy()
        copy._sibling_tables = tuple(table for table in tables if type(table) is type(self))
        return copy

    @property
    def all_tables(self) -> tuple[Self, ...]:
        """This table, and the tables of the same type from the other sources of the mixture."""
        return (self, *self._sibling_tables)

    @property
    def max_held_out(self) -> float:
        """The share of documents that are training data of none of `all_tables`: their largest `held_out`."""
        return max(table.held_out for table in self.all_tables)

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        if self.held_out and self.held_out_files:
            raise ValueError("set only one of `held_out` and `held_out_files`")
        return self


class TextConfig(DocumentsConfig):
    """Text files. Tokens are bytes, or the ids of a tokenizer."""

    source: Literal["python-stdlib"] | None = None
    """A text that is available on every machine: the source files of Python's standard library."""

    files: Array[PlanPattern] = ()
    """Text files, as paths or patterns such as `corpus/**/*.txt`. A file that matches several patterns is read only once. Files
    in gzip, bzip2, xz and zstd (needs `sley-data[zstd]`) are decompressed. Files with names of the form
    `hf://datasets/OWNER/NAME/PATTERN` are downloaded once from the Hugging Face hub (needs `sley-data[hub]`).
    """

    documents: DocumentMode = "pack"
    """How documents become samples: "pack" keeps boundaries, "cut" ignores boundaries, and "pad" pads each document."""

    separator: Annotated[str, Limits(min_length=1)] | None = None
    """The text between the documents of a file; `\\n` also matches `\\r\\n`. Default: each file is one document."""

    tokenizer: PlanPath | None = None
    """A Hugging Face `tokenizer.json`, or its folder (needs `sley-data[tokenizers]`). Default: tokens are bytes."""

    end_of_document: Annotated[str, Limits(min_length=1)] | None = None
    """A token of the tokenizer that is appended to every document. Default: none."""

    @model_validator(mode="after")
    def _check_options(self) -> "TextConfig":
        if self.source is None and not self.files:
            raise ValueError("set `source` or `files`")
        if self.source is not None and self.files:
            raise ValueError("set only one of `source` and `files`")
        if self.field is not None and self.separator is not None:
            raise ValueError("set only one of `field` and `separator`; with `field` each row is a document")
        if self.field is not None and self.source is not None:
            raise ValueError("`field` selects a key of rows, but `source` has no rows; set `files` instead")
        if self.end_of_document is not None and self.tokenizer is None:
            raise ValueError("`end_of_document` needs a `tokenizer`, since bytes have no such token")
        return self


class ChatConfig(DocumentsConfig):
    """Conversations, rendered with a chat template and packed whole. By default, only the assistant's tokens have labels."""

    files: Array[PlanPattern]
    """Files with conversations, as paths or patterns: JSON lines, a JSON array, Parquet or Arrow, or a folder written by
    `save_to_disk` from `datasets`. A row has `messages`, ShareGPT's `conversations`, or `prompt` and `completion`.
    """

    tokenizer: PlanPath
    """The folder of a Hugging Face tokenizer, with its chat template (needs `sley-data[chat]`)."""

    template: PlanPath | None = None
    """A file with a Jinja chat template that replaces the tokenizer's template."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """The tokens that have labels: "assistant" selects all assistant turns, including their end-of-turn tokens, "last" only the
    last assistant turn, and "all" every token. In rows with `prompt` and `completion`, the prompt has labels only with "all".
    """

    too_long: Literal["drop", "cut", "refuse"] = "drop"
    """The treatment of a conversation that needs more than `sequence` positions: "drop" leaves it out, "cut" keeps its first
    tokens, and "refuse" raises an error. A note reports the number of dropped or cut conversations.
    """

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if not self.files:
            raise ValueError("`files` must not be empty")
        return self


class TokensConfig(DataConfig):
    """Memory-mapped token files: raw little-endian integers, such as nanoGPT's, or Megatron files with an index."""

    files: Array[PlanPattern]
    """Token files, as paths or patterns such as `train-*.bin`. The files form one stream, in this order. If an index has the
    name of the file and the suffix `.idx`, as for Megatron files, the index defines the dtype and the documents.
    """

    held_out_files: Array[PlanPattern] = ()
    """Token files for evaluation. Their tokens must not also be in `files`."""

    dtype: Literal["uint16", "uint32"] = "uint16"
    """The token dtype of files without an index."""

    vocab_size: PositiveInt
    """The size of the vocabulary. All token ids in the files must be smaller."""

    sequence: PositiveInt
    """The number of tokens per sample."""

    documents: DocumentMode = "cut"
    """How documents become samples: "cut" ignores boundaries, "pack" keeps them, and "pad" pads each document. "pack" and "pad"
    need `end_of_document` or an index.
    """

    end_of_document: NonNegativeInt | None = None
    """The token id at the end of every document, in files without an index."""

    @model_validator(mode="after")
    def _check_options(self) -> "TokensConfig":
        if not self.files:
            raise ValueError("`files` must not be empty")
        if self.end_of_document is not None and self.end_of_document >= self.vocab_size:
            raise ValueError(
                f"`end_of_document` must be less than `vocab_size` = {self.vocab_size}, but is {self.end_of_document}"
            )
        if self.vocab_size > 1 << 8 * TOKEN_BYTES[self.dtype]:
            raise ValueError(f"{self.dtype} is too narrow for a vocabulary of {self.vocab_size}")
        return self


class SourceTable(PartTable):
    """A source of a mixture: a dataset of any type, with its own keys."""

    record_type: ClassVar = DatasetRecord
    shared: ClassVar = ("sequence",)

    name: Annotated[
        str, Limits(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"), ValueDescription("letters, digits, `.`, `_` and `-`")
    ]
    """The name of the source, which is part of the metrics `loss/NAME` and `share/NAME`."""

    weight: PositiveFloat | None = None
    """The share of samples from this source, relative to the weights of the other sources. The weights need not add up to 1.
    Either all sources must set `weight`, or all must set `epochs`.
    """

    epochs: PositiveFloat | None = None
    """The number of passes over the source per epoch of the mixture; 0.5 reads half of the source. Replaces `weight`."""


class MixtureConfig(DataConfig):
    """A dataset of several sources. Each sample comes from one source. In any 1,000 consecutive samples, the share of each
    source differs from its share in the plan by less than 1 percentage point. The order of the samples depends only on the
    seed, and not on the layout, `global_size`, or the step at which a run resumes.
    """

    sequence: PositiveInt | None = None
    """The number of tokens per sample, for all sources."""

    exhausted: Literal["repeat", "end", "refuse"] = "repeat"
    """The behaviour when a source with a `weight` has no more samples: "repeat" repeats that source in another order, "end"
    starts a new epoch of all sources, and "refuse" raises an error, if possible before the first step.
    """

    sources: Annotated[Array[SourceTable], Limits(min_length=1)]
    """The sources. The samples of all sources must have the same fields and the same vocabulary. No source trains on a document
    that another source of its type holds out. The largest `held_out` of a type applies to all sources of this type.
    """

    @model_validator(mode="after")
    def _check_options(self) -> "MixtureConfig":
        duplicates = [name for name, count in Counter(source.name for source in self.sources).items() if count > 1]
        if duplicates:
            raise ValueError(f"two sources have the name `{duplicates[0]}`")
        for source in self.sources:
            if (source.weight is None) == (source.epochs is None):
                has = "neither `weight` nor `epochs`" if source.weight is None else "both `weight` and `epochs`"
                raise ValueError(f"the source `{source.name}` must set either `weight` or `epochs`, but sets {has}")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError("set `weight` for all sources, or `epochs` for all sources")
        if self.has_epochs and self.exhausted != "repeat":
            raise ValueError("`exhausted` has no effect with `epochs`, which repeats each source a fixed number of times")
        return self

    def include_held_out(self) -> "MixtureConfig":
        raise ValueError("a mixture cannot be evaluated on all samples; use a separate set for each source")

    @property
    def has_epochs(self) -> bool:
        """Whether the sources set `epochs` instead of `weight`."""
        return self.sources[0].epochs is not None

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer that the sources share, or None if no source names one."""
        return getattr(self._tokenizer_table, "tokenizer", None)

    @property
    def template(self) -> Path | None:
        """The file with the chat template of the first source that names a tokenizer, or None if this source sets no file."""
        return getattr(self._tokenizer_table, "template", None)

    @property
    def _tokenizer_table(self) -> object:  # the table of the first source that names a tokenizer, or None
        tables = (source.component.config for source in self.sources)
        return next((table for table in tables if getattr(table, "tokenizer", None) is not None), None)


@hookimpl
def sley_records() -> list[DatasetRecord]:
    return [
        DatasetRecord(
            name="text",
            config=TextConfig,
            build="sley_data.datasets:TokenDataset",
            check="sley_data.datasets:check_token_dataset",
            text_ids="sley_data.tokenizer:load_text_ids",
            describe_overlap="sley_data.documents:describe_overlap",
        ),
        DatasetRecord(
            name="chat",
            config=ChatConfig,
            build="sley_data.chat:ChatDataset",
            check="sley_data.chat:check_chat",
            text_ids="sley_data.chat_template:load_text_ids",
            describe_overlap="sley_data.documents:describe_overlap",
        ),
        DatasetRecord(
            name="tokens",
            config=TokensConfig,
            build="sley_data.datasets:TokenDataset",
            check="sley_data.datasets:check_token_dataset",
        ),
        DatasetRecord(
            name="mixture",
            config=MixtureConfig,
            build="sley_data.mixture:Mixture",
            check="sley_data.sources:check_mixture",
            text_ids="sley_data.sources:load_text_ids",
            describe_overlap="sley_data.sources:describe_overlap",
        ),
    ]
