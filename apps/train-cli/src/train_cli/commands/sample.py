"""`train-cli sample RUN --prompt TEXT`: generates text from a run's weights."""

from __future__ import annotations

import sys
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Annotated

import typer

from sley_core.errors import UsageError
from train_cli.console import say
from train_cli.trained import plan_of, trained_run


def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run: runs/NAME.")],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to continue.")],
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="Generate at most so many tokens.")] = 200,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="1 draws as the model says; 0 takes the likeliest.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", min=1, help="Draw from the K likeliest tokens only.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Another seed draws another text.")] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json or its folder, where the plan names none."),
    ] = None,
) -> None:
    """Generate text from a run's weights, after a prompt, and print it as it comes."""
    if not prompt:
        raise UsageError("empty-prompt", "the model needs a text to continue", hint="give a `--prompt` of one letter")
    plan = plan_of(run)
    import torch

    from train_cli.sampling import generate, text_ids

    known = text_ids(plan, tokenizer)
    ids = known.encode(prompt)
    if len(ids) == known.num_before:
        raise UsageError("empty-prompt", "the tokenizer knows nothing of the prompt", hint="give another `--prompt`")
    with trained_run(run, plan) as (model, which):
        say(which)
        generator = torch.Generator().manual_seed(seed)
        drawn = generate(model, ids, known.size, temperature=temperature, top_k=top_k, generator=generator)
        written = takewhile(lambda one: one != known.end, islice(drawn, tokens))
        # The prompt's ids too, so that a decoder that looks back has them.
        for text in known.decode(chain(ids[known.num_before :], written)):
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
