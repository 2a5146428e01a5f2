"""`train-cli sample RUN --prompt TEXT` generates text from a run's weights; `train-cli eval RUN` prints their held-out loss.

Sampling has no KV cache: each token recomputes the whole window.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sley_core.config import CrossEntropyConfig
from sley_core.errors import PlanError, RunError, UsageError
from sley_core.plan.tables import row_name
from sley_core.records import DatasetRecord
from train_cli.console import say
from train_cli.one_process import open_trained_run, plan_with_data
from train_cli.options import BestOption
from train_cli.progress import repeats

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sley_core.data.dataset import TextIds
    from sley_core.plan.plan import Plan
    from sley_core.run import Run


def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run: runs/NAME.")],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to continue.")],
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="The maximum number of tokens.")] = 200,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="1 samples the model's distribution; 0 is greedy.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", min=1, help="Sample only from the K most likely tokens.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The seed of the sampling.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json or its folder, if the plan has none.")
    ] = None,
    best: BestOption = False,
) -> None:
    """Generate text after a prompt from a run's weights, and print it token by token."""
    if not prompt:
        raise UsageError("empty-prompt", "the prompt is empty", hint="use a `--prompt` of at least one letter")
    plan = plan_with_data(run)
    import torch

    text_ids = _text_ids(plan, tokenizer)
    ids = text_ids.encode(prompt)
    if len(ids) == text_ids.num_before:
        raise UsageError("empty-prompt", "the tokenizer has no tokens for the prompt", hint="use another `--prompt`")
    with open_trained_run(run, plan, best=best) as (model, description):
        say(description)
        generator = torch.Generator().manual_seed(seed)
        tokens_drawn = generate(model, ids, text_ids.size, temperature=temperature, top_k=top_k, generator=generator)
        answer = takewhile(lambda token: token != text_ids.end, islice(tokens_drawn, tokens))
        # The decoder may need the prompt's ids as context.
        for text in text_ids.decode(chain(ids[text_ids.num_before :], answer)):
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")


def _text_ids(plan: Plan, tokenizer: Path | None) -> TextIds:
    """Returns the mapping between text and ids of `tokenizer`, or of the plan's data if `tokenizer` is None.

    Raises UsageError "no-vocabulary" if the plan's data has no such mapping, and PluginError if sley-data is needed and not
    installed.
    """
    record = plan.data.record if tokenizer is None else plan.loader.record("datasets", "data.text")
    if not isinstance(record, DatasetRecord) or record.text_ids is None:
        hint = "use `--tokenizer PATH` with the tokenizer that made its token ids"
        raise UsageError("no-vocabulary", f"the data of this run, `{plan.data.name}`, has no tokenizer", hint=hint)
    ids: TextIds = record.load(record.text_ids)(plan.data.config, tokenizer)
    return ids


def generate(
    run: Run, ids: Sequence[int], size: int, *, temperature: float, top_k: int | None, generator: torch.Generator
) -> Iterator[int]:
    """Yields ids that follow `ids`, without end. The model's context is the last ids, as many as a sample of its data has.

    size: the number of ids. temperature: 0 takes the most likely id. top_k: samples from this number of most likely ids.
    Raises UsageError "sample-fields" or "no-logits" if the model does not predict tokens, and RunError "not-finite".
    """
    import torch

    roles = _roles(run)
    window = run.dataset.info.sequence
    sequence = list(ids)
    for layer in run.layers:
        layer.module.eval()
    while True:
        logits = _logits(run, roles, sequence[-window:] if window else sequence, size)
        if not bool(logits.isfinite().all()):
            raise RunError("not-finite", "the model's logits are not finite", hint="check its weights, which may be damaged")
        if temperature == 0:
            token = int(logits.argmax())
        else:
            if top_k is not None and top_k < len(logits):
                logits = logits.where(logits >= logits.topk(top_k).values[-1], -torch.inf)
            # Relative to the largest, so that no temperature overflows.
            odds = ((logits - logits.max()) / temperature).exp()
            token = int(torch.multinomial(odds, 1, generator=generator))
        sequence.append(token)
        yield token


