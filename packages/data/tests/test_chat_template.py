"""Compares the masks of public chat formats with a slow oracle that renders and tokenizes every prefix."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chat_templates import TEMPLATES, end_of_turn, save_tokenizer, template_of

from sley_core.errors import PlanError, PluginError
from sley_data.chat_template import ChatTemplate, EncodedSample
from sley_data.documents import Conversation
from sley_data.plugin import ChatConfig
from sley_data.tokenizer import PromptTokenizer, Tokenizer

PIECES = (
    "hello",
    " two  words",
    "\n",
    "\n\n",
    "",
    "ends in spaces  ",
    "schön 東京 🙂",
    "{{ braces }}",
    "  ",
    "<think>x</think>y",
    "a" * 40,
)
TOOL = {"type": "function", "function": {"name": "area", "parameters": {"type": "object"}}}


def drawn(name: str, random: Random) -> Conversation:
    """Draws a conversation: with a system message or not, tools, empty turns, unicode, turns that end in spaces."""
    messages: list[dict[str, Any]] = []
    if name != "gemma2" and random.random() < 0.4:
        messages.append({"role": "system", "content": random.choice(PIECES)})
    has_tools = name != "gemma2" and random.random() < 0.3
    for _ in range(random.randint(1, 4)):
        messages.append({"role": "user", "content": "".join(random.choices(PIECES, k=2))})
        if has_tools and random.random() < 0.5:
            call = {"type": "function", "function": {"name": "area", "arguments": {"r": random.randint(0, 9)}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": random.choice(PIECES)})
        if random.random() < 0.95 or len(messages) < 2:
            answer = {"role": "assistant", "content": "".join(random.choices(PIECES, k=random.randint(1, 3)))}
            messages.append(answer | ({"reasoning_content": "so"} if random.random() < 0.3 else {}))
    return Conversation("drawn", messages, [TOOL] if has_tools else None)


def asked(tokenizer: Any, conversation: Conversation, end: int) -> tuple[set[tuple[int, ...]], int]:
    """The oracle: every trained turn as (all tokens up to its end-of-turn token, of which so many come before it), and how many
    turns cannot be told from what comes before them.
    """
    turns, num_lost = set(), 0
    for number, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        texts = [
            tokenizer.apply_chat_template(list(each), tools=conversation.tools, tokenize=False, add_generation_prompt=prompt)
            for each, prompt in ((conversation.messages[:number], True), (conversation.messages[: number + 1], False))
        ]
        before, upto = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        if upto[: len(before)] != before or len(upto) == len(before):
            num_lost += 1
            continue
        stop = max(place for place, token in enumerate(upto) if token == end) + 1
        turns.add((len(before), *upto[:stop]))
    return turns, num_lost


def trained(samples: list[EncodedSample]) -> set[tuple[int, ...]]:
    return {(start, *sample.ids[:stop]) for sample in samples for start, stop in sample.label_ranges}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), None)


def table(folder: Path, **more: Any) -> ChatConfig:
    return ChatConfig.model_validate({"files": ["x.jsonl"], "tokenizer": str(folder), "sequence": 64, **more})


def template(folder: Path, tmp_path: Path, name: str, *, blocks: bool) -> ChatTemplate:
    file = tmp_path / f"{name}-{blocks}.jinja"
    file.write_text(template_of(name, blocks=blocks), "utf-8")
    return ChatTemplate(folder, file)


def label(
    chat: ChatTemplate, texts: Sequence[str], config: ChatConfig, first_trained: int = 0
) -> tuple[list[str], list[EncodedSample], str]:
    """Returns the trained texts of a conversation, its samples, and why turns are left out."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    ((_, samples, reason),) = chat.encode([Conversation("x", messages, None, first_trained)], config)
    return [chat.tokenizer.decode(one.ids[slice(*turn)]) for one in samples for turn in one.label_ranges], samples, reason


