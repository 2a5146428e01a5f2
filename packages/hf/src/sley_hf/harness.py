"""Evaluates a model on tasks of lm-eval, for `train-cli eval --harness`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sley_core.errors import PluginError, UsageError
from sley_hf.generate import Generator


def evaluate_tasks(generator: Generator, names: Sequence[str], include: Path | None) -> dict[str, dict[str, float]]:
    """Returns the numbers of each task, such as `{"mine": {"acc,none": 0.5}}`, as lm-eval computes them with its `HFLM`.

    names: tasks, groups, or patterns of these. include: a folder with tasks in lm-eval's format, in place of its own, whose
    list takes long to read. Raises PluginError "plugin-import" without lm-eval, and UsageError "harness-task" or
    "no-vocabulary".
    """
    try:
        from lm_eval import simple_evaluate  # type: ignore[import-not-found, unused-ignore]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found, unused-ignore]
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        hint = """install sley-hf[eval]; in a clone of Sley's repository, run `pip install -e "packages/hf[eval]"`"""
        raise PluginError("plugin-import", f"`--harness` needs lm-eval: {error}", hint=hint) from error
    if generator.tokenizer is None:
        hint = "train with a tokenizer of Hugging Face, `[data] tokenizer`"
        raise UsageError(
            "no-vocabulary", "lm-eval needs a tokenizer of transformers, which this model does not have", hint=hint
        )
    manager = TaskManager(include_path=include, include_defaults=include is None)
    for name in names:
        if not manager.match_tasks([name]):
            place = "lm-eval" if include is None else f"`{include}`"
            hint = "`lm-eval ls tasks` lists lm-eval's tasks, and `--include DIR` takes those of a folder"
            raise UsageError("harness-task", f"{place} has no task `{name}`", hint=hint)
    model = HFLM(pretrained=generator.model, tokenizer=generator.tokenizer)
    results: Any = simple_evaluate(model, tasks=list(names), task_manager=manager, log_samples=False, bootstrap_iters=0)
    return {
        task: {name: float(value) for name, value in values.items() if isinstance(value, float) and "_stderr" not in name}
        for task, values in results["results"].items()
    }
