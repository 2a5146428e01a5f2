"""Uses the weights of a run: `train-cli sample` continues a text, `chat` holds a conversation, and `eval` prints the held-out
loss or the metrics of lm-eval's tasks.

`chat` and `sample` use transformers' `generate` and its KV cache if transformers has the model. For other models, and for texts
that exceed the model's positions, `sample` recomputes the whole window for each token.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sley_core.data.dataset import TextIds
from sley_core.errors import PlanError, RunError, UsageError
from sley_core.files import PLAN_FILE
from sley_core.json_text import write_json
from sley_core.plan.loader import PluginLoader
from sley_core.plan.plan import Plan
from sley_core.plan.tables import metric_row_key
from sley_core.plugin import CrossEntropyConfig
from sley_core.records import DatasetRecord, ModelRecord
from sley_core.weight_files.read import CONFIG_FILE, merge_adapters
from train_cli.commands.export import make_hugging_face_model, write_config_files
from train_cli.console import BestOption, SamplingSeedOption, TemperatureOption, TopKOption, describe_repetition, print_line
from train_cli.main import import_optional
from train_cli.saved_run import SUMMARY, load_run_plan, open_trained_run, open_weights

if TYPE_CHECKING:
    from torch import Tensor

    from sley_trainer.run import Run


def sample(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, runs/NAME; a checkpoint, or an exported transformers folder.")
    ],
    prompt: Annotated[list[str], typer.Option("--prompt", metavar="TEXT", help="The text to continue. Can be repeated.")],
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="The maximum number of tokens.")] = 200,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = None,
    seed: SamplingSeedOption = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Format the prompt as a user's message with the chat template, and print the answer.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json or its folder, if the plan has none.")
    ] = None,
    best: BestOption = False,
) -> None:
    """Generate text after a prompt from a run's weights, and print it token by token."""
    if not all(prompt):
        raise UsageError("empty-prompt", "the prompt is empty", hint="use a `--prompt` of at least one letter")
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed}
    plan = load_run_plan(Path(run)) if (Path(run) / PLAN_FILE).is_file() else None
    text_ids = None if plan is None else load_text_ids(plan, tokenizer)  # fails now if the data have no vocabulary
    window_plan = plan if len(prompt) == 1 and not chat else None  # only one prompt can be continued without transformers
    if window_plan is None or _has_cache(window_plan):
        generator, text_ids = open_generator(run, best=best, tokenizer=tokenizer, feature="`train-cli sample`")
        if chat:
            ids = [generator.encode_chat([{"role": "user", "content": text}]) for text in prompt]
            contexts: list[list[int]] = [[] for _ in prompt]
        else:
            ids = [_encode_prompt(text_ids, text) for text in prompt]
            contexts = [row[text_ids.num_before :] for row in ids]
        length = max(map(len, ids))
        if window_plan is None or length + tokens <= (generator.max_length or math.inf):
            num_tokens = limit_tokens(generator, length, tokens)
            steps = generator.generate(ids, tokens=num_tokens, **options)
            # A single answer is printed while it is generated.
            answers = [(row[0] for row in steps)] if len(ids) == 1 else zip(*steps, strict=True)
            for context, answer in zip(contexts, answers, strict=True):
                _print_text(text_ids, chain(context, (token for token in answer if token is not None)))
            if num_tokens < tokens:
                print_line(f"the model has {generator.max_length} positions")
            return
    assert text_ids is not None, "a run folder has a plan"
    prompt_ids = _encode_prompt(text_ids, prompt[0])
    with open_trained_run(Path(run), window_plan, best=best) as model:
        answer = islice(generate(model, prompt_ids, text_ids.size, **options), tokens)
        answer = takewhile(lambda token: token != text_ids.end, answer)
        # The decoder may need the prompt's ids as context.
        _print_text(text_ids, chain(prompt_ids[text_ids.num_before :], answer))


def _has_cache(plan: Plan) -> bool:
    """Returns whether transformers' KV cache can be used: transformers has the plan's model, and sley-hf is installed."""
    record = plan.model.record
    return isinstance(record, ModelRecord) and record.hugging_face is not None and find_spec("sley_hf") is not None


def _encode_prompt(text_ids: TextIds, prompt: str) -> list[int]:
    """Returns the token ids of a prompt. Raises UsageError "empty-prompt" if they are only special tokens."""
    ids = text_ids.encode(prompt)
    if len(ids) == text_ids.num_before:
        raise UsageError("empty-prompt", "the tokenizer produces no tokens for the prompt", hint="use another `--prompt`")
    return ids


