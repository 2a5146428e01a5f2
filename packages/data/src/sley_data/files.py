"""Finds the files that a `[data]` table names, on this host or on the Hugging Face hub. Does not import torch.

Hub names have the form `hf://datasets/OWNER/NAME@REVISION/PATTERN`, where `@REVISION` is optional. Each host downloads the
files once, and records the folder of a complete download, so that later runs and other ranks do not contact the hub.
"""

import dataclasses
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from glob import escape
from hashlib import blake2b
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TypeAlias

from sley_core.api.data import Split
from sley_core.api.files import replace_atomically
from sley_core.errors import Diagnostic, KeyPath, PlanError, PluginError, SleyError, install_hint
from sley_core.records import Problem
from sley_data import formats
from sley_data.plugin import TOKEN_BYTES, DocumentsConfig, TextConfig, TokensConfig

_HUB_URL_PATTERN = re.compile(r"hf:/+datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<path>.+)")
"""Matches a hub name. `Path` shortens the two slashes after `hf:` to one."""

_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""The names of folders that `find_library_files` skips: installed packages, tests and bytecode."""

_JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})  # files whose lines are JSON values
_WILDCARDS = frozenset("*?[")  # the characters that make a path a pattern


@dataclass(frozen=True)
class DataFile:
    """A file of a dataset on this host. name: the path within the corpus, such as `sub/one.txt` for `corpus/**/*.txt`.
    num_bytes: the size on disk in bytes. index: the Megatron index of a token file, or None.
    """

    name: str
    path: Path
    num_bytes: int
    format: formats.Format = formats.PLAIN_FORMAT
    index: formats.MegatronIndex | None = dataclasses.field(default=None, compare=False)

    def dtype(self, config: TokensConfig) -> formats.TokenDtype:
        """Returns the dtype of the tokens in this token file. config: the table that names the file."""
        return config.dtype if self.index is None else self.index.dtype


def print_note(text: str) -> None:
    """Prints the line `data: TEXT` to stderr, on every rank that calls it."""
    print(f"data: {text}", file=sys.stderr, flush=True)


def find_cache_home() -> Path | None:
    """Returns the default folder of cached tokens and of records of downloads; None if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sley" / "data"
    except RuntimeError:
        return None


FilesAndProblems: TypeAlias = tuple[list[DataFile], list[Problem]]
"""The files that some paths and patterns name, and the problems with these paths and patterns."""


def build_plan_error(problems: Iterable[Problem]) -> PlanError:
    """Returns one PlanError with all `problems`."""
    error = PlanError.from_diagnostics(Diagnostic(p.code, p.message, path=p.path, hint=p.hint) for p in problems)
    assert isinstance(error, PlanError)
    return error


def find_files(patterns: Sequence[Path], key: KeyPath) -> FilesAndProblems:
    """Returns the files that `patterns` name, each once, and the problems with `patterns`, a list of paths and patterns at the
    plan key `key`. The files are in the order of `patterns`, and sorted within each pattern. Several links to one file count
    once, with the first name. Empty files that match a pattern are skipped. Problems are: a path that is missing, empty or not
    a regular file, a pattern without a match, and a file without read permission.
    """
    files: dict[str, DataFile] = {}
    problems: list[Problem] = []
    for number, pattern in enumerate(patterns):
        try:
            for file in _match_files(str(pattern)):
                if not os.access(file.path, os.R_OK):
                    raise PlanError("data-missing", f"`{file.path}` is not readable", hint="change its permissions")
                files.setdefault(os.path.realpath(file.path), file)
        except SleyError as error:
            problems += [Problem((*key, number), d.message, d.hint, d.code) for d in error.diagnostics]
        except (OSError, ValueError) as error:
            message = f"`{_unescape(str(pattern))}` cannot be read: {error}"
            problems.append(Problem((*key, number), message, None, "data-missing"))
    return list(files.values()), problems


_ESCAPED = re.compile(r"\[([*?\[])\]")  # matches a wildcard in brackets, which stands only for itself


def _unescape(pattern: str) -> str:
    return _ESCAPED.sub(r"\1", pattern)


def _has_wildcard(pattern: str) -> bool:
    return not _WILDCARDS.isdisjoint(_ESCAPED.sub("", pattern))


