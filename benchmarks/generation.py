"""`train-cli sample` beside transformers' `generate`: the same model, greedy; seconds of a text, and of its first token.

    python benchmarks/generation.py

The model is a Llama of 36 million random parameters in fp32, the prompt has 64 tokens.
"""

import tempfile
from pathlib import Path

import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from protocol import arguments, compare, interleave, noise_of, report
from sley_hf.generate import Generator

NEW_TOKENS = 128


def main() -> None:
    options = arguments(__doc__ or "", 10)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16_384,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        bos_token_id=None,
        eos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        generator = Generator(Path(folder))
        plain = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.randint(0, config.vocab_size, (1, 64))

    def sample(tokens: int) -> list[int | None]:
        new = generator.generate([ids[0].tolist()], tokens=tokens, temperature=0.0, top_k=None, seed=0)
        return [row[0] for row in new]

    def generate(tokens: int) -> list[int]:
        output = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0
        )
        new: list[int] = output[0, ids.shape[1] :].tolist()
        return new

    assert sample(NEW_TOKENS) == generate(NEW_TOKENS), "greedy texts differ"
    for tokens, title in ((NEW_TOKENS, f"{NEW_TOKENS} new tokens"), (1, "the first token")):
        contestants = {
            "generate": lambda tokens=tokens: generate(tokens),
            "generate again": lambda tokens=tokens: generate(tokens),
            "sample": lambda tokens=tokens: sample(tokens),
        }
        rows = compare(interleave(contestants, options.rounds, warmup=1), "generate")
        facts = {"noise": round(noise_of(rows, "generate again"), 3)}
        facts |= {f"tokens/s, {row.name}": round(1e3 * tokens / row.milliseconds, 1) for row in rows}
        report(title, rows, facts, options.json)


if __name__ == "__main__":
    main()