def _print_text(text_ids: TextIds, ids: Iterable[int]) -> None:
    """Prints the text of token ids, piece by piece while `ids` yields them, and a newline."""
    for text in text_ids.decode(ids):
        print(text, end="", flush=True)
    print()


def generate(run: "Run", ids: Sequence[int], size: int, *, temperature: float, top_k: int | None, seed: int) -> Iterator[int]:
    """Yields token ids that continue `ids`, without end. The model sees at most the last ids that fit into one sample. size:
    the number of possible ids. temperature: 0 always takes the most likely id. top_k: the number of most likely ids from which
    to choose; None allows all ids. seed: the seed of the choices. Raises UsageError "sample-fields" or "no-logits" for an
    unsuitable model, and RunError "not-finite" if a logit is not finite.
    """
    import torch

    contents = _find_field_contents(run)
    window = run.dataset.info.sequence
    sequence = list(ids)
    generator = torch.Generator().manual_seed(seed)
    while True:
        logits = _predict_logits(run, contents, sequence[-window:] if window else sequence, size)
        if not bool(logits.isfinite().all()):
            raise RunError("not-finite", "the model's logits are not finite", hint="check its weights, which may be damaged")
        if temperature == 0:
            token = int(logits.argmax())
        else:
            if top_k is not None and top_k < len(logits):
                logits = logits.where(logits >= logits.topk(top_k).values[-1], -torch.inf)
            # Subtracting the largest logit prevents an overflow at any temperature.
            weights = ((logits - logits.max()) / temperature).exp()
            token = int(torch.multinomial(weights, 1, generator=generator))
        sequence.append(token)
        yield token


def _find_field_contents(run: "Run") -> dict[str, str]:
    """Returns the content of each field that the model reads, by name: "tokens", "positions" or "cu_seqlens". Raises UsageError
    "sample-fields" if a layer reads another field.
    """
    info = run.dataset.info
    ids = [name for name, field in info.fields.items() if field.ids == "token"]
    contents = dict.fromkeys(ids[:1], "tokens") | {name: name for name in ("positions", "cu_seqlens")}
    for layer in run.layers:
        for name in layer.fields:
            if name not in contents:
                message = f"layer `{layer.name}` reads the field `{name}`, which a prompt does not have"
                hint = "use `run.predict(batch)` in your own program: docs/how-to.md"
                if not ids:
                    table = f'`{name} = {{dtype = "int64", sequence_dim = 1, ids = "token"}}`'
                    hint = f"declare the token ids in [data.fields] of `plan.toml` in the run's folder, for example {table}"
                raise UsageError("sample-fields", message, hint=hint)
    return {name: contents[name] for layer in run.layers for name in layer.fields}


def _predict_logits(run: "Run", contents: Mapping[str, str], ids: Sequence[int], size: int) -> "Tensor":
    """Returns the next token's logits, float64 [size], on the host. Raises UsageError "no-logits" if the model returns none."""
    import torch

    values = {"tokens": [list(ids)], "positions": [list(range(len(ids)))], "cu_seqlens": [[0, len(ids)]]}
    declared = run.dataset.info.fields
    batch = {
        name: torch.tensor(values[content], dtype=getattr(torch, declared[name].dtype)) for name, content in contents.items()
    }
    output = run.predict(batch)
    shape = (1, len(ids))
    if not isinstance(output, torch.Tensor) or output.ndim != 3 or output.shape[:2] != shape or output.shape[2] < size:
        actual = f"a tensor of {list(output.shape)}" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
        message = f"the model must return logits of shape [1, {len(ids)}, {size} or more], but returns {actual}"
        raise UsageError("no-logits", message, hint="use a model that returns a logit for each token")
    return output[0, -1, :size].double().cpu()


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
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        message = line.strip()
        if not line or message == "/quit":
            return
        if message == "/reset":
            messages = list(system_messages)
        elif message:
            messages.append({"role": "user", "content": message})
            ids = _encode_messages(generator, messages, len(system_messages))
            num_tokens = limit_tokens(generator, len(ids), tokens)
            steps = generator.generate([ids], tokens=num_tokens, temperature=temperature, top_k=top_k, seed=seed)
            messages.append({"role": "assistant", "content": _print_answer(text_ids, steps)})


