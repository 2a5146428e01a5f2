"""Writes the configs and the tokenizer of a run's model for Hugging Face transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.files import replace_atomically
from sley_core.hugging_face import CONFIG, GENERATION, IDS, end_token, start_folder
from sley_core.weight_files.read import TOKENIZER, deterministic_tokenizer_json

if TYPE_CHECKING:
    from sley_core.hugging_face import HuggingFaceModel
    from sley_core.plan.plan import Plan


def generation_config(plan: Plan, model: HuggingFaceModel) -> dict[str, Any]:
    """Returns the content of `generation_config.json`: that of the first weights, which also ends a text as the data do."""
    content: dict[str, Any] = {}
    folder = start_folder(plan)
    if folder is not None and (folder / GENERATION).is_file():
        content = json.loads((folder / GENERATION).read_text("utf-8"))
    content = {key: model.config[key] for key in IDS if model.config.get(key) is not None} | content
    ends: list[int] = []
    for value in (content.get("eos_token_id"), model.config.get("eos_token_id"), end_token(plan)):
        values = value if isinstance(value, list) else [value]
        ends += [token for token in values if token is not None and token not in ends]
    if ends:
        content["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return content


def tokenizer_files(plan: Plan) -> Iterator[tuple[Path, str]]:
    """Yields the files of the data's tokenizer with their names; those of the first weights if the data have no tokenizer."""
    data = plan.data.config
    tokenizer, template = getattr(data, "tokenizer", None), getattr(data, "template", None)
    if tokenizer is not None and tokenizer.is_file():
        yield tokenizer, TOKENIZER[0]
    folder = tokenizer or (None if hasattr(data, "tokenizer") else start_folder(plan))
    names = [name for name in TOKENIZER if template is None or not name.startswith("chat_template")]
    yield from ((folder / name, name) for name in names if folder is not None and (folder / name).is_file())
    if template is not None:
        yield template, "chat_template.jinja"


def write_other_files(plan: Plan, model: HuggingFaceModel, folder: Path) -> None:
    """Writes both configs, and copies the tokenizer, changed so that it makes the tokens of training."""
    contents = {CONFIG: dict(model.config), GENERATION: generation_config(plan, model)}
    for name, content in contents.items():
        if content:
            with replace_atomically(folder / name) as file:
                file.write(json.dumps(content, indent=2).encode() + b"\n")
    for source, name in tokenizer_files(plan):
        shutil.copyfile(source, folder / name)
    if (path := folder / TOKENIZER[0]).is_file():
        text = path.read_text("utf-8")
        if (changed := deterministic_tokenizer_json(text)) != text:
            with replace_atomically(path) as file:
                file.write(changed.encode())