def _match_files(pattern: str) -> Iterator[DataFile]:
    """Yields the files that a path or pattern names, sorted for a pattern. Raises PlanError if none has content."""
    if pattern.startswith("hf:/"):
        pattern = download_files(pattern)
    path = Path(_unescape(pattern))
    if not _has_wildcard(pattern) or path.exists():
        yield from _list_saved_dataset(path) if (path / _STATE_NAME).is_file() else [_stat_file(path)]
        return
    parts = Path(pattern).parts
    num_plain = next(number for number, part in enumerate(parts) if _has_wildcard(part))
    root = Path(_unescape(str(Path(*parts[:num_plain]))))
    matches = sorted(_match_paths(root, parts[num_plain:])) if root.is_dir() else []
    stats = ((match, match.stat()) for match in matches)
    sizes = {match: stat.st_size for match, stat in stats if S_ISREG(stat.st_mode)}
    if not sizes:
        hint = "use `**` for folders of any depth, `*` for a part of a name, and `[[]` for a bracket in a name"
        hint = hint if root.exists() else f"the folder `{root}` does not exist"
        raise PlanError("data-missing", f"`{path}` matches no file", hint=hint)
    if not any(sizes.values()):
        raise PlanError("data-empty", f"every file that `{path}` matches is empty")
    yield from (DataFile(match.relative_to(root).as_posix(), match, size) for match, size in sizes.items() if size)