def _roles(run: Run) -> dict[str, str]:
    """Returns the content of each batch field that the model reads: "tokens", "positions" or "cu_seqlens"."""
    info = run.dataset.info
    ids = [name for name, field in info.fields.items() if field.ids == "token"]
    roles = dict.fromkeys(ids[:1], "tokens") | {name: name for name in ("positions", "cu_seqlens")}
    for layer in run.layers:
        for name in layer.fields:
            if name not in roles and not ids:
                message = f"layer `{layer.name}` reads `{name}`, but no field of the data is declared as token ids"
                table = f'`{name} = {{dtype = "int64", sequence_dim = 1, ids = "token"}}`'
                hint = f"add them to [data.fields] of `plan.toml` in the run's folder, for example {table}"
                raise UsageError("sample-fields", message, hint=hint)
            if name not in roles:
                message = f"layer `{layer.name}` reads the field `{name}`, which a prompt does not have"
                hint = "use `run.predict(batch)` in your own program: docs/how-to.md"
                raise UsageError("sample-fields", message, hint=hint)
    return {name: roles[name] for layer in run.layers for name in layer.fields}


def _logits(run: Run, roles: Mapping[str, str], ids: Sequence[int], size: int) -> Tensor:
    """Returns the logits of the next token, float64 [size], on the host."""
    import torch

    values = {"tokens": [list(ids)], "positions": [list(range(len(ids)))], "cu_seqlens": [[0, len(ids)]]}
    declared = run.dataset.info.fields
    device = run.world.device.torch_device
    with torch.no_grad():
        fields = {
            name: torch.tensor(values[role], dtype=getattr(torch, declared[name].dtype), device=device)
            for name, role in roles.items()
        }
        output: Any = None
        for number, layer in enumerate(run.layers):
            inputs = {name: fields[name] for name in layer.fields}
            output = layer.module(output, **inputs) if number else layer.module(**inputs)
    shape = (1, len(ids))
    if not isinstance(output, torch.Tensor) or output.ndim != 3 or output.shape[:2] != shape or output.shape[2] < size:
        actual = f"a tensor of {list(output.shape)}" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
        message = f"the model must return logits [1, {len(ids)}, {size} or more], but returns {actual}"
        raise UsageError("no-logits", message, hint="use a model that returns a logit for each token")
    return output[0, -1, :size].double().cpu()


def eval(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run: runs/NAME.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="KEY=VALUE",
            help="Change a key of [data], such as 'held_out_files=[\"other.txt\"]'; VALUE is TOML. May be given several times.",
        ),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option("--batches", metavar="N", min=1, help="Batches of batch.global_size; default: evaluation.steps."),
    ] = None,
    best: BestOption = False,
) -> None:
    """Print the numbers of `[evaluation]` of a run's weights, and bits per byte if the tokens are bytes."""
    plan = plan_with_data(run, data or [])
    with ExitStack() as stack:
        try:
            opened = open_trained_run(run, plan, best=best, with_evaluation=True, batches=batches)
            model, description = stack.enter_context(opened)
        except PlanError as error:
            # Another split of the run's own data would hold out samples on which it was trained.
            hint = "use other data: `--data 'held_out_files=[\"other.txt\"]'`"
            diagnostics = (replace(each, hint=hint) if each.code == "held-out" else each for each in error.diagnostics)
            raise PlanError.from_diagnostics(diagnostics) from error
        say(description)
        if data and (note := _trained_on(plan_with_data(run), plan)):
            say(note)
        numbers = model.evaluate_sets()
        evaluation = model.plan.evaluation
        assert evaluation is not None
        if model.held_out is not None and (note := repeats(model.held_out.num_samples, model.plan)):
            say(note)
    if (loss := numbers.pop(row_name("loss"), None)) is not None:
        typer.echo(f"held-out loss  {loss:.4f}  ({evaluation.steps} batches of {plan.batch.global_size} samples)")
        if _is_nats_per_byte(plan):
            typer.echo(f"bits per byte  {loss / math.log(2):.4f}")
    width = max(map(len, numbers), default=0)
    for name, value in numbers.items():
        typer.echo(f"{name:<{width}}  {value:.4f}")


def _is_nats_per_byte(plan: Plan) -> bool:
    record, loss = plan.data.record, plan.loss.config
    if not isinstance(loss, CrossEntropyConfig) or loss.label_smoothing or not isinstance(record, DatasetRecord):
        return False
    return record.text_ids is not None and record.load(record.text_ids)(plan.data.config, None).is_bytes


def _trained_on(own: Plan, plan: Plan) -> str:
    """Returns a note on the evaluated documents on which the run was trained, or "". own: the run's plan. plan: the plan with
    the evaluated data.
    """
    record = plan.data.record
    if not isinstance(record, DatasetRecord) or record.describe_overlap is None or own.data.name != plan.data.name:
        return ""
    note: str = record.load(record.describe_overlap)(own.data.config, plan.data.config)
    return note
