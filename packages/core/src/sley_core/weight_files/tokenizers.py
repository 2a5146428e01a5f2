"""The files of a tokenizer, beside a model's. Imports no torch."""

from __future__ import annotations

import json

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""What `save_pretrained` of a tokenizer writes, by the kind of tokenizer."""


RANDOM_SETTINGS = ("dropout", "alpha", "nbest_size")
"""Settings of BPE and Unigram with which a text becomes other tokens each time."""


def without_settings(text: str) -> str:
    """Returns the text of a `tokenizer.json` with the settings switched off that are off in training; else as it is."""
    try:
        content = json.loads(text)
        off = {key: None for key in ("truncation", "padding") if content.get(key) is not None}
        drawn = {key: None for key in RANDOM_SETTINGS if content["model"].get(key) is not None}
    except (ValueError, AttributeError, KeyError, TypeError):
        return text  # another version's, or no tokenizer: whoever loads it says so
    if not off and not drawn:
        return text
    return json.dumps({**content, **off, "model": {**content["model"], **drawn}}, ensure_ascii=False, indent=2)
