"""Writes chats.jsonl, questions about the standard library and answers from its docstrings, and a tokenizer for them.

The files are in the folder of this program, which needs `pip install -e "packages/data[chat]"`. README trains on the chats.
"""

import inspect
import json
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
MODULES = "calendar copy functools glob heapq itertools json math random shutil statistics string textwrap time"


def answers() -> Iterator[tuple[str, str]]:
    """Yields the name of each function and class of the modules, and the first paragraph of its docstring."""
    for module in map(import_module, MODULES.split()):
        for name, value in inspect.getmembers(module, lambda value: inspect.isclass(value) or inspect.isroutine(value)):
            text = (inspect.getdoc(value) or "").strip()
            if text and not name.startswith("_") and getattr(value, "__module__", module.__name__) == module.__name__:
                yield f"{module.__name__}.{name}", text.split("\n\n")[0]


if __name__ == "__main__":
    folder = Path(__file__).parent
    rows = [[("user", f"What does {name} do?"), ("assistant", text)] for name, text in answers()]
    chats = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), "utf-8")
    tokenizer = ByteLevelBPETokenizer()
    texts = [text for row in rows for _, text in row]
    tokenizer.train_from_iterator(texts, vocab_size=2000, special_tokens=SPECIAL, show_progress=False)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token=SPECIAL[1], chat_template=TEMPLATE)
    whole.save_pretrained(folder / "tokenizer")
    print(f"chats.jsonl has {len(chats)} conversations, tokenizer {len(whole)} tokens")
