r"""Writes chats.jsonl, questions about the standard library and answers from its docstrings, and a tokenizer for them.

    python make_chats.py                     # in this folder, some seconds
    train-cli data show plan.toml --sample 0
    train-cli run plan.toml                  # about two minutes on two cores
    train-cli chat runs/chat --temperature 0      # ask: What does math.hypot do?
    train-cli export runs/chat --format huggingface --out chat-model

It needs `pip install -e "packages/data[chat]" -e packages/hf`.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LEFT_OUT = {"antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "lib2to3"}


def answers() -> Iterator[tuple[str, str]]:
    """Yields the name of each function or class of a module of the library, and the first paragraph of its docstring."""
    names = {module.name for module in pkgutil.iter_modules()} | set(sys.builtin_module_names)
    for name in sorted(names & sys.stdlib_module_names - LEFT_OUT):
        if name.startswith("_"):
            continue
        try:
            module = import_module(name)
        except Exception:  # not for this system
            continue
        for inner, value in inspect.getmembers(module, lambda value: inspect.isclass(value) or inspect.isroutine(value)):
            text = inspect.getdoc(value) or ""
            if not inner.startswith("_") and getattr(value, "__module__", name) == name and text.strip():
                yield f"{name}.{inner}", text.strip().split("\n\n")[0]


if __name__ == "__main__":
    pairs = dict(answers())
    rows = [[("user", f"What does {name} do?"), ("assistant", text)] for name, text in pairs.items()]
    chats = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), "utf-8")
    tokenizer = ByteLevelBPETokenizer()
    texts = [text for row in rows for _, text in row]
    tokenizer.train_from_iterator(texts, vocab_size=2000, special_tokens=SPECIAL, show_progress=False)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token=SPECIAL[1], chat_template=TEMPLATE)
    whole.save_pretrained("tokenizer")
    print(f"chats.jsonl has {len(chats)} conversations, tokenizer {len(whole)} tokens")
