"""A folder of chats with a tokenizer and a plan, and the reference of packed samples: their documents one by one."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from sley_core.data.dataset import IGNORE_INDEX
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.plugin import CrossEntropyConfig
from sley_testing.plain import PlainLoop, decay_groups

SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chats(folder: Path) -> None:
    """Writes conversations, a tokenizer of bytes, and a plan."""
    from transformers import PreTrainedTokenizerFast  # seconds, which every process that collects tests would need

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder / "tokenizer")
    random = Random(3)
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(120):
            turns = range(2 * random.randint(1, 2))
            content = ["".join(random.choices("abc de", k=random.randint(1, 12))) for _ in turns]
            messages = [{"role": ("user", "assistant")[turn % 2], "content": content[turn]} for turn in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    (folder / "plan.toml").write_text(
        '[run]\nname = "chat"\nsteps = 1\n[model]\nuse = "models.llama"\nnum_layers = 1\nhidden = 16\nheads = 2\n'
        '[data]\nuse = "data.chat"\nfiles = ["chats.jsonl"]\ntokenizer = "tokenizer"\nsequence = 160\nheld_out = 0.1\n'
        '[batch]\nglobal_size = 4\nmicro_size = 1\n[optimizer]\nuse = "core.adamw"\nlr = 1e-3\n',
        "utf-8",
    )


def documents(micro: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Returns the documents of a packed sample that have a label, each as a batch of its own."""
    micro_batches = []
    for start, stop in pairwise(micro["cu_seqlens"][0].tolist()):
        if (micro["labels"][0, start:stop] != IGNORE_INDEX).any():
            fields = {name: micro[name][:, start:stop] for name in ("tokens", "labels", "positions")}
            micro_batches.append(fields | {"cu_seqlens": torch.tensor([[0, stop - start]], dtype=torch.int32)})
    return micro_batches


def build_loss() -> CrossEntropy:
    """Returns the default loss. Plans may name this function as a factory."""
    return CrossEntropy(CrossEntropyConfig())


def loop_of(layers: Sequence[tuple[str, torch.nn.Module]]) -> PlainLoop:
    """Returns the plain loop of a small plan with `optimizer.eps = 1e-3`."""
    return PlainLoop(
        list(layers),
        build_loss(),
        optimizer=lambda named: torch.optim.AdamW(decay_groups(named, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-3),
        clip_norm=0.5,
    )