def _print_answer(text_ids: TextIds, steps: Any) -> str:
    """Prints an answer while it is generated, until Ctrl-C, and returns it. steps: yields [token id], and [None] at the end."""
    answer, ids = "", []

    def tokens() -> Iterator[int]:
        for (token,) in steps:
            ids.append(token)
            if token is not None:
                yield token

    with suppress(KeyboardInterrupt), closing(steps):
        for text in text_ids.decode(tokens()):
            answer += text
            print(text, end="", flush=True)
    print(flush=True)
    if ids and ids[-1] is not None:
        print_line("the answer has no end token yet")
    return answer


def _encode_messages(generator: Any, messages: list[dict[str, str]], num_system: int) -> list[int]:
    """Returns the token ids of `messages`. If there are too many, removes the oldest turns after `num_system` messages."""
    while True:
        ids: list[int] = generator.encode_chat(messages)
        if generator.max_length is None or len(ids) < generator.max_length or len(messages) <= num_system + 1:
            return ids
        del messages[num_system : num_system + 2]
        print_line("the conversation has more tokens than the model has positions, so its oldest turn is removed")


def limit_tokens(generator: Any, prompt_length: int, max_new_tokens: int) -> int:
    """Returns the number of new tokens that fit after a prompt of `prompt_length` tokens, at most `max_new_tokens`. generator:
    a `sley_hf.generate.Generator`. Raises UsageError "prompt-long" if no token fits.
    """
    if generator.max_length is None or prompt_length + max_new_tokens <= generator.max_length:
        return max_new_tokens
    if prompt_length >= generator.max_length:
        message = f"the prompt has {prompt_length} tokens, but the model has only {generator.max_length} positions"
        raise UsageError("prompt-long", message, hint="use a shorter prompt")
    return int(generator.max_length - prompt_length)


def open_generator(run: str, *, best: bool = False, tokenizer: Path | None = None, feature: str) -> tuple[Any, TextIds]:
    """Returns a `sley_hf.generate.Generator` with the weights of a run, a checkpoint or an exported folder, and the mapping
    between text and token ids. best: whether to use a run's best checkpoint. tokenizer: the tokenizer to use in place of the
    run's, or None. feature: the command, for messages. Raises PluginError "command-missing" if sley-hf is not installed, and
    UsageError "no-chat" if transformers has no such model.
    """
    generate = import_optional("hf", "sley_hf.generate", feature)
    if (Path(run) / CONFIG_FILE).is_file() and not (Path(run) / PLAN_FILE).is_file():  # a transformers model
        text_ids = load_text_ids(None, tokenizer or Path(run))
        return generate.Generator(Path(run), stop=() if text_ids.end is None else (text_ids.end,)), text_ids
    plan, source = open_weights(run, best=best)
    text_ids = load_text_ids(plan, tokenizer)
    if plan.adapters is not None:
        source = merge_adapters(plan, source)
    model = make_hugging_face_model(plan, source)
    if model is None:
        hint = "use `hf.decoder` or `models.llama`"
        raise UsageError("no-chat", f"{feature} needs a transformers model, but `{plan.model.name}` is not one", hint=hint)
    with TemporaryDirectory() as folder:
        write_config_files(plan, model, Path(folder))
        state = {hf_name: source.tensor(name) for name, hf_name in model.names.items()}
        return generate.Generator(Path(folder), state, () if text_ids.end is None else (text_ids.end,)), text_ids


def load_text_ids(plan: Plan | None, tokenizer: Path | None) -> TextIds:
    """Returns the mapping between text and token ids of the tokenizer at the path `tokenizer`, or, if it is None, of the plan's
    data. At least one argument must not be None. Raises UsageError "no-vocabulary" if the plan's data has no such mapping, and
    PluginError if sley-data is needed and not installed.
    """
    if plan is None or tokenizer is not None:
        record: Any = (PluginLoader() if plan is None else plan.loader).record(DatasetRecord, "data.text")
    else:
        record = plan.data.record
    if not isinstance(record, DatasetRecord) or record.text_ids is None:
        assert plan is not None, tokenizer
        hint = "pass the tokenizer that produced the token ids: `--tokenizer PATH`"
        raise UsageError("no-vocabulary", f"the data of this run, `{plan.data.name}`, has no tokenizer", hint=hint)
    ids: TextIds = record.load(record.text_ids)(None if plan is None else plan.data.config, tokenizer)
    return ids