def _match_paths(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yields the files in `folder` whose relative paths match `patterns`, the parts of a pattern. Follows links, but visits
    each real folder only once. As in a shell, `*` and `**` skip names that begin with a dot. Raises OSError for a folder that
    cannot be listed.
    """
    visited: set[str] = set()
    for path, folders, names in os.walk(folder, onerror=_raise_error, followlinks=True):
        real_path = os.path.realpath(path)
        parts = Path(path).relative_to(folder).parts
        is_deep = "**" not in patterns and len(parts) + 1 == len(patterns)
        folders[:] = [] if real_path in visited or is_deep else sorted(name for name in folders if name[0] != ".")
        if real_path not in visited:
            yield from (Path(path, name) for name in names if name[0] != "." and matches_pattern((*parts, name), patterns))
        visited.add(real_path)


def _raise_error(error: OSError) -> None:
    raise error


def matches_pattern(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Returns whether the parts of a path match the parts of a pattern. The part `**` matches any number of folders."""
    if not patterns or not parts:
        return not patterns and not parts
    if patterns[0] == "**":
        return any(matches_pattern(parts[start:], patterns[1:] or ["*"]) for start in range(len(parts)))
    return fnmatchcase(parts[0], patterns[0]) and matches_pattern(parts[1:], patterns[1:])


_STATE_NAME = "state.json"  # the file in a folder of `save_to_disk` that names the data files


def _list_saved_dataset(folder: Path) -> list[DataFile]:
    """Returns the data files in a folder that `save_to_disk` from `datasets` has written. Raises PlanError."""
    try:
        state = json.loads((folder / _STATE_NAME).read_text("utf-8"))
        names = [data_file["filename"] for data_file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        message = f"`{folder / _STATE_NAME}` does not name the files of the dataset: {error!r}"
        raise PlanError("data-missing", message) from None
    return [replace(_stat_file(folder / name), name=f"{folder.name}/{name}") for name in names]


def _stat_file(path: Path) -> DataFile:
    """Returns the file at a path without wildcards. Raises PlanError if it is missing, empty or not a regular file."""
    if not path.exists():
        hint = "a relative path starts at the plan's folder"
        raise PlanError("data-missing", f"the file `{path}` does not exist", hint=hint)
    stat = path.stat()
    if S_ISDIR(stat.st_mode):
        content = "splits" if (path / "dataset_dict.json").is_file() else "files"
        raise PlanError("data-missing", f"`{path}` is a folder", hint=f"name its {content}: `{path.name}/*`")
    if not S_ISREG(stat.st_mode):
        raise PlanError("data-missing", f"`{path}` is not a regular file")
    if not stat.st_size:
        raise PlanError("data-empty", f"`{path}` is empty")
    return DataFile(path.name, path, stat.st_size)


def download_files(name: str) -> str:
    """Downloads the files with the hub name `name`, unless they are cached, and returns a pattern that matches the local files.
    Raises PlanError "data-hub" if the name is malformed or the download fails, and PluginError "hub-missing" if the package
    `huggingface_hub` is not installed.
    """
    match = _HUB_URL_PATTERN.fullmatch(name)
    if match is None:
        raise PlanError("data-hub", f"a hub name must have the form hf://datasets/OWNER/NAME/PATTERN, but is `{name}`")
    folder = find_cache_home()
    record = folder and folder / "hub" / f"{blake2b(name.encode(), digest_size=16).hexdigest()}.json"
    try:
        snapshot = Path(json.loads(record.read_text("utf-8"))["folder"]) if record else None
    except (OSError, ValueError, KeyError, TypeError):
        snapshot = None
    if snapshot is None or not snapshot.is_dir():
        snapshot = _download_snapshot(match["repo"], match["revision"], match["path"])
        if record:
            record.parent.mkdir(parents=True, exist_ok=True)
            with replace_atomically(record) as file:
                file.write(json.dumps({"folder": str(snapshot)}).encode())
    return f"{escape(str(snapshot))}/{match['path']}"


def _download_snapshot(repo: str, revision: str | None, pattern: str) -> Path:
    """Downloads the files of a dataset that match `pattern`; returns the folder that contains them in the hub's cache. Raises
    the errors of `download_files`.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError:
        message = "`hf://` needs the package `huggingface_hub`, which is not installed"
        raise PluginError("hub-missing", message, hint=install_hint("data", "hub")) from None
    try:
        info = HfApi().dataset_info(repo, revision=revision)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        matches = [name for name in names if matches_pattern(name.split("/"), pattern.split("/"))]
        print_note(f"downloading {len(matches)} files of `{repo}`, revision {info.sha}")
        paths = [hf_hub_download(repo, name, repo_type="dataset", revision=info.sha) for name in matches]
    except Exception as error:  # huggingface_hub also raises the errors of its HTTP library
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        hint = "use `hf auth login` for a private dataset; without a network, copy the files to this host and use their paths"
        raise PlanError("data-hub", f"the dataset `{repo}` cannot be downloaded: {reason}", hint=hint) from None
    if not paths:
        hint = f"the dataset contains, for example, {', '.join(names[:5])}"
        raise PlanError("data-hub", f"no file of the dataset `{repo}` matches `{pattern}`", hint=hint)
    return Path(paths[0]).parents[matches[0].count("/")]


def find_library_files() -> FilesAndProblems:
    """Returns the source files of Python's standard library without its tests, sorted by name; or a problem if it has none."""
    root = sysconfig.get_path("stdlib")
    if files := _walk_library(root):
        return [*files], []
    message = f"Python has no source files of its library in `{root}`"
    return [], [Problem(("data", "source"), message, "set `files` instead", "data-missing")]


@cache
def _walk_library(root: str) -> tuple[DataFile, ...]:
    """Returns the non-empty Python files below `root`, sorted by name, without `_EXCLUDED_FOLDERS`."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS]
        prefix = Path(folder, "_").relative_to(root).as_posix()[:-1]
        paths = [(name, Path(folder, name)) for name in names if name.endswith(".py")]
        files += [DataFile(prefix + name, path, path.stat().st_size) for name, path in paths]
    return tuple(sorted((file for file in files if file.num_bytes), key=lambda file: file.name))


def find_document_files(config: DocumentsConfig, split: Split) -> FilesAndProblems:
    """Returns the files of a split of a `data.text` or `data.chat` table, and the problems with them. Without `held_out_files`,
    both splits are in the same files, so the result does not depend on `split`.
    """
    key = "held_out_files" if split == "held_out" and config.held_out_files else "files"
    if isinstance(config, TextConfig) and config.source is not None and key == "files":
        return find_library_files()
    files, problems = find_files(getattr(config, key), ("data", key))
    has_rows = not isinstance(config, TextConfig) or config.field is not None
    json_files = [file for file in files if _find_content_suffix(file.path) in _JSON_LINES_SUFFIXES]
    if json_files and isinstance(config, TextConfig) and config.field is None and config.separator is None:
        message = (
            f"`{json_files[0].path}` contains JSON lines, so the run would also train on braces, keys and escape sequences"
        )
        hint = 'set the key of the text, for example `field = "text"`; or set `separator = "\\n"` to train on the JSON itself'
        problems.append(Problem(("data", key), message, hint, "data-json"))
    files = [replace(file, format=formats.detect_format(file.path)) for file in files]
    return files, [*problems, *_find_format_problems(files, ("data", key), allows_tables=has_rows)]


def find_split_files(config: DocumentsConfig, split: Split) -> tuple[list[DataFile], list[DataFile]]:
    """Returns the files of a split, and the files whose documents the split excludes. Raises PlanError with all problems."""
    results = [find_document_files(config, split)]
    if split == "train":
        results += [find_document_files(table, "held_out") for table in config.all_tables if table.held_out_files]
    if problems := [problem for _, table_problems in results for problem in table_problems]:
        raise build_plan_error(problems)
    return results[0][0], [file for files, _ in results[1:] for file in files]


def _find_content_suffix(path: Path) -> str:
    """Returns the suffix of the decompressed file at `path` in lower case: `.jsonl` for `a.jsonl` and `a.jsonl.gz`."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix in formats.COMPRESSED_SUFFIXES else suffix


def _find_format_problems(files: Sequence[DataFile], key: KeyPath, *, allows_tables: bool = False) -> Iterator[Problem]:
    """Yields a problem for each file in an unsupported format. allows_tables: whether Parquet and Arrow are supported."""
    for file in files:
        if file.format.unsupported is not None and not (allows_tables and file.format.is_table):
            description, hint = file.format.unsupported
            yield Problem(key, f"`{file.path}` is {description}", hint, "data-format")


def find_token_files(config: TokensConfig, split: Split) -> FilesAndProblems:
    """Returns the files of a split of a `data.tokens` table with their indices, and the problems, such as a wrong dtype."""
    key, patterns = ("files", config.files) if split == "train" else ("held_out_files", config.held_out_files)
    files, problems = find_files(patterns, ("data", key))
    try:
        files = list({os.path.realpath(file.path): file for file in map(_add_index, files)}.values())
    except PlanError as error:
        return files, [*problems, *(Problem(("data", key), d.message, d.hint, d.code) for d in error.diagnostics)]
    files = [replace(file, format=formats.detect_format(file.path)) for file in files]
    compressed = formats.Format(unsupported=("compressed", "unpack it, since token files are memory-mapped"))
    files = [replace(file, format=compressed) if file.format.is_compressed else file for file in files]
    problems += _find_format_problems(files, ("data", key))
    for file in [] if problems else files:
        dtype = file.dtype(config)
        if file.num_bytes % TOKEN_BYTES[dtype]:
            message = f"`{file.path}` must contain whole {dtype} tokens, but has {file.num_bytes} bytes"
            problems.append(Problem(("data", key), message, "set the `dtype` of the file", "data-size"))
        elif reason_and_hint := formats.check_token_ids(file.path, dtype, config.vocab_size):
            reason, hint = reason_and_hint
            problems.append(Problem(("data", key), f"`{file.path}` {reason}", hint, "data-format"))
        elif file.index is None and config.documents != "cut" and config.end_of_document is None:
            message = f'`documents = "{config.documents}"` needs `end_of_document`, since `{file.path}` has no index'
            problems.append(Problem(("data", "end_of_document"), message, None, "data-documents"))
    return files, problems


def _add_index(file: DataFile) -> DataFile:
    """Returns a token file, with its index if an index exists. file: the token file, or its index. Raises PlanError if
    the index cannot be read or is wrong, or if the token file is missing.
    """
    index, tokens = file.path.with_suffix(".idx"), file
    try:
        with file.path.open("rb") as content:
            if content.read(len(formats.MEGATRON_MAGIC)) == formats.MEGATRON_MAGIC:
                index, tokens = file.path, _stat_file(file.path.with_suffix(".bin"))
        if not index.exists():
            return tokens
        return replace(tokens, index=formats.read_index(index, tokens.num_bytes))
    except ValueError as error:
        hint = f"rename it if it is not the index of `{tokens.path}`"
        raise PlanError("data-format", f"`{index}` {error}", hint=hint) from None
    except OSError as error:
        raise PlanError("data-missing", f"`{index}` cannot be read: {error}") from None
