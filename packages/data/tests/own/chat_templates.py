"""Chat templates in the documented formats of public models, and a small tokenizer with their special tokens.

`{A}...{/A}` marks the assistant's turns: it becomes a `{% generation %}` block or nothing.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
_CHATML = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{A}{{ m.content }}"
    + _CALLS
    + "<|im_end|>{/A}{{ '\\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEMPLATES = {
    "chatml": _CHATML,
    # Keeps reasoning only after the last question, and writes empty reasoning there.
    "qwen3": (
        "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{A}"
        "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
        + _CALLS
        + "<|im_end|>{/A}{{ '\\n' }}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n" + _TOOLS + "<|eot_id|>{% endif %}"
        "{% for m in messages %}<|start_header_id|>{{ m.role | replace('tool', 'ipython') }}<|end_header_id|>\n\n"
        "{% if m.role == 'assistant' %}{A}{{ m.content | trim }}"
        + _CALLS
        + "<|eot_id|>{/A}{% else %}{{ m.content | trim }}<|eot_id|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "mistral-v3": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]"
        + _TOOLS
        + "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{A} {{ m.content }}"
        + _CALLS
        + "</s>{/A}{% else %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
    ),
    "gemma2": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}<start_of_turn>{{ m.role | replace('assistant', 'model') }}\n"
        "{% if m.role == 'assistant' %}{A}{{ m.content | trim }}<end_of_turn>{/A}{{ '\\n' }}"
        "{% else %}{{ m.content | trim }}<end_of_turn>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}"
        "<|Assistant|>{A}{{ m.content.split('</think>')[-1] }}"
        + _CALLS
        + "<|end|>{/A}{% elif m.role == 'tool' %}<|tool|>{{ m.content }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
    ),
}

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "<|User|>", "<|Assistant|>", "<|tool|>", "<|end|>",
]  # fmt: skip
_END = {"llama3": "<|eot_id|>", "mistral-v3": "</s>", "gemma2": "<end_of_turn>", "deepseek": "<|end|>"}


def end_of_turn(name: str) -> str:
    """Returns the token with which the template `name` ends a turn of the assistant."""
    return _END.get(name, "<|im_end|>")


def template_of(name: str, *, blocks: bool) -> str:
    """Returns a template. blocks: whether `{% generation %}` blocks surround the assistant's turns."""
    start, stop = ("{% generation %}", "{% endgeneration %}") if blocks else ("", "")
    return TEMPLATES[name].replace("{A}", start).replace("{/A}", stop)


def save_tokenizer(folder: Path, template: str | dict[str, str] | None) -> Path:
    """Writes a byte-level tokenizer of about 600 tokens, with merges across spaces and line ends. Returns its folder."""
    from transformers import PreTrainedTokenizerFast  # seconds, which every process that collects tests would need

    text = ["what does it do?\n\nIt returns the  name of a file.\n", "user\nassistant\nsystem\n", "  two\n\n\nlines  "] * 4
    implementation = Tokenizer(models.BPE())
    implementation.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    implementation.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    implementation.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=implementation, bos_token="<s>", eos_token="</s>")
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