def eval(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The folder of a run: runs/NAME. For --harness also a checkpoint, or an exported folder."
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="KEY=VALUE",
            help="Change a key of [data], such as 'held_out_files=[\"other.txt\"]'; VALUE is TOML. Can be repeated.",
        ),
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            "--harness", metavar="TASKS", help="Tasks of lm-eval, separated by commas, to run instead of [evaluation]."
        ),
    ] = None,
    include: Annotated[
        Path | None,
        typer.Option(
            "--include", metavar="DIR", help="A folder with tasks in lm-eval's format, which replace lm-eval's own tasks."
        ),
    ] = None,
    best: BestOption = False,
) -> None:
    """Print the metrics of `[evaluation]` for a run's weights, and bits per byte if the tokens are bytes."""
    if harness is not None:
        if data:
            raise UsageError("harness-task", "tasks of lm-eval have their own data", hint="remove `--data`")
        _evaluate_tasks(run, harness.split(","), include, best=best)
    else:
        _evaluate_run(Path(run), data or [], best=best)


def _evaluate_tasks(run: str, tasks: list[str], include: Path | None, *, best: bool) -> None:
    """Prints the metrics of lm-eval's `tasks`, and adds them to `summary.json` in the run folder, if this file exists."""
    generator, _ = open_generator(run, best=best, feature="`train-cli eval --harness`")
    results = import_module("sley_hf.generate").evaluate_tasks(generator, tasks, include)
    metrics = {f"{task}/{name}": value for task, values in results.items() for name, value in values.items()}
    _print_metrics(metrics)
    summary = Path(run) / SUMMARY
    if summary.is_file():
        content = json.loads(summary.read_text("utf-8"))
        content.setdefault("harness", {}).setdefault("best" if best else "newest", {}).update(metrics)
        write_json(summary, content)


def _evaluate_run(run: Path, data: list[str], *, best: bool) -> None:
    """Prints the metrics of `[evaluation]` for the weights in the run folder `run`. data: changes to `[data]` ("key=VALUE")."""
    plan = load_run_plan(run, data)
    with ExitStack() as stack:
        try:
            model = stack.enter_context(open_trained_run(run, plan, best=best, with_evaluation=True))
        except PlanError as error:
            # Another split of the run's own data would hold out samples on which the run was trained.
            hint = "use other data: `--data 'held_out_files=[\"other.txt\"]'`"
            diagnostics = (replace(each, hint=hint) if each.code == "held-out" else each for each in error.diagnostics)
            raise PlanError.from_diagnostics(diagnostics) from error
        if data and (note := _describe_overlap(load_run_plan(run), plan)):
            print_line(note)
        metrics = model.evaluate_sets()
        evaluation = model.plan.evaluation
        assert evaluation is not None
        if model.held_out is not None and (note := describe_repetition(model.held_out.num_samples, model.plan)):
            print_line(note)
    if (loss := metrics.pop(metric_row_key("loss"), None)) is not None:
        typer.echo(f"held-out loss  {loss:.4f}  ({evaluation.steps} batches of {plan.batch.global_size} samples)")
        if _is_nats_per_byte(plan):
            typer.echo(f"bits per byte  {loss / math.log(2):.4f}")
    _print_metrics(metrics)


def _print_metrics(metrics: Mapping[str, float]) -> None:  # in aligned columns
    for name, value in metrics.items():
        typer.echo(f"{name:<{max(map(len, metrics))}}  {value:.4f}")


def _is_nats_per_byte(plan: Plan) -> bool:
    """Returns whether the plan's loss is in nats per byte: a plain cross-entropy of text whose tokens are bytes."""
    record, loss = plan.data.record, plan.loss.config
    if not isinstance(loss, CrossEntropyConfig) or loss.label_smoothing or not isinstance(record, DatasetRecord):
        return False
    return record.text_ids is not None and record.load(record.text_ids)(plan.data.config, None).is_bytes


def _describe_overlap(run_plan: Plan, plan: Plan) -> str:
    """Returns a note if the run was trained on documents that the evaluation uses, else "". run_plan: the run's plan. plan: the
    same plan with the data of the evaluation.
    """
    record = plan.data.record
    if not isinstance(record, DatasetRecord) or record.describe_overlap is None or run_plan.data.name != plan.data.name:
        return ""
    note: str = record.load(record.describe_overlap)(run_plan.data.config, plan.data.config)
    return note
