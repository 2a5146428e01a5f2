"""`train-cli eval RUN`: the held-out loss of a run's weights, by the run's own evaluation."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sley_core.config import CrossEntropyConfig
from sley_core.errors import PlanError, SleyError
from sley_core.records import DatasetRecord
from train_cli.console import say
from train_cli.progress import repeats
from train_cli.trained import plan_of, trained_run

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


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
        typer.Option("--batches", metavar="N", min=1, help="Batches of batch.global_size; left out, evaluation.steps."),
    ] = None,
) -> None:
    """Print the held-out loss of a run's weights; of a model over bytes, bits per byte too."""
    plan = plan_of(run, data or [])
    with ExitStack() as stack:
        try:
            model, which = stack.enter_context(trained_run(run, plan, evaluates=True, batches=batches))
        except PlanError as error:
            raise _with_remedy(error) from error
        say(which)
        if data and (note := _trained_on(plan_of(run), plan)):
            say(note)
        loss = model.evaluate()
        evaluation = model.plan.evaluation
        assert evaluation is not None
        assert model.held_out is not None
        if note := repeats(model.held_out.num_samples, model.plan):
            say(note)
    typer.echo(f"held-out loss  {loss:.4f}  ({evaluation.steps} batches of {plan.batch.global_size} samples)")
    if _is_nats_per_byte(plan):
        typer.echo(f"bits per byte  {loss / math.log(2):.4f}")


def _trained_on(own: Plan, plan: Plan) -> str:
    """Returns in words which documents that `plan` evaluates the run was trained on. own: the run's plan, with its own data."""
    record = plan.data.record
    if not isinstance(record, DatasetRecord) or record.trained_on is None or own.data.name != plan.data.name:
        return ""
    words: str = record.load(record.trained_on)(own.data.config, plan.data.config)
    return words


def _with_remedy(error: PlanError) -> SleyError:
    """Returns `error`; for missing data with a remedy that fits a run that has ended: not a change of its plan, and no other
    split, whose held-out documents the run has trained on.
    """
    hint = "name other data: `--data 'held_out_files=[\"other.txt\"]'`"
    every = (replace(one, hint=hint) if one.code == "held-out" else one for one in error.diagnostics)
    return PlanError.many(every)


def _is_nats_per_byte(plan: Plan) -> bool:
    record, loss = plan.data.record, plan.loss.config
    if not isinstance(loss, CrossEntropyConfig) or loss.label_smoothing or not isinstance(record, DatasetRecord):
        return False
    return record.text_ids is not None and record.load(record.text_ids)(plan.data.config, None).is_bytes
