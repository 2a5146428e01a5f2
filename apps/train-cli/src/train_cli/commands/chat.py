"""`train-cli chat RUN`: a conversation with a trained model in the terminal. Also opens the models for `train-cli sample`."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from sley_core.data.dataset import TextIds
from sley_core.errors import UsageError
from sley_core.files import PLAN_FILE
from sley_core.plan.loader import PluginLoader
from sley_core.plan.plan import Plan
from sley_core.records import DatasetRecord
from sley_core.weight_files.read import CONFIG_FILE, merge_adapters
from train_cli.commands.export import hugging_face_model, write_other_files
from train_cli.console import BestOption, SamplingSeedOption, TemperatureOption, TopKOption, print_line
from train_cli.main import import_optional
from train_cli.saved import open_weights


def chat(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, a checkpoint, or a folder of `export --format huggingface`.")
    ],
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="The maximum length of an answer.")] = 512,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = None,
    seed: SamplingSeedOption = 0,
    best: BestOption = False,
) -> None:
    """Talk to a trained model in the terminal."""
    generator, text_ids = open_generator(run, best=best, feature="`train-cli chat`")
    system_messages = [] if system is None else [{"role": "system", "content": system}]
    messages = list(system_messages)
    generator.encode_chat([*system_messages, {"role": "user", "content": "?"}])  # fails now if the model has no chat template
    print_line("Type a message, /reset to forget the conversation, /quit to leave; Ctrl-C stops an answer.")
    for line in _read_lines():
        if line == "/quit":
            return
        if line == "/reset":
            messages = list(system_messages)
        elif line:
            messages.append({"role": "user", "content": line})
            ids = _encode_messages(generator, messages, len(system_messages))
            num_tokens = limit_tokens(generator, len(ids), tokens)
            steps = generator.generate([ids], tokens=num_tokens, temperature=temperature, top_k=top_k, seed=seed)
            messages.append({"role": "assistant", "content": _print_answer(text_ids, steps)})


def _read_lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            sys.stdout.write("> ")
            sys.stdout.flush()
        if not (line := sys.stdin.readline()):
            return
        yield line.strip()


def _print_answer(text_ids: TextIds, steps: Any) -> str:
    """Prints an answer while it is generated, until Ctrl-C, and returns it. steps: yields [token id], and [None] at the end."""
    text, ids = "", []

    def tokens() -> Iterator[int]:
        for (token,) in steps:
            ids.append(token)
            if token is not None:
                yield token

    try:
        with closing(steps):
            for part in text_ids.decode(tokens()):
                text += part
                sys.stdout.write(part)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    sys.stdout.write("\n")
    sys.stdout.flush()
    if ids and ids[-1] is not None:
        print_line("the answer has no end token yet")
    return text


def _encode_messages(generator: Any, messages: list[dict[str, str]], num_system: int) -> list[int]:
    """Returns the token ids of the conversation, from which it removes the oldest turns until the model has enough positions.

    num_system: the number of system messages, which are kept.
    """
    while True:
        ids: list[int] = generator.encode_chat(messages)
        if generator.max_length is None or len(ids) < generator.max_length or len(messages) <= num_system + 1:
            return ids
        del messages[num_system : num_system + 2]
        print_line("the conversation is too long for the model, which forgets its first turn")


def limit_tokens(generator: Any, num_ids: int, tokens: int) -> int:
    """Returns the number of new tokens, at most `tokens`, that fit. Raises UsageError "prompt-long" if none fits."""
    if generator.max_length is None or num_ids + tokens <= generator.max_length:
        return tokens
    if num_ids >= generator.max_length:
        message = f"the prompt has {num_ids} tokens, and the model has {generator.max_length} positions"
        raise UsageError("prompt-long", message, hint="use a shorter prompt")
    return int(generator.max_length - num_ids)


def open_generator(run: str, *, best: bool = False, tokenizer: Path | None = None, feature: str) -> tuple[Any, TextIds]:
    """Returns a `sley_hf.generate.Generator` with the weights of a run, a checkpoint or an exported folder, and the mapping
    between text and token ids. feature: the command, for errors.

    Raises PluginError "command-missing" without sley-hf, and UsageError "no-chat" if transformers has no such model.
    """
    generate = import_optional("hf", "sley_hf.generate", feature)
    if (Path(run) / CONFIG_FILE).is_file() and not (Path(run) / PLAN_FILE).is_file():  # a transformers model
        text_ids = load_text_ids(None, tokenizer or Path(run))
        return generate.Generator(Path(run), stop=() if text_ids.end is None else (text_ids.end,)), text_ids
    plan, source = open_weights(run, best=best)
    text_ids = load_text_ids(plan, tokenizer)
    if plan.adapters is not None:
        source = merge_adapters(plan, source)
    model = hugging_face_model(plan, source)
    if model is None:
        hint = "use `hf.decoder` or `models.llama`"
        raise UsageError("no-chat", f"{feature} needs a transformers model, unlike `{plan.model.name}`", hint=hint)
    with TemporaryDirectory() as folder:
        write_other_files(plan, model, Path(folder))
        state = {hf_name: source.tensor(name) for name, hf_name in model.names.items()}
        return generate.Generator(Path(folder), state, () if text_ids.end is None else (text_ids.end,)), text_ids


def load_text_ids(plan: Plan | None, tokenizer: Path | None) -> TextIds:
    """Returns the mapping between text and ids of `tokenizer`, or of the plan's data if `tokenizer` is None.

    Raises UsageError "no-vocabulary" if the plan's data has no such mapping, and PluginError if sley-data is needed and not
    installed.
    """
    if plan is None or tokenizer is not None:
        record: Any = (PluginLoader() if plan is None else plan.loader).record(DatasetRecord, "data.text")
    else:
        record = plan.data.record
    if not isinstance(record, DatasetRecord) or record.text_ids is None:
        assert plan is not None, tokenizer
        hint = "use `--tokenizer PATH` with the tokenizer that made its token ids"
        raise UsageError("no-vocabulary", f"the data of this run, `{plan.data.name}`, has no tokenizer", hint=hint)
    ids: TextIds = record.load(record.text_ids)(None if plan is None else plan.data.config, tokenizer)
    return ids