@pytest.mark.parametrize("count", [24, pytest.param(500, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_a_slow_oracle(folder: Path, tmp_path: Path, name: str, count: int) -> None:
    by_prefixes, by_blocks = (template(folder, tmp_path, name, blocks=blocks) for blocks in (False, True))
    end = by_prefixes.tokenizer.convert_tokens_to_ids(end_of_turn(name))
    assert by_prefixes.end_of_turn_id == end
    random = Random(name)
    conversations = [drawn(name, random) for _ in range(count)]
    outcomes = zip(
        by_prefixes.encode(conversations, table(folder)), by_blocks.encode(conversations, table(folder)), strict=True
    )
    num_compared = 0
    for conversation, ((_, samples, reason), (_, blocks, _)) in zip(conversations, outcomes, strict=True):
        turns, num_lost = asked(by_prefixes.tokenizer, conversation, end)
        assert trained(samples) == turns
        assert bool(reason) == bool(num_lost)
        (block,) = blocks
        is_whole = len(samples) == 1 and samples[0].ids == block.ids
        assert is_whole or num_lost or name == "qwen3", "no other template writes earlier turns anew"
        if is_whole and not num_lost:
            assert samples[0].label_ranges == block.label_ranges
            num_compared += 1
    assert num_compared >= count // 8


def test_turns_that_a_template_writes_anew_become_samples_of_their_own(folder: Path, tmp_path: Path) -> None:
    texts, samples, reason = label(template(folder, tmp_path, "qwen3", blocks=False), "abab", table(folder))
    assert (texts, len(samples), reason) == (["<think>\n\n</think>\n\nb<|im_end|>"] * 2, 2, "")


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("train_on", "first_trained", "texts"),
    [("assistant", 0, ["b<|im_end|>", "d<|im_end|>"]), ("last", 0, ["d<|im_end|>"]), ("assistant", 2, ["d<|im_end|>"])],
)
def test_what_is_trained_on(
    folder: Path, tmp_path: Path, blocks: bool, train_on: str, first_trained: int, texts: list[str]
) -> None:
    chatml = template(folder, tmp_path, "chatml", blocks=blocks)
    found, (sample,), _ = label(chatml, "abcd", table(folder, train_on=train_on), first_trained)
    assert found == texts
    _, (whole,), _ = label(chatml, "abcd", table(folder, train_on="all"), first_trained)
    assert (whole.ids, whole.label_ranges) == (sample.ids, [(0, len(sample.ids))])


def test_there_is_one_bos_and_no_dropout(tmp_path: Path) -> None:
    """Though the tokenizer adds `<s>` to every text by itself, as the template does, and draws its merges."""
    folder = save_tokenizer(tmp_path / "tokenizer", template_of("llama3", blocks=False))
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    content["model"]["dropout"] = 0.5
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    path.write_text(json.dumps(content), "utf-8")
    messages = [{"role": "user", "content": "what does it do?"}, {"role": "assistant", "content": "It returns the name"}]
    outcomes = [next(ChatTemplate(folder).encode([Conversation("x", messages)], table(folder))) for _ in range(3)]
    ids = [samples[0].ids for _, samples, _ in outcomes]
    assert ids[0] == ids[1] == ids[2]
    assert ids[0].count(0) == 1


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_the_last_turn_is_the_assistants_last_though_it_has_no_block(folder: Path, tmp_path: Path, name: str) -> None:
    text = template_of(name, blocks=True).replace("{% generation %}", "{% if m.content %}{% generation %}")
    text = text.replace("{% endgeneration %}", "{% endgeneration %}{% else %}" + end_of_turn(name) + "{% endif %}")
    (tmp_path / "some.jinja").write_text(text, "utf-8")
    texts, _, _ = label(ChatTemplate(folder, tmp_path / "some.jinja"), ["a", "b", "c", ""], table(folder, train_on="last"))
    assert texts == [end_of_turn(name)]


def test_a_token_across_the_border_of_a_block_is_not_trained_on(folder: Path, tmp_path: Path) -> None:
    chatml = template(folder, tmp_path, "chatml", blocks=True)
    texts, _, reason = label(chatml, ["a", "b", "c", "\nd"], table(folder))
    assert texts == ["b<|im_end|>"]
    assert "crosses the border" in reason


def test_a_block_takes_the_token_that_ends_its_turn(folder: Path, tmp_path: Path) -> None:
    """Though the template writes this token behind the block. A turn without the token keeps its block."""
    end = "{% endgeneration %}{% if m.content != 'd' %}<|im_end|>{% endif %}"
    text = template_of("chatml", blocks=True).replace("<|im_end|>{% endgeneration %}", end)
    (tmp_path / "short.jinja").write_text(text, "utf-8")
    assert label(ChatTemplate(folder, tmp_path / "short.jinja"), "abcd", table(folder))[0] == ["b<|im_end|>", "d"]


def test_a_template_writes_the_same_date_every_day(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "dated.jinja"
    text = "{{ strftime_now('%d %b %Y, %H') }}" + template_of("chatml", blocks=False)
    file.write_text(text, "utf-8")
    named = ChatTemplate(save_tokenizer(tmp_path / "named", {"default": text, "tool_use": text}))
    for dated in (ChatTemplate(folder, file), named):
        assert dated.render([{"role": "user", "content": "a"}], None).startswith("26 Jul 2024, 00")


def test_what_a_template_does_not_do_is_said(folder: Path, tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    texts = {
        "no special token": plain + "{% if add_generation_prompt %}assistant: {% endif %}",
        "no generation prompt": plain.replace("\n", "<|im_end|>"),
    }
    for words, text in texts.items():
        file = tmp_path / "some.jinja"
        file.write_text(text, "utf-8")
        (remark,) = ChatTemplate(folder, file).list_notes()
        assert words in remark
    headed = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    file.write_text(headed, "utf-8")
    assert ChatTemplate(folder, file).end_of_turn_id is None, "the token is before the answer"
    file.write_text("{{ raise_exception('no such role') }}", "utf-8")
    assert ChatTemplate(folder, file).list_notes() == [], "nothing is known"


def test_an_answer_at_the_start_has_labels_only_with_blocks(folder: Path, tmp_path: Path) -> None:
    by_prefixes, by_blocks = (template(folder, tmp_path, "chatml", blocks=blocks) for blocks in (False, True))
    messages = [{"role": role, "content": text} for role, text in zip(("assistant", "user") * 2, "abcd", strict=True)]
    ((_, samples, reason),) = by_prefixes.encode([Conversation("x", messages)], table(folder))
    assert reason.startswith("the conversation begins with the assistant")
    ((_, blocks, _),) = by_blocks.encode([Conversation("x", messages)], table(folder))
    assert trained(samples) < trained(blocks)
    assert len(trained(blocks)) == 2


def test_text_comes_token_by_token_as_from_the_whole(folder: Path) -> None:
    """In time that is linear: of 4,000 tokens no more than the last ones are decoded again."""
    tokenizer = Tokenizer(folder, None)
    known, sizes = PromptTokenizer(tokenizer), []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: (sizes.append(len(ids)), decode(ids))[1]  # type: ignore[method-assign]
    text = "schön 東京 🙂  it returns\n\n the name <|im_end|>" * 100
    parts = list(known.decode(known.encode(text)))
    assert "".join(parts) == text
    assert len(parts) > 1000
    assert max(sizes) < 12


def test_what_a_template_refuses_is_said(folder: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}]
    for blocks in (False, True):
        gemma = template(folder, tmp_path, "gemma2", blocks=blocks)
        ((_, samples, reason),) = gemma.encode([Conversation("x", messages)], table(folder))
        assert not samples
        assert "System role not supported" in reason


def test_a_folder_without_a_template_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="has no chat template"):
        ChatTemplate(folder)
    with pytest.raises(PlanError, match=r"the folder .* does not exist"):
        ChatTemplate(tmp_path / "absent")
    with pytest.raises(PlanError, match="cannot be read"):
        ChatTemplate(folder, tmp_path / "absent.jinja")
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(PlanError, match="transformers cannot load the tokenizer"):
        ChatTemplate(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(PluginError, match=r"needs the packages `transformers` and `jinja2`"):
        ChatTemplate(folder)
